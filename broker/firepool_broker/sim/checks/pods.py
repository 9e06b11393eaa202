"""Properties of pods: who runs in them, after whom, and when they must not run again."""

from firepool_broker.sim.checks.picture import Picture
from firepool_broker.sim.checks.rules import Rules
from firepool_broker.sim.trace import Record

RULES = Rules()

#: Rounding of times in a trace.
EPSILON_S = 1e-5


@RULES.holds("S1", "W", "code", "clash")
def one_attempt_at_once(seen: Picture, r: Record) -> str | None:
    """No pod runs two attempts at once."""
    pod = seen.pods.get(r.get("pod"))
    if r.kind == "clash":
        return f"{r.get('pod')} was prepared for {r.get('attempt')} while it runs {r.get('running')}"
    if pod is not None and pod.code:
        return f"{pod.name} runs {sorted(pod.code)} and now {r.get('attempt')}"
    return None


@RULES.holds("S1", "F", "PrepareLease")
def one_lease_at_once(seen: Picture, r: Record) -> str | None:
    """No pod carries two leases at any time."""
    pod = seen.pods.get(r.get("pod"))
    if pod is not None and pod.leased_by and pod.leased_by != r.get("attempt"):
        return f"{pod.name} is leased to {pod.leased_by} and now to {r.get('attempt')}"
    return None


@RULES.holds("S3", "W", "code")
def no_code_before_its_commit(seen: Picture, r: Record) -> str | None:
    """No user code of an attempt starts before the commit of its start, or after its end."""
    job = seen.jobs.get(r.get("job"))
    if job is None:
        return f"{r.get('attempt')} belongs to no job"
    if job.state != "RUNNING" or job.attempt != r.get("attempt"):
        return f"the store says {job.state or 'nothing'} ({job.attempt or 'no attempt'}) of {job.job}"
    if r.get("pod") not in job.on:
        return f"{r.get('attempt')} is bound to {job.on}, not to {r.get('pod')}"
    return None


@RULES.holds("S6", "F", "PrepareLease")
def a_pod_that_failed_to_prepare_retires(seen: Picture, r: Record) -> str | None:
    """A pod whose agent did not prepare is not leased again."""
    pod = seen.pods.get(r.get("pod"))
    return f"{pod.name} failed before" if pod is not None and pod.prepare_failed else None


@RULES.holds("S8", "W", "code")
def a_gang_has_all_its_pods(seen: Picture, r: Record) -> str | None:
    """A gang has all its pods, on distinct cards, or none."""
    job = seen.jobs.get(r.get("job"))
    if job is None:
        return None
    if len(set(job.on)) != job.pods:
        return f"{job.job} asked for {job.pods} pods and runs on {job.on}"
    cards = [card for name in job.on if name in seen.pods for card in seen.pods[name].cards]
    return f"{job.job} has a card twice: {cards}" if len(set(cards)) != len(cards) else None


@RULES.holds("S10", "W", "code")
def consecutive_users_are_one_caller(seen: Picture, r: Record) -> str | None:
    """Consecutive users of a pod are the same caller, over its whole life and across restarts."""
    pod = seen.pods.get(r.get("pod"))
    if pod is not None and pod.uses and pod.caller != r.get("caller"):
        return f"{pod.name} was used by {pod.caller} and now by {r.get('caller')}"
    return None


@RULES.holds("S11", "W", "code")
def one_job_after_a_boundary(seen: Picture, r: Record) -> str | None:
    """After a change of tag or queue at most one job runs on a pod (S12: queues also in hint mode), after a single-use job none (S20)."""
    pod = seen.pods.get(r.get("pod"))
    if pod is not None and pod.finished:
        return f"{pod.name} had its last use ({pod.queue}/{pod.tag or '-'})"
    return None


@RULES.holds("S13", "F", "PrepareLease")
def an_expired_hold_is_never_claimed(seen: Picture, r: Record) -> str | None:
    """A pod whose hold has expired is never claimed again."""
    pod = seen.pods.get(r.get("pod"))
    if pod is None or pod.released_at is None:
        return None
    deadline = pod.released_at + pod.hold_s
    return f"{pod.name}: its hold ended at {deadline:.3f}" if r.at >= deadline + EPSILON_S else None


@RULES.holds("S14", "F", "DeletePod")
def a_hold_is_broken_only_for_need(seen: Picture, r: Record) -> str | None:
    """A hold ends early only for a queued job, and only after its minimum tenure."""
    pod = seen.pods.get(r.get("pod"))
    pool = seen.pools.get(pod.sku) if pod is not None else None
    if pod is None or pool is None or pod.released_at is None or pod.tainted or pod.finished or pod.single_use:
        return None
    if pod.template != pool.template or r.at >= pod.died_at + pod.hold_s - EPSILON_S:
        return None
    if r.at - pod.died_at <= pool.tenure_s:
        return f"{pod.name} was held for {r.at - pod.died_at:.1f} s only"
    if not any(job.sku == pod.sku and job.state in ("QUEUED", "PENDING", "") for job in seen.jobs.values()):
        return f"{pod.name} was held and nobody waits"
    return None


@RULES.holds("S16", "W", "code")
def only_clean_pods_run_again(seen: Picture, r: Record) -> str | None:
    """A used pod runs again only after a reset that was proved clean."""
    pod = seen.pods.get(r.get("pod"))
    if pod is None or not pod.uses:
        return None
    if pod.unclean:
        return f"{pod.name} was reported unclean"
    return None if pod.clean else f"{pod.name} was not reset since its last use"


@RULES.holds("S23", "W", "code")
def one_pod_serves_a_card(seen: Picture, r: Record) -> str | None:
    """At most one pod per card runs user code."""
    pod = seen.pods.get(r.get("pod"))
    if pod is None:
        return None
    for other in seen.pods.values():
        if other is not pod and other.code and set(other.cards) & set(pod.cards):
            return f"{pod.name} and {other.name} serve on {sorted(set(other.cards) & set(pod.cards))}"
    return None


@RULES.holds("S54", "F", "PrepareLease")
def a_stale_pod_serves_nobody(seen: Picture, r: Record) -> str | None:
    """A pod of an old template is never claimed."""
    pod = seen.pods.get(r.get("pod"))
    pool = seen.pools.get(pod.sku) if pod is not None else None
    if pod is not None and pool is not None and pod.template != pool.template:
        return f"{pod.name} is of {pod.template}, the pool of {pool.template}"
    return None


@RULES.holds("S59", "F", "DeletePod")
def a_running_job_is_not_killed_to_make_room(seen: Picture, r: Record) -> str | None:
    """A pod in which a job runs is deleted only when its agent could not be reached."""
    pod = seen.pods.get(r.get("pod"))
    if pod is not None and pod.code and not pod.tainted:
        return f"{pod.name} runs {sorted(pod.code)} ({r.get('why')})"
    return None
