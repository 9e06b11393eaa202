"""Requirements as digest-keyed, read-only trees beside each other, or in place by the paper's marker protocol (`design.md` §3).

A layer is complete only with its marker, which the agent writes last, after the installer ended cleanly; jobs see layers
read-only and cannot write where markers lie. The installer takes wheels only; what has no wheel is built first, as a uid
without rights, since a build runs foreign code. Nothing is ever installed into the user's own environment.

`in_place` keeps one tree: before every install all markers are removed, so at most one exists (audit S37); installs add and
upgrade only.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from firepool_agent.janitor import Janitor
from firepool_wire.errors import DependencyInstallError
from firepool_wire.jobspec import Requirements
from firepool_wire.nursery import PodConfig

_MARKER = "firepool-complete.json"
_IN_PLACE_MARKER = "firepool-{}.complete"
_LOG_TAIL = 4_000
#: Words of pip and uv for "there is no wheel, only a source archive (or nothing at all)".
_BUILD_UID_OFFSET = 1


@dataclass(frozen=True, slots=True)
class Layer:
    """An installed tree: put `path` in front of `sys.path`."""

    digest: str
    path: str
    #: Preloaded modules that the layer has in another version: the job must start by exec, not by fork.
    shadows: tuple[str, ...] = ()
    #: It carries .pth files, which only a starting interpreter reads: exec again.
    has_pth: bool = False

    @property
    def needs_exec(self) -> bool:
        """Whether a forked interpreter would not see what a started one sees."""
        return bool(self.shadows) or self.has_pth


def clean_lines(text: str) -> list[str]:
    """Requirement lines without comments and blanks, in their order."""
    lines = (line.split(" #", 1)[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def digest_of(requirements: Requirements, python_version: str) -> str:
    """What a layer is named by: the lines and the Python that they are for."""
    text = "\n".join([python_version, *clean_lines(requirements.text)])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


class Layers:
    """Layers of one pod. A pod serves one caller in its life, so they are that caller's alone (audit S38)."""

    def __init__(self, config: PodConfig, janitor: Janitor | None = None) -> None:
        self._config = config
        self._janitor = janitor
        self._root = f"{config.caches_dir}/layers"
        self._in_place = f"{config.caches_dir}/in_place"
        self._lock = asyncio.Lock()
        self._version = config.settings.get("python_version", f"{sys.version_info[0]}.{sys.version_info[1]}")

    def present(self) -> list[str]:
        """Digests of the complete layers (claim order prefers a pod that has the one it needs)."""
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(self._root))
            return [f"sha256:{n}" for n in names if os.path.exists(f"{self._root}/{n}/{_MARKER}")]
        return []

    async def ensure(
        self, requirements: Requirements, settings: Mapping[str, str], loaded: Collection[str] = ()
    ) -> Layer:
        """The layer of these requirements, installed if it is not there; one install at a time.

        Args:
            requirements: lines and mode (None = the pool's `requirements_mode`).
            settings: installer settings of the pool: index_url, ca, proxy, wheelhouse, installer.
            loaded: top-level modules that a forked job would already have.

        Raises:
            DependencyInstallError: the installer or a build failed; `details["log"]` has its last lines.
        """
        mode = requirements.mode or self._config.settings.get("requirements_mode", "layer")
        digest = digest_of(requirements, self._version)
        async with self._lock:
            if mode == "in_place":
                path = await self._ensure_in_place(digest, requirements, settings)
            else:
                path = await self._ensure_layer(digest, requirements, settings)
        return inspect(digest, path, loaded)

    async def _ensure_layer(self, digest: str, requirements: Requirements, settings: Mapping[str, str]) -> str:
        base = f"{self._root}/{digest.removeprefix('sha256:')}"
        site = f"{base}/site"
        if os.path.exists(f"{base}/{_MARKER}"):
            return site
        shutil.rmtree(base, ignore_errors=True)
        os.makedirs(site, mode=0o755)
        try:
            await self._install(site, requirements, settings, upgrade=False)
            _mark(f"{base}/{_MARKER}", digest)
        except BaseException:
            shutil.rmtree(base, ignore_errors=True)
            raise
        return site

    async def _ensure_in_place(self, digest: str, requirements: Requirements, settings: Mapping[str, str]) -> str:
        site = f"{self._in_place}/site"
        marker = f"{site}/{_IN_PLACE_MARKER.format(digest.removeprefix('sha256:'))}"
        if os.path.exists(marker):
            return site
        os.makedirs(site, mode=0o755, exist_ok=True)
        for name in os.listdir(site):
            if name.startswith("firepool-") and name.endswith(".complete"):
                os.unlink(f"{site}/{name}")
        await self._install(site, requirements, settings, upgrade=True)
        _mark(marker, digest)
        return site

    # -- installing ----------------------------------------------------------------------------------------------

    async def _install(
        self, site: str, requirements: Requirements, settings: Mapping[str, str], *, upgrade: bool
    ) -> None:
        lines = clean_lines(requirements.text)
        if not lines:
            return
        room = f"{self._config.caches_dir}/install"
        shutil.rmtree(room, ignore_errors=True)
        os.makedirs(room, mode=0o711)
        try:
            listed = f"{room}/requirements.txt"
            with open(listed, "w") as f:
                f.write("\n".join(lines) + "\n")
            os.chmod(listed, 0o644)
            tool = Installer(self._config, settings, room)
            wheels_only = tool.install(site, listed, upgrade=upgrade)
            code, log = await _run(wheels_only, tool.environment(), room)
            if code:
                code, log = await self._build_and_install(tool, site, listed, log, upgrade=upgrade)
            if code:
                raise _refusal(lines, log, code)
        finally:
            shutil.rmtree(room, ignore_errors=True)

    async def _build_and_install(
        self, tool: "Installer", site: str, listed: str, why: str, *, upgrade: bool
    ) -> tuple[int, str]:
        """Build what has no wheel as a lowly uid, then install the wheels. Raises: DependencyInstallError."""
        uid = self._builder_uid()
        if uid is None:
            return 1, why + "\n(source builds need a uid of their own, which this pod does not have: provide a wheel)"
        built = f"{tool.room}/built"
        os.mkdir(built, 0o755)
        if uid:
            os.chown(built, uid, uid)
        try:
            code, log = await _run(_lowly(uid, tool.build(built, listed)), tool.environment(built), built)
        finally:
            if self._janitor is not None and uid:
                self._janitor.sweep(uid)
        if code:
            return code, log
        return await _run(
            tool.install(site, listed, upgrade=upgrade, extra_wheels=built), tool.environment(), tool.room
        )

    def _builder_uid(self) -> int | None:
        """A uid for builds; 0 = the agent's own (level `process`), None = builds are refused."""
        if self._config.uid_count:
            return self._config.uid_first + self._config.uid_count - _BUILD_UID_OFFSET
        return None if self._config.nested else 0


