"""Messages between broker and agent: HTTP/1.1 with JSON bodies, the broker dials (`design.md` §2).

    GET    /v1/hello                                   -> Hello
    PUT    /v1/attempts/<id>/prepare     Prepare       -> Prepared         forks the attempt's process, blocked
    PUT    /v1/attempts/<id>/launch      Launch        -> Launched         delivers, unpacks, installs, releases it
    GET    /v1/attempts/<id>                           -> AttemptStatus    what the agent knows (recovery)
    GET    /v1/attempts/<id>/events?from=<offset>      -> frames (see `frames.py`), chunked, until END
    POST   /v1/attempts/<id>/stop        Stop          -> {}               SIGTERM, grace, SIGKILL of the whole tree
    POST   /v1/attempts/<id>/abandon                   -> {}               undo a prepare that will not be launched
    GET    /v1/attempts/<id>/outputs/<path>            -> bytes            an output file, after the exit record
    POST   /v1/attempts/<id>/ack                       -> {}               exit record and log are stored; may be dropped
    POST   /v1/reset                     Reset         -> ResetReport
    GET    /v1/settled                                 -> {}               answers once the trash's bytes are free again
    HEAD   /v1/blobs/<digest>                          -> 200 | 404
    PUT    /v1/blobs/<digest>            raw bytes     -> 201 | PackageError (digest mismatch)
    POST   /v1/attempts/<id>/stacks                    -> {"stacks": "..."}
    GET    /v1/stats                                   -> Stats
    POST   /v1/shutdown                                -> {}               the agent ends every attempt and exits

Every mutating call is idempotent by attempt id (a repeated call gets the first answer) and carries a deadline on
CLOCK_BOOTTIME of the pod's host, in seconds: after it the agent refuses (409). An error answer is problem+json from the error
table. A path id is the attempt id `<job-id>:<retry-count>`, percent-encoded.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Self


class Message:
    """JSON in and out for the dataclasses below; unknown keys of a newer peer are skipped."""

    def to_json(self) -> dict[str, Any]:
        """The message as a JSON object."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        """The message from a JSON object.

        Raises:
            TypeError: a required key is missing.
        """
        names: tuple[str, ...] = cls.__slots__  # type: ignore[attr-defined]
        return cls(**{k: v for k, v in body.items() if k in names})


@dataclass(slots=True, kw_only=True)
class Hello(Message):
    """Who the agent is; a changed `boot_id` voids what the broker believed about the pod."""

    protocol: int
    version: str
    pod: str
    boot_id: str
    #: Level of isolation this pod really has, and why not a stronger one ("" when it is the strongest).
    isolation: str
    isolation_why: str
    #: Job interpreter: path, `major.minor`, highest pickle format.
    python: str
    python_version: str
    pickle: int
    #: Cards: [{"uuid", "model", "vram_bytes", "simulated"}].
    cards: list[dict[str, Any]] = field(default_factory=list)
    #: Modules of the pool's preload list that could not be imported, with the reason; jobs run without them.
    preload_failed: dict[str, str] = field(default_factory=dict)
    #: Attempt ids that the agent holds records of.
    attempts: list[str] = field(default_factory=list)
    memory_limit_bytes: int | None = None
    #: Caller of the last prepared attempt, from the agent's own disk; None = never used.
    last_user: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Prepare(Message):
    """Who will run here. Written to the agent's disk before the answer: the second witness of who used the pod last."""

    caller: str
    person: str
    queue: str
    tag: str | None
    deadline_s: float
    #: Interpreter start: `fork` from the zygote (functions), `exec` (argv).
    start: str = "fork"


@dataclass(slots=True, kw_only=True)
class Prepared(Message):
    """The attempt's process exists and waits; `uid` is the fresh user id it will run as (0 where uids are not ours)."""

    uid: int
    pid: int


