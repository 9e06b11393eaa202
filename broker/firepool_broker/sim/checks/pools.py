"""Properties of pools: what they may hold."""

from firepool_broker.sim.checks.picture import Picture
from firepool_broker.sim.checks.rules import Rules
from firepool_broker.sim.trace import Record

RULES = Rules()


@RULES.holds("S30", "F", "CreatePod")
def never_above_the_ceiling(seen: Picture, r: Record) -> str | None:
    """Pods of a pool, terminating ones included, never use more than its ceiling when one is created."""
    pool = seen.pools.get(r.get("sku"))
    if pool is None:
        return f"no pool {r.get('sku')}"
    alive = sum(pod.sku == pool.sku for pod in seen.pods.values())
    ordered = sum(sku == pool.sku for pod, sku in seen.ordered.items() if pod != r.get("pod"))
    used = (alive + ordered + 1) * pool.processors
    if r.get("pod") in seen.pods or used <= pool.max_count:
        return None
    return f"{used} of {pool.max_count} processors ({alive} pods, {ordered} ordered, 1 more)"


@RULES.holds("S41", "F", "CreatePod")
def a_pod_name_is_never_used_again(seen: Picture, r: Record) -> str | None:
    """A pod's name is never given to another pod (a late answer would be taken for the new one's)."""
    return f"{r.get('pod')} lived before" if r.get("pod") in seen.gone else None
