"""What came of a run, read from ledger, clients and trace: per job its waits and path, over all makespan and held capacity."""

from dataclasses import dataclass

from firepool_broker.core.ids import JobId
from firepool_broker.sim.scene import Scene
from firepool_broker.sim.trace import Trace
from firepool_wire.words import JobState, Path


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """One job; times in virtual seconds."""

    job: JobId
    kind: str
    #: None: refused, or (a fault) lost.
    state: JobState | None
    #: Error code of a refusal, "" if it was taken.
    refused: str
    submitted_at: float
    #: User code of the last attempt began; None: it never ran.
    first_at: float | None
    ended_at: float | None
    retries: int
    path: Path | None
    why_not_warmer: str

    @property
    def start_s(self) -> float | None:
        """Submit → first instruction."""
        return None if self.first_at is None else self.first_at - self.submitted_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A whole run."""

    jobs: tuple[JobOutcome, ...]
    pods_made: int
    crashes: int
    #: Lines of the trace and its digest: equal digests, equal runs.
    lines: int
    digest: str
    #: Σ (gone or end − born) over pods, seconds.
    held_pod_s: float

    @property
    def makespan_s(self) -> float:
        """First submission → last completion (paper B.2)."""
        ends = [job.ended_at for job in self.jobs if job.ended_at is not None]
        return max(ends) - min(job.submitted_at for job in self.jobs) if ends else 0.0

    @property
    def lost(self) -> int:
        """Jobs without an end that were not refused."""
        return sum(job.state is None and not job.refused for job in self.jobs)

    def starts_s(self) -> list[float]:
        """Submit → first instruction of every job that ran."""
        return [job.start_s for job in self.jobs if job.start_s is not None]

    def share(self, path: Path) -> float:
        """Share of the jobs that ran which came by this path."""
        ran = [job for job in self.jobs if job.path is not None]
        return sum(job.path is path for job in ran) / len(ran) if ran else 0.0


def outcome_of(scene: Scene, trace: Trace, crashes: int) -> Outcome:
    """The outcome of a run that has ended."""
    first: dict[str, float] = {}
    for record in trace.records:
        if record.kind == "code":
            first[record.get("job")] = record.at
    jobs = []
    for story in scene.clients.stories.values():
        row = scene.ledger.rows.get(story.job)
        jobs.append(
            JobOutcome(
                job=story.job,
                kind=story.work.kind,
                state=story.state,
                refused=story.refused.code if story.refused is not None else "",
                submitted_at=story.submitted_at,
                first_at=first.get(story.job),
                ended_at=story.ended_at,
                retries=row.retry_count if row is not None else 0,
                path=row.path if row is not None else None,
                why_not_warmer=row.why_not_warmer if row is not None else "",
            )
        )
    yard, now = scene.yard, scene.clock.now
    held = sum(gone - born for _, born, gone in yard.lives) + sum(now - pod.born_at for pod in yard.pods.values())
    return Outcome(
        jobs=tuple(jobs),
        pods_made=yard.made,
        crashes=crashes,
        lines=len(trace.records),
        digest=trace.digest(),
        held_pod_s=held,
    )
