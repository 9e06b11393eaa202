"""The program's current session: made by `init` or by the first call that needs one, ended by `shutdown` or at exit, and
made anew in a forked child.
"""

import atexit
import os
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firepool_ray._config import EMBEDDED, Settings, Target, home, local_broker, with_profile
from firepool_ray._errors import BlockingInEventLoopWarning
from firepool_ray._session import Session

if TYPE_CHECKING:
    from types import TracebackType

    from firepool_ray._embedded import Child

_lock = threading.RLock()
_current: Session | None = None
#: What `init` was called with, and the broker that was found: a forked child connects to the same.
_settings = Settings()
_target: Target | None = None


class Connected:
    """What `init` returns: facts about the connection, and a context manager that ends it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def address(self) -> str:
        """Where the broker listens."""
        return self._session.api.target.address

    @property
    def how(self) -> str:
        """`given`, `local` (a broker that ran already) or `embedded` (started beside this program)."""
        return self._session.api.target.how

    @property
    def version(self) -> dict[str, Any]:
        """What the broker says of itself: version, protocol, capabilities, interpreters of its pools."""
        return dict(self._session.version)

    def __enter__(self) -> "Connected":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        shutdown()

    def __repr__(self) -> str:
        return f"<connected to the {self.how} broker at {self.address}>"


def init(address: str | None = None, *, ignore_reinit_error: bool = False, **settings: Any) -> Connected:
    """Connect this program to a broker. Without it, the first call does so with defaults.

    Args:
        address: `http://host:port`, `unix:/path`, or "embedded"; None: `FIREPOOL_ADDRESS`, a profile of `firepool.toml`, a
            running local broker, else one is started beside this program and ends with it.
        ignore_reinit_error: a second `init` is nothing, instead of an error.
        settings: fields of `Settings` (token, profile, sku_alias, client_lease_s, log_to_driver, when_full, …).

    Raises:
        RuntimeError: already connected.
        ValueError: no such setting.
        FirepoolError: BrokerUnavailable, Unauthenticated, MissingExtra.
    """
    global _settings, _target
    unknown = [name for name in settings if name not in Settings.__dataclass_fields__]
    if unknown:
        raise ValueError(f"init has no setting {unknown[0]!r}; there are: {', '.join(Settings.__dataclass_fields__)}")
    with _lock:
        if is_initialized():
            if ignore_reinit_error:
                return Connected(current())
            raise RuntimeError("firepool is connected already; call firepool.shutdown() first")
        _settings, _target = Settings(address=address, **settings), None
        return Connected(_open())


def current() -> Session:
    """The session of this process; opened now if there is none. Raises: FirepoolError."""
    session = _current
    if session is not None and session.pid == os.getpid() and not session.closed:
        return session
    with _lock:
        return _current if _current is not None and not _current.closed else _open()


def _open() -> Session:
    global _current, _target
    settings = with_profile(_settings)
    target, child = (_target, None) if _target is not None else _find(settings)
    try:
        session = Session.open(settings, target, child)
    except BaseException:
        if child is not None:
            child.stop()
        raise
    if _current is None:
        atexit.unregister(shutdown)
        atexit.register(shutdown)
    _current = session
    # An embedded broker that is gone is not looked for again; a forked child does, while its parent lives.
    _target = target._replace(how="given") if child is None else None
    return session


def _find(settings: Settings) -> "tuple[Target, Child | None]":
    if settings.address and settings.address != EMBEDDED:
        token = settings.token or _home_token(settings.address)
        return Target(address=settings.address, token=token, ca=settings.ca), None
    running = local_broker(home()) if settings.address != EMBEDDED else None
    if running is not None:
        return running, None
    from firepool_ray import _embedded  # subprocess and tempfile: 8 ms

    return _embedded.start(settings)


def _home_token(address: str) -> str | None:
    """The token of the local broker, where that is the address given."""
    running = local_broker(home())
    if running is not None and running.address.rstrip("/") == address.rstrip("/"):
        return running.token
    return None


def is_initialized() -> bool:
    """Whether this process is connected."""
    return _current is not None and not _current.closed and _current.pid == os.getpid()


def shutdown() -> None:
    """End the connection: what is queued is sent, jobs that are not detached are cancelled, an embedded broker ends."""
    global _current, _target
    with _lock:
        session, _current, _target = _current, None, None
    if session is not None and session.pid == os.getpid():
        session.close()


def _after_fork() -> None:
    """In the child: the parent's session, its threads and its locks are not ours."""
    global _current, _lock, _target
    _lock = threading.RLock()
    if _current is not None:
        target = _current.api.target
        _target = target._replace(how="given")
        _current.abandon()
        _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def warn_if_in_loop(what: str, instead: str) -> None:
    """Warn, once per place, that a blocking call stops a running event loop. Notebooks live in one and are left alone."""
    import sys

    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None or "ipykernel" in sys.modules:
        return
    level = 2
    frame = sys._getframe(1)
    here = str(Path(__file__).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{what} blocks the event loop that runs in this thread; {instead}", BlockingInEventLoopWarning, level
    )
