"""The vocabulary of spec §1–§3 as values: states, acquisition paths and the reasons why a path was not warmer."""

from enum import StrEnum


class JobState(StrEnum):
    """States a caller sees. The edges between them are data in `firepool_broker.core.jobs`."""

    PENDING = "PENDING"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


#: A job in one of these never changes again.
TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


class PodState(StrEnum):
    """States of a pod. The edges between them are data in `firepool_broker.core.pods`."""

    STARTING = "starting"
    IDLE = "idle"
    ASSIGNED = "assigned"
    RUNNING = "running"
    RESETTING = "resetting"
    HELD = "held"
    RETIRING = "retiring"
    GONE = "gone"


class Path(StrEnum):
    """How a job got its pods (acquisition path, spec §1)."""

    WARM = "warm"
    RECYCLED = "recycled"
    STANDBY = "standby"
    NEW = "new"
    CUSTOM_IMAGE = "custom_image"
    SINGLE_USE = "single_use"


class WhyNotWarmer(StrEnum):
    """Why a warmer path was not open, recorded at a job's *first* refused claim (spec §2)."""

    NO_IDLE_POD_OF_OWNER = "no_idle_pod_of_owner"
    POOL_AT_CEILING = "pool_at_ceiling"
    HELD_FOR_OTHER_CALLER = "held_for_other_caller"
    CALLER_QUOTA = "caller_quota"
    TAG_BOUNDARY = "tag_boundary"
    CARD_BUSY = "card_busy"
    CARD_NOT_EXCLUSIVE = "card_not_exclusive"
    PODS_STARTING = "pods_starting"
    GANG_INCOMPLETE = "gang_incomplete"
    BUDGET_EXHAUSTED = "budget_exhausted"
    STALE_TEMPLATE = "stale_template"
    IMAGE_FENCE = "image_fence"


class Isolation(StrEnum):
    """Levels of `design.md` §4.6, strongest first. A level that is asked for is never quietly lowered."""

    NAMESPACES = "namespaces"
    UID = "uid"
    PROCESS = "process"
    PORTABLE = "portable"


#: Strongest first: a pod of level L serves a job that demands level M when `STRENGTH[L] >= STRENGTH[M]`.
STRENGTH = {Isolation.NAMESPACES: 3, Isolation.UID: 2, Isolation.PROCESS: 1, Isolation.PORTABLE: 0}


class Fault(StrEnum):
    """Whose fault an error is: an infrastructure fault never looks like a user's failure."""

    USER = "user"
    INFRA = "infra"
    LIMIT = "limit"
