"""Which broker, with which token, under which names: arguments, environment, `firepool.toml`, a running local broker.

Order: what the program says, `FIREPOOL_ADDRESS`, a profile of `firepool.toml`, the local broker, else an embedded one
(spec §9). The file is looked for in the working directory and its parents, then in the state folder.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from firepool_wire.errors import BadRequest

#: `init(address=EMBEDDED)` starts a broker beside this program even where another one runs.
EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a session is made from. Every figure says what it costs to change it."""

    address: str | None = None
    token: str | None = None
    #: File with the certificate authority of an `https` address; None = the system's.
    ca: str | None = None
    profile: str | None = None
    #: Name in the program → name of the pool, so that one script runs on a laptop and on a cluster.
    sku_alias: Mapping[str, str] = field(default_factory=dict)
    #: Pool of functions that name none; None = the broker's default (`cpu`).
    sku: str | None = None
    #: Jobs die when no client renewed them for this long. Raise: survives longer pauses of the program (a debugger),
    #: orphans live longer. None: no lease.
    client_lease_s: float | None = 120.0
    #: Print what jobs write, with a prefix.
    log_to_driver: bool = False
    #: Jobs (and bytes) that may wait to be sent. Raise: larger bursts, more memory. Lower: the limit is met sooner.
    max_unsent: int = 50_000
    max_unsent_bytes: int = 512 * 1024 * 1024
    #: What `.remote()` does when that many wait: raise `TooManyRequests` at once, or block until there is room.
    when_full: Literal["raise", "block"] = "raise"
    #: How long a request is repeated while no broker answers. Raise: rides out longer restarts of the broker.
    patience_s: float = 30.0
    #: How long one answer may take.
    request_timeout_s: float = 60.0
    #: Embedded broker: make up accelerators ("h200"), and a pools file.
    simulate: str | None = None
    pools: str | None = None
    start_timeout_s: float = 60.0


class Target(NamedTuple):
    """A broker that was found: where, as whom, and how (`given`, `local`, `embedded`)."""

    address: str
    token: str | None = None
    ca: str | None = None
    how: Literal["given", "local", "embedded"] = "given"
    #: Folder of a local or embedded broker.
    home: Path | None = None


def home() -> Path:
    """The state folder of local brokers."""
    return Path(os.environ.get("FIREPOOL_HOME") or Path.home() / ".firepool")


def with_profile(settings: Settings) -> Settings:
    """The settings, completed by the environment and by the profile of `firepool.toml`.

    Raises:
        BadRequest: the file cannot be read, or has no such profile.
    """
    profile = _profile(settings.profile or os.environ.get("FIREPOOL_PROFILE"))
    env = os.environ.get
    address = settings.address or env("FIREPOOL_ADDRESS") or profile.get("address")
    token = settings.token or env("FIREPOOL_TOKEN") or profile.get("token")
    if token is None and "token_file" in profile:
        token = Path(profile["token_file"]).expanduser().read_text().strip()
    changed = {
        "address": address,
        "token": token,
        "ca": settings.ca or profile.get("ca"),
        "sku": settings.sku or profile.get("sku"),
        "sku_alias": {**profile.get("sku_alias", {}), **settings.sku_alias},
    }
    return _replace(settings, changed)


def _replace(settings: Settings, changed: dict[str, Any]) -> Settings:
    names = settings.__dataclass_fields__
    return Settings(**{name: changed.get(name, getattr(settings, name)) for name in names})


def _profile(name: str | None) -> dict[str, Any]:
    path = _find_file()
    if path is None:
        if name is not None:
            raise BadRequest(
                f"profile {name!r} was asked for, but there is no firepool.toml here or above", field="profile"
            )
        return {}
    import tomllib  # 20 ms that only a file needs

    try:
        whole = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as wrong:
        raise BadRequest(f"{path}: {wrong}", field="firepool.toml") from None
    profiles: dict[str, dict[str, Any]] = whole.get("profiles", {})
    name = name or whole.get("profile")
    if name is not None and name not in profiles:
        raise BadRequest(
            f"{path} has no profile {name!r}; it has: {', '.join(sorted(profiles)) or 'none'}", field="profile"
        )
    common = {"sku_alias": whole["sku_alias"]} if "sku_alias" in whole else {}
    return {**common, **(profiles[name] if name is not None else {})}


def _find_file() -> Path | None:
    here = Path.cwd()
    places = [*(folder / "firepool.toml" for folder in (here, *here.parents)), home() / "firepool.toml"]
    return next((p for p in places if p.is_file()), None)


def local_broker(folder: Path) -> Target | None:
    """The broker whose `broker.json` lies in the folder, if its process lives."""
    found = published(folder)
    if found is None:
        return None
    token = _token(found.get("token_file"), folder)
    return Target(address=str(found["address"]), token=token, how="local", home=folder)


def published(folder: Path) -> dict[str, Any] | None:
    """What the living broker of a folder says of itself in `broker.json` (`address`, `pid`, …); None without one."""
    try:
        found: dict[str, Any] = json.loads((folder / "broker.json").read_text())
        return found if found["address"] and process_lives(int(found["pid"])) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _token(named: str | None, folder: Path) -> str | None:
    path = Path(named) if named else folder / "token"
    return path.read_text().strip() if path.is_file() else None


def process_lives(pid: int) -> bool:
    """Whether a process of that id runs (on Windows, where signal 0 would end it, always). A zombie serves nobody."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True  # no /proc to tell more
