"""How long things take, as data: one `Delay` per step of the path, each with the source of its figures.

Nothing here decides anything; `broker`, `yard` and `ledger` draw from it. A venue is fitted on training runs and kept only if it
worsens no hold-out run (spec §13), so a change of a constant names its new source beside it.
"""

from dataclasses import dataclass
from math import exp, log
from random import Random

#: Standard normal quantile of 0.9: turns a p50 and a p90 into a log-normal.
_Z90 = 1.2815515655446004


@dataclass(frozen=True, slots=True)
class Delay:
    """A log-normal duration given by its median and its 90th percentile, in seconds; both equal = constant."""

    p50_s: float
    p90_s: float
    #: Where the two figures come from.
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.p50_s <= self.p90_s:
            raise ValueError(f"a delay needs 0 < p50 <= p90, not {self.p50_s} and {self.p90_s}")

    def draw(self, dice: Random) -> float:
        """One sample, seconds; the far tail is cut at 20 medians so that one draw cannot decide a run."""
        if self.p90_s == self.p50_s:
            return self.p50_s
        sigma = log(self.p90_s / self.p50_s) / _Z90
        return min(self.p50_s * exp(dice.gauss(0.0, sigma)), 20.0 * self.p50_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Venue:
    """Every delay between the engine and the world, and the time-outs of the shell's calls."""

    name: str
    #: Client's request until the engine sees it.
    accept: Delay
    #: One group commit of the store.
    commit: Delay
    #: Prepare on one agent: record on disk, process forked and blocked.
    prepare: Delay
    #: Hand-off: deliver, unpack, install, release; until the agent has released the process.
    launch: Delay
    #: From the release until user code runs.
    first_instruction: Delay
    #: From the end of the process until its exit record and everything it produced are in the broker's store.
    report: Delay
    #: From a stop request until the tree is dead.
    stop: Delay
    #: Kill, prove, clean.
    reset: Delay
    #: Until the bytes of a heavy job's trash are free again.
    settle: Delay
    #: One probe or hello of an agent that answers.
    probe: Delay
    #: Create order until the provider has accepted it (the pod exists and counts).
    create: Delay
    #: From then until the agent answers `hello`.
    start: Delay
    #: Delete order until verified gone.
    delete: Delay
    #: From the broker's death until the next one has read store, provider and agents.
    restart: Delay
    #: Time-out of a call to an agent, after which the broker counts a strike and tries again.
    call_timeout_s: float
    #: Deadline that mutating calls carry: an agent that was hung for longer refuses them.
    call_deadline_s: float
    #: Probes of an unreachable attempt after a start: count, spacing and time-out of each (spec §10).
    probes: int = 3
    probe_gap_s: float = 0.5
    probe_timeout_s: float = 2.0


#: This project's own kind of machine: local provider, SQLite with full sync.
LOCAL = Venue(
    name="local",
    accept=Delay(0.0009, 0.0015, "budget of the warm path: SDK, HTTP, validation; bare sketch 0.24 ms (design §9)"),
    commit=Delay(0.0004, 0.0009, "SQLite, one commit 0.14 ms, group of 64 0.9 ms (design §9)"),
    prepare=Delay(0.0005, 0.0009, "lease call over a Unix socket 0.46 ms (design §9)"),
    launch=Delay(0.0005, 0.001, "launch of a process forked at prepare 0.3 to 0.8 ms (design §1)"),
    first_instruction=Delay(0.001, 0.002, "uid, cgroup, unpickle in the child (bare sketch: launch 2.1 ms in all)"),
    report=Delay(0.001, 0.003, "event stream over a Unix socket, as prepare, plus one store write"),
    stop=Delay(0.007, 0.012, "init killed and waited for: 7 ms for 50 escapees (design §4)"),
    reset=Delay(0.005, 0.0093, "kill and clean 5 to 7 ms here, 9.3 ms in the paper (C.2)"),
    settle=Delay(0.02, 0.135, "1 GiB of shm is free after 135 ms (design §4)"),
    probe=Delay(0.0005, 0.001, "as prepare"),
    create=Delay(0.001, 0.002, "one JSON line to the nursery"),
    start=Delay(0.03, 0.06, "namespace pod 4.2 ms to first instruction, plus overlay, agent and hello (design §9)"),
    delete=Delay(0.02, 0.04, "cgroup.kill of 50 processes verified in 5.3 ms, then unmounts (design §9)"),
    restart=Delay(0.5, 1.0, "interpreter start and imports of the broker"),
    call_timeout_s=1.0,
    call_deadline_s=10.0,
)

#: The paper's production H200 pools: image cached.
H200 = Venue(
    name="h200",
    accept=Delay(0.04, 0.06, "accept 0.04 s (paper C.4)"),
    commit=Delay(
        0.003, 0.006, "MySQL 33 jobs/s with one goroutine is 21 ms with sync; grouped 2 ms (paper C.4, design §9)"
    ),
    prepare=Delay(0.005, 0.02, "TLS call to a pod: 1.9 ms new, 0.16 ms kept, plus the network"),
    launch=Delay(0.39, 0.54, "hand-off 0.39 s (paper C.4); binding a job 0.40 to 0.54 s (paper §9.2)"),
    first_instruction=Delay(0.12, 0.2, "first instruction 0.12 s (paper C.4)"),
    report=Delay(0.01, 0.03, "event stream over the network and one store write"),
    stop=Delay(0.11, 0.2, "re-check after SIGKILL about 110 ms (paper C.2)"),
    reset=Delay(0.0093, 0.11, "clean 9.3 ms, leftover processes 110 ms (paper C.2)"),
    settle=Delay(0.135, 1.35, "1 GiB of shm 135 ms here, 8 GiB 1.35 s (paper C.2)"),
    probe=Delay(0.005, 0.02, "as prepare"),
    create=Delay(0.05, 0.1, "one POST to the API server"),
    start=Delay(22.1, 34.7, "total of the cold start, image cached (paper Table 1)"),
    delete=Delay(3.0, 5.0, "end of a pod in the fresh-pod example (audit F19)"),
    restart=Delay(3.0, 6.0, "first claim 3.0 s after a start (paper C.3)"),
    call_timeout_s=2.0,
    call_deadline_s=30.0,
)

#: By name, for the command line and the benchmarks.
VENUES = {venue.name: venue for venue in (LOCAL, H200)}
