"""What the broker's local provider and the nursery say to each other, and the `PodConfig` that a new agent is given.

The nursery is the one warm process per machine that makes namespaces and forks agents (`design.md` §8). Provider and
nursery speak JSON lines over a Unix socket: one object per line, requests carry `"do"`, answers and facts carry `"is"`.

    provider → nursery                                        nursery → provider
    {"do": "hello"}                                           {"is": "hello", "pid", "version", "isolation", "why", "fix"}
    {"do": "make", "wish": PodWish}                           {"is": "made", "pod": PodState} | {"is": "refused", "name", "error"}
    {"do": "unmake", "name", "why"}                           {"is": "ended", "name", "why", "oom"}   (also when a pod dies by itself)
    {"do": "annotate", "name", "set": {key: value | null}}    –
    {"do": "list"}                                            {"is": "pods", "pods": [PodState], "ended": [ended facts not yet forgotten]}
    {"do": "forget", "names": [...]}                          –      (ended facts that the broker has acted on)
    {"do": "end"}                                             {"is": "over"}   after every pod is verified gone; the nursery exits
    –                                                         {"is": "ready", "name"}   the agent answers calls

What a pod is (annotations included) lives in the nursery's memory: it outlives the broker, and when it dies every pod
dies with it (parent-death signal), so there is nothing that a file would have to remember longer.

What an agent is given: the nursery forks, builds the pod around the child and calls `firepool_agent.server.serve(config)`
there, as PID 1 of the pod where PID namespaces are allowed. `serve` writes one byte to `ready_fd` and closes it once its
loop accepts calls on `listen_fd` (already listening).
"""

from dataclasses import dataclass, field
from typing import Any

from firepool_wire.agentapi import Message

#: Version of the messages in this module; a nursery of another version is drained and replaced.
NURSERY_VERSION = 1


@dataclass(slots=True, kw_only=True)
class PodWish(Message):
    """What the provider asks for. Equal wishes with the same name make one pod."""

    name: str
    sku: str
    template: str
    single_use: bool = False
    #: Weakest level that is acceptable; a machine that cannot give it refuses with `IsolationUnavailable`.
    isolation: str = "process"
    #: Job interpreter, absolute path; "" = the nursery's own.
    python: str = ""
    preload: list[str] = field(default_factory=list)
    memory_limit_bytes: int | None = None
    cpus: float = 1.0
    pids_limit: int = 4096
    #: Bytes of the pod's scratch space (work dir, home, /tmp, /dev/shm together); None = half of the memory limit or RAM.
    scratch_bytes: int | None = None
    #: [{"uuid", "model", "vram_bytes", "simulated", "index"}]
    cards: list[dict[str, Any]] = field(default_factory=list)
    #: `bridge`: own network namespace with an address; `host`: the host's network; `none`: own namespace, loopback only.
    network: str = "bridge"
    #: Seconds by which readiness is delayed, to try cluster-like start times out (always labelled "simulated").
    simulated_start_s: float = 0.0
    annotations: dict[str, str] = field(default_factory=dict)
    #: Everything else that the pool's settings say to the agent (requirements_mode, installer, …).
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PodState(Message):
    """A pod as the nursery knows it."""

    name: str
    sku: str
    template: str
    created_at: float
    #: Host path of the agent's socket.
    socket: str
    #: Host pid of the agent.
    pid: int
    #: Identity of this making of the pod.
    incarnation: str
    ready: bool = False
    ending: bool = False
    single_use: bool = False
    isolation: str = ""
    isolation_why: str = ""
    address: str = ""
    annotations: dict[str, str] = field(default_factory=dict)
    cards: list[dict[str, Any]] = field(default_factory=list)
    #: How long the making took, milliseconds (simulated delay not counted).
    made_ms: float = 0.0


@dataclass(slots=True, kw_only=True)
class PodConfig(Message):
    """Everything an agent knows about its pod. All paths are as the agent's own process sees them, unless said otherwise.

    At level `namespaces` the attempt has a mount namespace of its own: its slot of `scratch_dir` appears at
    `work_dir`, `home_dir`, `tmp_dir` and /dev/shm there, and everything under `agent_dir` is hidden from it.
    """

    pod: str
    sku: str
    #: Inherited listening Unix socket (its path lies outside the pod), and where the host finds it.
    listen_fd: int
    socket: str
    #: Write one byte and close it when calls are answered.
    ready_fd: int
    #: Identity of this making of the pod (the agent's boot id).
    boot_id: str
    #: Level wanted (minimum), level this pod has, and why not a stronger one ("" when strongest).
    isolation_wanted: str
    isolation: str
    isolation_why: str = ""

    #: The agent's own: the directories below lie in it; attempts find an empty directory there.
    agent_dir: str
    #: Attempt records, exit records, event logs.
    state_dir: str
    #: Disk: `blobs/`, `layers/` and whatever else survives resets.
    caches_dir: str
    #: Memory-backed where possible: digest-keyed unpacked packages.
    unpack_dir: str
    #: Fast, size-limited: slots of attempts, and the trash. `scratch_bytes` 0 = not a file system of its own.
    scratch_dir: str
    scratch_bytes: int = 0
    #: As the *job* sees them (`Slot` has them as the agent sees them).
    work_dir: str
    home_dir: str
    tmp_dir: str

    #: Fresh uids for attempts: `uid_first … uid_first + uid_count - 1` (count 0: no uids of our own, jobs run as the agent).
    uid_first: int = 0
    uid_count: int = 0
    #: K of the kill sweep (`design.md` §4.2): a uid that owns no process. 0 = none.
    uid_killer: int = 0
    user: str = "job"
    #: Directories shown in the pod that lie below the job's work dir, home or /tmp (an interpreter in /tmp): an attempt's own
    #: directories would cover them, so its guard shows them again.
    covered: list[str] = field(default_factory=list)
    #: Whether attempts get a PID (and mount) namespace of their own inside the pod.
    nested: bool = False

    #: Job cgroup directories by controller: "memory", "pids", "cpu" (v1 or v2), "unified" (v2: kill, freeze, events).
    cgroups: dict[str, str] = field(default_factory=dict)
    memory_limit_bytes: int | None = None
    pids_limit: int = 4096
    cpus: float = 1.0

    #: Job interpreter, absolute path.
    python: str
    preload: list[str] = field(default_factory=list)
    #: [{"uuid", "model", "vram_bytes", "simulated", "usage_file"?}]
    cards: list[dict[str, Any]] = field(default_factory=list)

    hostname: str = ""
    #: Own network address; "" where the pod shares the host's network or has loopback only.
    address: str = ""
    #: Whether the network namespace is the pod's own (listening ports are compared with the baseline only then).
    own_network: bool = False
    settings: dict[str, str] = field(default_factory=dict)