@dataclass(slots=True, kw_only=True)
class Launch(Message):
    """Everything that is bound late. The agent refuses it for an attempt that it did not prepare.

    The job's variables are `env` (the user's, filtered; dropped names are reported in the exit record) overlaid by
    `injected` (ours; cannot be overridden).
    """

    deadline_s: float
    #: `FunctionEntry` of the job spec as JSON, or None for argv jobs.
    function: dict[str, Any] | None = None
    argv: list[str] | None = None
    #: base64 argument frame where it was not inline (`args_blob` resolved by the broker into the pod's blob cache).
    args_blob: str | None = None
    #: Results of jobs that are arguments: [base64 result frame], in the order of `function.depends`.
    depends: list[str] = field(default_factory=list)
    package: str | None = None
    requirements: dict[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)
    injected: dict[str, str] = field(default_factory=dict)
    run_timeout_s: float | None = None
    start_timeout_s: float | None = None
    grace_s: float = 2.0
    memory_bytes: int | None = None
    max_log_bytes: int = 64 * 1024 * 1024
    max_result_bytes: int = 512 * 1024 * 1024
    outputs: list[str] = field(default_factory=list)
    max_output_bytes: int = 1024 * 1024 * 1024
    untrusted: bool = False
    #: Installer settings of the pool: {"index_url", "ca", "proxy", "wheelhouse", "installer"}.
    installer: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Launched(Message):
    """The process was released. `at_s`: CLOCK_MONOTONIC of the pod's host."""

    at_s: float


@dataclass(slots=True, kw_only=True)
class Stop(Message):
    """End the attempt: SIGTERM to it, after `grace_s` SIGKILL to the whole tree. `error` becomes its error."""

    grace_s: float
    #: Error (`FirepoolError.to_json`) that the exit record shall carry: Cancelled, RunTimeout, ClientGone, …
    error: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class ExitRecord(Message):
    """How an attempt ended; kept on the agent's disk until acknowledged, so that no outage of the broker loses it.

    Exactly one of: `exit_code` 0 and no error; an error with `exit_code` and maybe `signal`; an error without
    `exit_code` (no process ever ran user code). Times are CLOCK_MONOTONIC seconds of the host.
    """

    attempt: str
    exit_code: int | None = None
    signal: int | None = None
    #: `FirepoolError.to_json` or None.
    error: dict[str, Any] | None = None
    launched_at_s: float | None = None
    first_instruction_at_s: float | None = None
    ended_at_s: float | None = None
    peak_rss_bytes: int | None = None
    cpu_s: float | None = None
    peak_device_bytes: int | None = None
    #: Names of user variables that the filter dropped.
    dropped_env: list[str] = field(default_factory=list)
    #: Output files kept: [{"path", "bytes", "sha256"}].
    outputs: list[dict[str, Any]] = field(default_factory=list)
    #: Bytes written by the job outside its outputs, thrown away by the reset.
    discarded_bytes: int = 0
    log_bytes: int = 0
    log_dropped_bytes: int = 0
    result_bytes: int = 0
    #: Processes of the attempt that had to be killed after its end.
    leftovers: int = 0


@dataclass(slots=True, kw_only=True)
class AttemptStatus(Message):
    """What the agent knows of an attempt: `unknown`, `prepared`, `running`, `ended` (then with its exit record)."""

    state: str
    exit: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Reset(Message):
    """Clean the pod after `attempt` (None: after whatever ran last)."""

    attempt: str | None
    #: Bounded wait for tasks in uninterruptible sleep (knob `reset_wait_s`).
    wait_s: float = 5.0


@dataclass(slots=True, kw_only=True)
class ResetReport(Message):
    """`clean`, or the list of what is not: every entry {"what", "where", "detail"} in words for `explain`."""

    clean: bool
    problems: list[dict[str, str]] = field(default_factory=list)
    #: Processes killed by this reset.
    killed: int = 0
    #: Bytes still being freed off the path; the pod is claimable once `/v1/settled` answered.
    settling_bytes: int = 0
    took_ms: float = 0.0
    #: Digest of the requirement layers present (claim order prefers a matching one).
    layers: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Stats(Message):
    """Live figures of the pod."""

    attempt: str | None
    rss_bytes: int
    cpu_s: float
    processes: int
    disk_free_bytes: int