def inspect(digest: str, site: str, loaded: Collection[str]) -> Layer:
    """What a forked interpreter would miss of a layer."""
    tops, pth = set(), False
    for name in os.listdir(site):
        if name.endswith(".pth"):
            pth = True
        elif name.endswith((".dist-info", ".complete", "bin", "__pycache__")):
            continue
        else:
            tops.add(name.split(".", 1)[0])
    wanted = {module.partition(".")[0] for module in loaded}
    return Layer(digest, site, tuple(sorted(tops & wanted)), pth)


@dataclass(frozen=True, slots=True)
class Installer:
    """Command lines of uv (if it is there) or pip, with the pool's index, CA, proxy and wheelhouse."""

    config: PodConfig
    settings: Mapping[str, str]
    room: str

    def _uv(self) -> str | None:
        if self.settings.get("installer") == "pip":
            return None
        beside = os.path.join(os.path.dirname(self.config.python), "uv")
        return beside if os.access(beside, os.X_OK) else shutil.which("uv")

    def _sources(self, extra_wheels: str = "") -> list[str]:
        wheelhouse, index = self.settings.get("wheelhouse"), self.settings.get("index_url")
        words = [w for place in (wheelhouse, extra_wheels) if place for w in ("--find-links", place)]
        if index:
            words += ["--index-url", index]
        elif wheelhouse or extra_wheels:
            words += ["--no-index"]
        return words

    def install(self, site: str, listed: str, *, upgrade: bool, extra_wheels: str = "") -> Sequence[str]:
        """Install from wheels only."""
        uv = self._uv()
        more = [
            *self._sources(extra_wheels),
            "--only-binary",
            ":all:",
            "--target",
            site,
            *(["--upgrade"] if upgrade else []),
        ]
        if uv is not None:
            return [
                uv,
                "pip",
                "install",
                "--no-config",
                "--link-mode=copy",
                "--python",
                self.config.python,
                *more,
                "-r",
                listed,
            ]
        return [*self._pip(), "install", "--no-warn-script-location", "--no-compile", *more, "-r", listed]

    def build(self, target: str, listed: str) -> Sequence[str]:
        """Build or fetch wheels for everything into `target`."""
        return [*self._pip(), "wheel", "--wheel-dir", target, *self._sources(), "-r", listed]

    def _pip(self) -> list[str]:
        return [self.config.python, "-I", "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-input"]

    def environment(self, home: str = "") -> dict[str, str]:
        """Nothing of the agent's own but what an installer needs."""
        place = home or self.room
        env = {
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "HOME": place,
            "TMPDIR": place,
            "LANG": "C.UTF-8",
            "PIP_NO_CACHE_DIR": "1" if home else "0",
            "PIP_CACHE_DIR": f"{self.config.caches_dir}/pip",
            "UV_CACHE_DIR": f"{self.config.caches_dir}/uv",
            "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        }
        if proxy := self.settings.get("proxy"):
            env |= {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "http_proxy": proxy, "https_proxy": proxy}
        if ca := self.settings.get("ca"):
            env |= {"SSL_CERT_FILE": ca, "PIP_CERT": ca, "REQUESTS_CA_BUNDLE": ca}
        return env


def _lowly(uid: int, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "firepool_agent.lowly", str(uid), *command]


def _mark(path: str, digest: str) -> None:
    """The marker, last and whole: it is there with its content or not at all."""
    with open(f"{path}.new", "w") as f:
        json.dump({"digest": digest}, f)
    os.rename(f"{path}.new", path)


async def _run(command: Sequence[str], env: Mapping[str, str], cwd: str) -> tuple[int, str]:
    """Run an installer; its exit code and everything that it said. Cancelling kills it."""
    loop = asyncio.get_running_loop()
    with open(f"{cwd}/log", "wb") as log:
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    fd = os.pidfd_open(process.pid)
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
        process.wait()
    with open(f"{cwd}/log", errors="replace") as f:
        return process.returncode, f.read()


def _refusal(lines: Sequence[str], log: str, code: int) -> DependencyInstallError:
    said = log.strip().splitlines()
    cause = next(
        (line.strip() for line in reversed(said) if "error" in line.lower()), said[-1] if said else f"exit code {code}"
    )
    return DependencyInstallError(
        f"the requirements could not be installed: {cause[:300]}",
        requirements=list(lines),
        log=log[-_LOG_TAIL:],
        exit_code=code,
    )
