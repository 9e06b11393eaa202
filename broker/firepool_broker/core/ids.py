"""Names of things, as distinct types, so that a pod's name is never passed where a job's id belongs."""

from typing import NewType

JobId = NewType("JobId", str)
#: `<job-id>:<retry-count>`, never repeated (paper A.1).
AttemptId = NewType("AttemptId", str)
PodName = NewType("PodName", str)
Caller = NewType("Caller", str)
Person = NewType("Person", str)
Queue = NewType("Queue", str)
ReuseTag = NewType("ReuseTag", str)
Sku = NewType("Sku", str)
#: UUID of one physical GPU.
Card = NewType("Card", str)
#: Hash of what a pod is made from; an attribute of a pod.
TemplateDigest = NewType("TemplateDigest", str)


def attempt_id(job: JobId, retry_count: int) -> AttemptId:
    """The id of a job's attempt number `retry_count` (0 is the first)."""
    return AttemptId(f"{job}:{retry_count}")


def job_of(attempt: AttemptId) -> JobId:
    """The job that an attempt belongs to."""
    return JobId(attempt.rpartition(":")[0])


def retry_of(attempt: AttemptId) -> int:
    """The retry count inside an attempt id."""
    return int(attempt.rpartition(":")[2])
