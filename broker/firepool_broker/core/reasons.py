"""Why a claim was refused: `why_not_warmer`, the most specific reason first. The job keeps only its first (spec §2)."""

from firepool_broker.core.jobs import JobRecord
from firepool_broker.core.racks import ASSIGNED, RUNNING, STARTING, PoolRecord
from firepool_broker.core.racks import HELD as HELD_PODS
from firepool_broker.core.racks import IDLE as IDLE_PODS
from firepool_broker.core.tracker import Tracker
from firepool_wire.words import WhyNotWarmer


def why_not(pool: PoolRecord, job: JobRecord, tracker: Tracker) -> WhyNotWarmer:
    """Why no path was open to this job, caller quota aside."""
    rack = pool.rack
    shelf = rack.shelves.get(job.usage.caller)
    counts = rack.counts
    own = len(shelf.all) if shelf is not None else 0
    if not job.single_use:
        free = own + counts[IDLE_PODS]
        if job.pods > 1 and free:
            return WhyNotWarmer.GANG_INCOMPLETE
        if free and tracker.serving:
            return WhyNotWarmer.CARD_BUSY
        if own:
            return WhyNotWarmer.TAG_BOUNDARY
        if _has_stale(pool, job):
            return WhyNotWarmer.STALE_TEMPLATE
    if counts[STARTING] or (job.single_use and pool.single_starting):
        return WhyNotWarmer.PODS_STARTING
    if pool.physical >= pool.ceiling:
        others = counts[HELD_PODS] - (shelf.held if shelf is not None else 0)
        busy = counts[ASSIGNED] + counts[RUNNING]
        if others and not (busy and busy >= pool.ceiling):
            return WhyNotWarmer.HELD_FOR_OTHER_CALLER
        return WhyNotWarmer.POOL_AT_CEILING
    return WhyNotWarmer.NO_IDLE_POD_OF_OWNER


def _has_stale(pool: PoolRecord, job: JobRecord) -> bool:
    """Whether a pod of an old template would have served this job."""
    for rack in pool.racks.values():
        if rack is not pool.rack:
            shelf = rack.shelves.get(job.usage.caller)
            if rack.counts[IDLE_PODS] or (shelf is not None and shelf.all):
                return True
    return False
