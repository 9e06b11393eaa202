"""Asking for a job's end, in whatever phase it is, and the deadlines that ask for it.

A job that waits ends at once. A claimed one gives its pods back. One whose start is being written ends when the answer is
there. A running one is stopped, and stays RUNNING with `cancel_requested` until its process tree is proven gone.
"""

from math import inf

from firepool_broker.core import admission, endings, fleet, queueing, starts
from firepool_broker.core.asks import Failure
from firepool_broker.core.effects import RecordCancel
from firepool_broker.core.errors import failure
from firepool_broker.core.events import CancelRequested, ClientRenewed
from firepool_broker.core.ids import JobId
from firepool_broker.core.jobs import BEING_STORED, NOT_STORED, QUEUED, JobRecord
from firepool_broker.core.leases import ACTIVE, OVER, PREPARING, Lease
from firepool_broker.core.pods import RUNNING
from firepool_broker.core.state import State


def requested(s: State, event: CancelRequested) -> None:
    """Somebody with the right to do so wants the job gone."""
    job = s.jobs.get(event.job)
    if job is not None:
        by = f" by {event.actor}" if event.actor else ""
        s.story.note(job, f"cancel asked for{by}: {event.failure.code}")
        cancel(s, job, event.failure)


def cancel(s: State, job: JobRecord, cause: Failure) -> None:
    """End the job as `cause` says, the first request counting."""
    if job.cancel is not None:
        return
    job.cancel = cause
    lease = job.lease
    if job.end is not None:
        # Its end is being written: a terminal one stands, a re-queued job ends instead of starting again.
        return
    if lease is None:
        admission.forget_inputs(s, job)
        queueing.end_waiting(s, job, cause)
    elif lease.phase is PREPARING:
        starts.undo(s, lease)
        queueing.end_waiting(s, job, cause)
    elif lease.phase is ACTIVE:
        s.emit(RecordCancel(job.id, job.version))
        job.version += 1
        endings.stop(s, lease, cause)


def store_failed(s: State, name: JobId, cause: Failure) -> None:
    """The row was not written: the submitter gets the error, the job is forgotten, a claim is undone."""
    job = s.jobs.get(name)
    if job is None or job.row is not BEING_STORED:
        return
    s.story.note(job, f"not stored: {cause.code}")
    job.row = NOT_STORED
    job.cancel = cause
    job.end = None
    admission.forget_inputs(s, job)
    if job.lease is None:
        queueing.end_waiting(s, job, cause)
    elif job.lease.phase is PREPARING:
        starts.undo(s, job.lease)
        queueing.end_waiting(s, job, cause)
    # Else a start was written behind the lost row: its answer, lost too, ends the job.


def renewed(s: State, event: ClientRenewed) -> None:
    """Some client still wants these jobs. Their timers stay: they look at the new deadline when they fire."""
    for name in event.jobs:
        job = s.jobs.get(name)
        if job is not None and job.ask.client_lease_s is not None:
            job.client_until = s.now + job.ask.client_lease_s


def on_timer(s: State, job: JobRecord) -> None:
    """One of the job's deadlines has come."""
    now = s.now
    if job.end is not None:
        if job.end_again <= now:
            job.end_again = inf
            s.emit(job.end)
    elif job.cancel is None and job.client_until <= now:
        cancel(s, job, failure("ClientGone", f"no client renewed job {job.id} for {job.ask.client_lease_s:g} s"))
    elif job.lease is not None:
        _lease_timer(s, job, job.lease)
    elif job.queue_until <= now:
        cause = failure(
            "QueueTimeout",
            f"job {job.id} waited {now - job.at_queued:.1f} s for {job.pods} pods of {job.pool.sku}",
            blocked_by=job.why.value if job.why is not None else "",
        )
        queueing.end_waiting(s, job, cause)
    elif job.lane is None and job.state is QUEUED and job.not_before <= now:
        starts.place(s, job)
    if job.id in s.jobs:
        s.timers.arm(job, job.due())


def _lease_timer(s: State, job: JobRecord, lease: Lease) -> None:
    now = s.now
    if lease.stop_by and lease.stop_by <= now:
        lease.stop_by = 0.0
        for rank, pod in enumerate(lease.pods):
            if lease.parts[rank] < OVER and pod.lease is lease and pod.state is RUNNING:
                fleet.retire(s, pod, "did not confirm that its attempt was stopped")
                s.tend(pod.rack.pool)
    elif lease.start_by and lease.start_by <= now:
        waited = now - lease.at_committed
        endings.stop(s, lease, failure("StartTimeout", f"no first instruction of {lease.attempt} after {waited:.1f} s"))
    elif lease.run_by and lease.run_by <= now:
        endings.stop(
            s, lease, failure("RunTimeout", f"{lease.attempt} ran past its run time-out, and its agent let it")
        )
