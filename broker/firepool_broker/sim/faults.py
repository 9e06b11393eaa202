"""What may go wrong, as data, and the dice that decide when. One seed fixes every fault of a run.

A probability is per opportunity (per commit, per call, per pod); a `*_every_s` is the mean of an exponential clock. What a
fault then *does* lives with whom it befalls: `ledger`, `yard`, `broker`, `clients`.
"""

from dataclasses import dataclass, fields
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """A plan of faults; everything 0 is a fair day."""

    # -- the store
    #: The start is not written.
    commit_lost: float = 0.0
    #: The connection breaks inside the commit; half of these were durable.
    commit_unknown: float = 0.0
    #: The insert of a waiting job fails (disk full).
    store_fails: float = 0.0
    #: The write of an end fails.
    end_fails: float = 0.0
    # -- agents
    prepare_fails: float = 0.0
    #: Prepare takes 0.02 to 1 s: the durable answer must not wait for it.
    prepare_slow: float = 0.0
    launch_fails: float = 0.0
    reset_unclean: float = 0.0
    #: The agent hangs at a call, for `hang_s` on average; a fifth of those for ever.
    hang: float = 0.0
    hang_s: float = 3.0
    #: An answer of an agent arrives up to 2 s late.
    late: float = 0.0
    #: A fact is delivered twice (a stream read again, a watch restarted).
    twice: float = 0.0
    #: An annotation patch is lost.
    patch_lost: float = 0.0
    # -- pods
    #: Mean life of a ready pod before its host takes it away; 0 = never.
    pod_lost_every_s: float = 0.0
    create_fails: float = 0.0
    #: A start takes ten times as long.
    start_slow: float = 0.0
    #: A pod is never ready.
    never_ready: float = 0.0
    #: A delete takes a hundred times as long, and what runs in the pod runs on.
    delete_stuck: float = 0.0
    # -- the broker
    #: Mean time between two deaths of the broker; 0 = never.
    crash_every_s: float = 0.0
    crashes_max: int = 20
    # -- people
    #: The submitter cancels the job at some time in its life.
    cancel: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} must not be negative")


#: A fair day.
NONE = Faults()

#: Each fault alone, often enough to strike within a short run.
ALONE: dict[str, Faults] = {
    "commit_lost": Faults(commit_lost=0.2),
    "commit_unknown": Faults(commit_unknown=0.2),
    "store_fails": Faults(store_fails=0.2),
    "end_fails": Faults(end_fails=0.2),
    "prepare_fails": Faults(prepare_fails=0.1),
    "prepare_slow": Faults(prepare_slow=0.5),
    "launch_fails": Faults(launch_fails=0.1),
    "reset_unclean": Faults(reset_unclean=0.2),
    "hang": Faults(hang=0.03),
    "late": Faults(late=0.2),
    "twice": Faults(twice=0.3),
    "patch_lost": Faults(patch_lost=0.5, crash_every_s=10.0),
    "pod_lost": Faults(pod_lost_every_s=20.0),
    "create_fails": Faults(create_fails=0.3),
    "start_slow": Faults(start_slow=0.5),
    "never_ready": Faults(never_ready=0.2),
    "delete_stuck": Faults(delete_stuck=0.3, reset_unclean=0.1),
    "crash": Faults(crash_every_s=4.0),
    "cancel": Faults(cancel=0.3),
}

#: Everything at once.
MIXED = Faults(
    commit_lost=0.03,
    commit_unknown=0.03,
    store_fails=0.02,
    end_fails=0.03,
    prepare_fails=0.02,
    prepare_slow=0.1,
    launch_fails=0.02,
    reset_unclean=0.03,
    hang=0.005,
    late=0.05,
    twice=0.05,
    patch_lost=0.1,
    pod_lost_every_s=120.0,
    create_fails=0.05,
    start_slow=0.05,
    never_ready=0.02,
    delete_stuck=0.05,
    crash_every_s=15.0,
    cancel=0.05,
)


@dataclass(slots=True)
class Dice:
    """The random choices of a run: faults from one stream, durations from another, so that a plan without faults leaves
    every duration as it was."""

    fate: Random
    time: Random
    plan: Faults

    @classmethod
    def of(cls, seed: int, plan: Faults) -> "Dice":
        """Dice for a seed."""
        return cls(Random(f"fate {seed}"), Random(f"time {seed}"), plan)

    def strikes(self, probability: float) -> bool:
        """Whether a fault of this probability happens now; 0 draws nothing."""
        return probability > 0 and self.fate.random() < probability

    def coin(self) -> bool:
        """One way or the other."""
        return self.fate.random() < 0.5

    def exponential(self, mean_s: float) -> float:
        """A time until something that happens at random."""
        return self.fate.expovariate(1.0 / mean_s)

    def between(self, low_s: float, high_s: float) -> float:
        """A time between two bounds."""
        return self.fate.uniform(low_s, high_s)
