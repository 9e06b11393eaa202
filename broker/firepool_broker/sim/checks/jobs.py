"""Properties of jobs: nothing lost, nothing twice, nothing undone, and every end with its reason."""

from firepool_broker.sim.checks.picture import Picture
from firepool_broker.sim.checks.rules import Rules
from firepool_broker.sim.trace import Record
from firepool_wire.words import TERMINAL

RULES = Rules()

_TERMINAL = frozenset(str(state) for state in TERMINAL)


@RULES.holds("S2", "W", "code")
def a_caller_stays_within_its_limits(seen: Picture, r: Record) -> str | None:
    """A caller's running pods and processors never exceed its limits."""
    limit = seen.limits.get(r.get("caller"))
    pod = seen.pods.get(r.get("pod"))
    if limit is None or pod is None:
        return None
    running = [*seen.code_of(r.get("caller")), pod]
    processors = sum(seen.pools[p.sku].processors for p in running if p.sku in seen.pools)
    if limit.pods is not None and len(running) > limit.pods:
        return f"{r.get('caller')} runs {len(running)} pods of {limit.pods}"
    if limit.processors is not None and processors > limit.processors:
        return f"{r.get('caller')} runs {processors} processors of {limit.processors}"
    return None


@RULES.holds("S4", "W", "stale")
def the_one_writer_knows_every_version(seen: Picture, r: Record) -> str | None:
    """The store refuses nothing of its one writer for a stale version."""
    job = seen.jobs.get(r.get("job"))
    return f"{r.get('write')} of {r.get('job')}, which is {job.state if job is not None else 'unknown'}"


@RULES.holds("S9", "F", "PrepareLease")
def equal_jobs_are_served_in_their_order(seen: Picture, r: Record) -> str | None:
    """No job overtakes an equal one that waits longer."""
    job = seen.jobs.get(r.get("attempt").rpartition(":")[0])
    if job is None or not r.get("attempt").endswith(":0"):
        return None
    for name, order in seen.waiting.items():
        other = seen.jobs[name]
        if order < job.order and other.retry == 0 and other.kind == job.kind and other is not job:
            return f"{job.job} overtakes {other.job}"
    return None


@RULES.holds("S41", "W", "row")
def attempt_ids_never_repeat(seen: Picture, r: Record) -> str | None:
    """Attempt ids never repeat, and retries stay within their bounds."""
    job = seen.jobs.get(r.get("job"))
    if job is None or r.get("state") != "RUNNING" or job.state == "RUNNING":
        return None
    if r.get("attempt") in job.attempts:
        return f"{r.get('attempt')} was started before"
    pool = seen.pools.get(job.sku)
    bound = job.retries + (pool.infra_retries if pool is not None else 0)
    retry = int(r.get("attempt").rpartition(":")[2])
    return f"{r.get('attempt')} is beyond {bound} retries" if retry > bound else None


@RULES.holds("S42", "W", "accept")
def what_is_accepted_is_durable(seen: Picture, r: Record) -> str | None:
    """An accepted job is in the store."""
    job = seen.jobs.get(r.get("job"))
    return None if job is not None and job.state else f"{r.get('job')} has no row"


@RULES.holds("S42", "W", "row")
def a_terminal_job_never_changes(seen: Picture, r: Record) -> str | None:
    """A terminal job never changes."""
    job = seen.jobs.get(r.get("job"))
    return f"{job.job} was {job.state}" if job is not None and job.state in _TERMINAL else None


@RULES.holds("S42", "W", "row")
def success_is_real(seen: Picture, r: Record) -> str | None:
    """A job succeeds only if its last attempt ended well on every pod."""
    job = seen.jobs.get(r.get("job"))
    if job is None or r.get("state") != "SUCCEEDED":
        return None
    ends = job.ends.get(job.attempt, {})
    missing = [pod for pod in job.on if not ends.get(pod)]
    return f"{job.attempt} did not end well on {missing}" if missing or not job.on else None


@RULES.holds("S43", "F", "PrepareLease", "CommitStart", "LaunchAttempt", "CreatePod", "DeletePod", "ResetPod")
def nothing_before_the_start(seen: Picture, r: Record) -> str | None:
    """Nothing is dispatched before the tracker is rebuilt."""
    return None if seen.started else f"{r.kind} before BrokerStarted"


@RULES.holds("S44", "W", "row")
def a_finished_attempt_is_not_run_again(seen: Picture, r: Record) -> str | None:
    """An attempt that ended well on pods that still answer is finalised, not re-queued."""
    job = seen.jobs.get(r.get("job"))
    if job is None or r.get("state") != "QUEUED" or job.state != "RUNNING" or not job.on:
        return None
    ends = job.ends.get(job.attempt, {})
    if all(ends.get(pod) and pod in seen.pods and not seen.pods[pod].tainted for pod in job.on):
        return f"{job.attempt} had ended well on {job.on}"
    return None


@RULES.holds("S45", "W", "row")
def an_end_is_written_only_when_all_is_dead(seen: Picture, r: Record) -> str | None:
    """A job ends or is re-queued only when its processes are verified gone on every pod."""
    job = seen.jobs.get(r.get("job"))
    if job is None or job.state != "RUNNING" or r.get("state") == "RUNNING":
        return None
    alive = sorted(pod for pods in job.code.values() for pod in pods)
    return f"{job.job} becomes {r.get('state')} while it runs on {alive}" if alive else None


@RULES.holds("S47", "W", "code")
def attempts_of_a_job_never_overlap(seen: Picture, r: Record) -> str | None:
    """A new attempt never overlaps its predecessor."""
    job = seen.jobs.get(r.get("job"))
    if job is None:
        return None
    others = {attempt: pods for attempt, pods in job.code.items() if pods and attempt != r.get("attempt")}
    return f"{sorted(others)} of {job.job} is alive" if others else None


@RULES.holds("S51", "W", "row")
def a_failure_has_its_class(seen: Picture, r: Record) -> str | None:
    """A job that did not succeed says why, and one that did says nothing of the kind."""
    if r.get("state") in ("FAILED", "CANCELLED") and not r.get("failure"):
        return f"{r.get('job')} is {r.get('state')} without an error class"
    if r.get("state") == "SUCCEEDED" and (r.get("failure") or r.get("code") != "0"):
        return f"{r.get('job')} succeeded with {r.get('failure') or 'exit code ' + (r.get('code') or 'none')}"
    return None


@RULES.holds("S52", "W", "row")
def a_start_has_its_path_and_reason(seen: Picture, r: Record) -> str | None:
    """Every start has one path, and a reason whenever it was not warm."""
    if r.get("state") != "RUNNING":
        return None
    if not r.get("path"):
        return f"{r.get('attempt')} has no path"
    if r.get("path") in ("recycled", "standby", "new") and not r.get("why"):
        return f"{r.get('attempt')} came by {r.get('path')} without a reason"
    return None
