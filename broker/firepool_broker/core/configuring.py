"""What an operator changes while the engine runs: pools as a whole, and callers' limits."""

from firepool_broker.core import admission, queueing, starts
from firepool_broker.core.events import CallerLimited, PoolsConfigured
from firepool_broker.core.pools import Pool
from firepool_broker.core.racks import PoolRecord
from firepool_broker.core.state import State


def pools(s: State, event: PoolsConfigured) -> None:
    """Replace the pools: new ones open, changed ones take over their knobs, vanished ones drain and then close."""
    s.configured = True
    wanted = {pool.sku: pool for pool in event.pools}
    for sku, pool in wanted.items():
        record = s.tracker.pools.get(sku)
        if record is None:
            record = s.tracker.open_pool(pool)
        else:
            _change(s, record, pool)
        s.tend(record)
    for sku, record in s.tracker.pools.items():
        if sku not in wanted:
            record.removed, record.open = True, False
            s.tend(record)
            admission.doom_oversized(s, record)


def caller(s: State, event: CallerLimited) -> None:
    """Set a caller's limits; jobs that waited for them are looked at again. Running ones are never touched."""
    usage = s.quota.of(event.caller)
    rekey = usage.limits.tag_boundary != event.limits.tag_boundary
    usage.limit(event.limits)
    if rekey:
        for pool in s.tracker.pools.values():
            if not pool.pool.run_once_across:
                _rekey(s, pool, [usage.caller])
    starts.freed(s, usage)
    for pool in s.tracker.pools.values():
        if event.caller in pool.queue.by_caller:
            s.tend(pool)


def _change(s: State, record: PoolRecord, pool: Pool) -> None:
    before = record.pool
    record.removed = False
    record.configure(pool)
    record.tokens = min(record.tokens + max(0, pool.step - before.step), pool.step)
    if pool.template != before.template:
        s.tracker.switch(record, pool.template)
        s.story.note(record, f"template {before.template} -> {pool.template}")
        s.feed(record)
    if (pool.tag_boundary, pool.run_once_across) != (before.tag_boundary, before.run_once_across):
        _rekey(s, record, list(record.queue.by_caller))
    if pool.idle_timeout_s != before.idle_timeout_s:
        s.rearming.extend(record.rack.idle)
        s.stirred = True
    admission.doom_oversized(s, record)
    s.feed(record)


def _rekey(s: State, record: PoolRecord, callers: list[str]) -> None:
    """Lanes are keyed by what may reuse what: after a change of that policy the waiting jobs are keyed anew."""
    waiting = [lane for lane in record.queue.lanes.values() if lane.caller in callers]
    for lane in waiting:
        for job in list(lane.jobs()):
            queueing.rekey(s, job)
    s.feed(record)
    for owner in record.queue.by_caller:
        s.feed_owner(record, owner)
