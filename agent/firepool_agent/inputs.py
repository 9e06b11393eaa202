"""What a launch brings becomes files, paths and variables of the attempt: blobs, package, requirement layers, environment; and the
choice between going on in the forked interpreter and starting a fresh one.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from firepool_agent import env
from firepool_agent.isolate import job_paths, layer_path
from firepool_agent.layers import Layer
from firepool_agent.order import Order
from firepool_agent.outputs import DIR_NAME
from firepool_agent.parts import Parts
from firepool_agent.scratch import Slot
from firepool_wire.agentapi import Launch
from firepool_wire.errors import BadRequest, SerializationMismatch, StoreUnavailable
from firepool_wire.jobspec import Requirements

#: Takes one sentence for the job's story.
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that the attempt's order is made of."""

    launch: Launch
    env: dict[str, str]
    dropped_env: list[str]
    #: In front of `sys.path`, as the job sees them.
    paths: list[str]
    #: As the agent sees them.
    package: str | None
    layers: list[str]
    #: Why a fresh interpreter is needed; None: the forked one will do.
    fresh: str | None
    blobs: dict[str, Path]

    @classmethod
    async def gather(cls, parts: Parts, slot: Slot, launch: Launch, note: Note) -> "Inputs":
        """Unpack, install; what took time is noted for the job's story. Raises: FirepoolError: whose fault it is, it says."""
        if (launch.function is None) == (launch.argv is None):
            raise BadRequest("a launch has either a function or an argv", field="entrypoint")
        check_formats(launch, parts.zygote.about)
        work, home, tmp = job_paths(parts.config, slot)
        package = await _package(parts, launch, note)
        layer = await _layer(parts, launch, note)
        paths = [] if package is None else [work]
        if layer is not None:
            paths.append(layer_path(parts.config, layer.path))
        variables, dropped = env.compose(parts.config, launch.env, launch.injected)
        variables |= {"HOME": home, "TMPDIR": tmp, "PWD": work, "FIREPOOL_OUTPUT_DIR": f"{home}/{DIR_NAME}"}
        if launch.run_timeout_s is not None:
            # Wall clock, for `context().deadline`: everything slow (fetch, unpack, install) lies behind us here.
            variables["FIREPOOL_DEADLINE"] = f"{time.time() + launch.run_timeout_s:.3f}"
        fresh = _why_fresh(variables, package, layer, parts.zygote.loaded())
        if fresh is not None and launch.function is not None:
            note(f"started a fresh interpreter: {fresh}")
        return cls(
            launch=launch,
            env=env.with_paths(variables, paths),
            dropped_env=dropped,
            paths=paths,
            package=package,
            layers=[] if layer is None else [layer.path],
            fresh=fresh,
            blobs=_blobs(parts, launch),
        )

    @contextlib.contextmanager
    def opened(self) -> Iterator[dict[str, int]]:
        """Descriptors of the blobs that go along with the order, by name."""
        with contextlib.ExitStack() as stack:
            try:
                opened = {name: stack.enter_context(path.open("rb")).fileno() for name, path in self.blobs.items()}
            except OSError as why:
                raise StoreUnavailable(f"a blob cannot be read in the pod: {why}") from None
            yield opened

    def order(self, attempt: str, blobs: dict[str, int]) -> Order:
        """The order for the waiting process."""
        launch = self.launch
        return Order(
            attempt=attempt,
            argv=launch.argv,
            function=launch.function,
            depends=launch.depends,
            env=self.env,
            paths=self.paths,
            package=self.package,
            layers=self.layers,
            fresh=self.fresh if launch.function is not None else None,
            untrusted=launch.untrusted,
            max_result_bytes=launch.max_result_bytes,
            blobs=list(blobs),
        )


async def _package(parts: Parts, launch: Launch, note: Note) -> str | None:
    """Tree of the code package, unpacked off the event loop when it is new. Raises: PackageError."""
    if launch.package is None:
        return None
    archive = str(parts.blobs.path(launch.package))
    if (cached := parts.unpacker.cached(launch.package)) is not None:
        return cached
    began = time.monotonic()
    tree = await asyncio.to_thread(parts.unpacker.tree, launch.package, archive)
    note(f"unpacked package {launch.package[:19]} in {_ms_since(began)} ms")
    return tree


async def _layer(parts: Parts, launch: Launch, note: Note) -> Layer | None:
    """The requirements as an installed tree. Raises: DependencyInstallError."""
    if launch.requirements is None:
        return None
    wanted = Requirements(text=launch.requirements["text"], mode=launch.requirements.get("mode"))
    began = time.monotonic()
    layer = await parts.layers.ensure(wanted, launch.installer, parts.zygote.loaded())
    note(f"requirements {layer.digest[:19]} were there after {_ms_since(began)} ms")
    return layer


def _ms_since(began_s: float) -> int:
    return round((time.monotonic() - began_s) * 1000)


def _why_fresh(
    variables: dict[str, str], package: str | None, layer: Layer | None, loaded: frozenset[str]
) -> str | None:
    """Why a fork of the running interpreter would not do; None: it does."""
    if (late := env.only_at_start(variables)) is not None:
        return f"{late} is read only when an interpreter starts"
    if layer is not None and layer.has_pth:
        return "the requirements carry a .pth file"
    if layer is not None and layer.shadows:
        return f"the requirements shadow preloaded {', '.join(layer.shadows)}"
    if package is not None:
        shadows = loaded.intersection(name.partition(".")[0] for name in os.listdir(package))
        if shadows:
            return f"the package shadows preloaded {', '.join(sorted(shadows))}"
    return None


def _blobs(parts: Parts, launch: Launch) -> dict[str, Path]:
    wanted: dict[str, str] = {}
    if launch.function is not None and launch.function.get("payload"):
        wanted["payload"] = launch.function["payload"]
    if launch.args_blob is not None:
        wanted["args"] = launch.args_blob
    return {name: parts.blobs.path(digest) for name, digest in wanted.items()}


def check_formats(launch: Launch, about: dict[str, object]) -> None:
    """A function by value runs only where Python's minor version is the client's and its pickle format is known.

    Raises: SerializationMismatch.
    """
    entry = launch.function
    if entry is None or not entry.get("payload"):
        return
    theirs, ours = entry.get("python") or "", str(about["python_version"])
    pickle, known = int(entry.get("pickle", 5)), int(str(about["pickle"]))
    if (theirs and theirs != ours) or pickle > known:
        raise SerializationMismatch(
            f"the function was pickled by Python {theirs or '?'} (pickle format {pickle}); the pod runs Python {ours} "
            f"(format {known}). Use the same minor version, or give the function by import path.",
            client_python=theirs,
            client_pickle=pickle,
            pod_python=ours,
            pod_pickle=known,
        )
