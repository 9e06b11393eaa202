"""Launching attempts and following their event logs to the end, on each pod, across broken connections and restarts.

The event stream opens together with the launch, so the first instruction is known the moment it happens. An attempt's
end is told only when everything it produced is stored.
"""

import asyncio

from firepool_broker.core.effects import FollowAttempt, LaunchAttempt
from firepool_broker.core.events import AttemptEnded, FirstInstruction, Launched, LaunchFailed
from firepool_broker.core.ids import AttemptId, PodName, job_of
from firepool_broker.shell.ports import AgentUnreachable, StoreDown
from firepool_broker.shell.runner.deliver import Deliver
from firepool_broker.shell.runner.desk import Desk, LiveJob, LivePod, Run
from firepool_broker.shell.runner.harvest import Harvest
from firepool_broker.shell.runner.pods import Pods
from firepool_broker.shell.runner.words import exit_of, failure_of, internal
from firepool_wire.agentapi import Launch
from firepool_wire.errors import FirepoolError, HostLost, NotFound
from firepool_wire.frames import Frame, Kind

RETRY_S = 0.1
RETRY_MOST_S = 3.0


class Follow:
    """Carries `LaunchAttempt` and `FollowAttempt` out."""

    def __init__(self, desk: Desk, pods: Pods, deliver: Deliver) -> None:
        self._desk = desk
        self._pods = pods
        self._deliver = deliver

    def ended(self, attempt: AttemptId, pod: PodName) -> bool:
        """Whether nothing of the attempt can run on the pod any more, as far as the shell knows."""
        run = self._desk.runs.get(attempt, {}).get(pod)
        return run is not None and run.exit is not None

    def knows(self, attempt: AttemptId, pod: PodName) -> bool:
        """Whether the attempt was to be launched on the pod, now or before a restart."""
        return pod in self._desk.runs.get(attempt, {})

    def launch(self, effect: LaunchAttempt) -> None:
        """Deliver, release and follow the attempt on every pod."""
        for rank, name in enumerate(effect.pods):
            run = self._run(effect.attempt, name, rank)

            def failed(error: Exception, name: PodName = name) -> LaunchFailed:
                return LaunchFailed(effect.attempt, name, failure_of(internal(error, "launching")))

            self._desk.spawn(self._launch(run, len(effect.pods)), "launching an attempt", failed)

    def follow(self, effect: FollowAttempt) -> None:
        """Re-attach to a live attempt after a start of the broker."""
        for rank, name in enumerate(effect.pods):
            run, pod = self._run(effect.attempt, name, rank), self._desk.pods.get(name)
            run.launched = run.read_before = True
            if pod is not None and run.exit is None:
                self._read(run, pod)

    async def collect(self, attempt: AttemptId, pod: LivePod) -> Run:
        """Read an attempt that ended while no broker was there; its exit is on the run unless the pod went."""
        live = self._desk.jobs.get(job_of(attempt))
        rank = live.pods.index(pod.name) if live is not None and pod.name in live.pods else 0
        run = self._run(attempt, pod.name, rank)
        run.launched = run.read_before = True
        if live is not None and run.exit is None:
            await self._to_the_end(run, pod, live, tell=False)
        return run

    def _run(self, attempt: AttemptId, name: PodName, rank: int) -> Run:
        runs = self._desk.runs.setdefault(attempt, {})
        if name not in runs:
            runs[name] = Run(attempt=attempt, pod=name, rank=rank)
        return runs[name]

    # -- launching -----------------------------------------------------------------------------------------------------

    async def _launch(self, run: Run, world: int) -> None:
        desk, pod = self._desk, self._desk.pods.get(run.pod)
        live = desk.jobs.get(job_of(run.attempt))
        if live is None or pod is None:
            return  # the pod went between commit and launch: `PodGone` says so
        try:
            message = await self._deliver.launch_message(live, run, pod, world)
        except FirepoolError as error:
            self._failed(run, error)
            return
        except AgentUnreachable as error:
            self._pods.strike(pod, "deliver", error)
            self._failed(run, HostLost(f"pod {run.pod} could not be given the job's blobs: {error}"))
            return
        reader = self._read(run, pod)
        failure_told = await self._release(run, pod, live, message)
        if failure_told:
            reader.cancel()

    async def _release(self, run: Run, pod: LivePod, live: LiveJob, message: Launch) -> bool:
        """Let the process go; repeated while the outcome is unknown and the deadline allows. True: it failed."""
        desk, pause_s, redelivered = self._desk, RETRY_S, False
        while not pod.gone.is_set():
            try:
                await desk.parts.agents.launch(pod.address, run.attempt, message)
            except AgentUnreachable as error:
                self._pods.strike(pod, "launch", error)
                if desk.clock.deadline(0) > message.deadline_s:
                    return False  # refused from now on; the start timeout, or the pod's end, settles the attempt
            except NotFound as error:
                if redelivered:
                    self._failed(run, error)
                    return True
                redelivered = True
                self._deliver.forget_blobs(pod, live.spec)
                message = await self._deliver.launch_message(live, run, pod, len(live.pods))
                continue
            except FirepoolError as error:
                if not run.launched:
                    self._failed(run, error)
                return not run.launched
            else:
                self._launched(run)
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MOST_S)
        return False

    def _failed(self, run: Run, error: FirepoolError) -> None:
        run.error = error.to_json()
        self._desk.emit(LaunchFailed(run.attempt, run.pod, failure_of(error)))

    def _launched(self, run: Run) -> None:
        if not run.launched:
            run.launched = True
            self._desk.emit(Launched(run.attempt, run.pod))

    # -- following -----------------------------------------------------------------------------------------------------

    def _read(self, run: Run, pod: LivePod) -> "asyncio.Task[None]":
        live = self._desk.jobs[job_of(run.attempt)]
        reader = self._desk.spawn(self._to_the_end(run, pod, live, tell=True), "following an attempt")
        pod.readers.add(reader)
        reader.add_done_callback(pod.readers.discard)
        return reader

    async def _to_the_end(self, run: Run, pod: LivePod, live: LiveJob, *, tell: bool) -> None:
        """Read the event log until it ended and everything is stored, or the pod is gone."""
        desk, parts, pause_s = self._desk, self._desk.parts, RETRY_S
        harvest: Harvest | None = None
        try:
            while True:
                try:
                    if harvest is None:
                        harvest = Harvest(run, live.ask.caller, parts.logs, parts.blobs)
                    if not harvest.ended:
                        async for frame in parts.agents.events(pod.address, run.attempt, harvest.offset):
                            await harvest.take(frame)
                            if frame.kind is Kind.STARTED and tell:
                                self._started(run, live, frame)
                    record = await harvest.finish(parts.agents, pod)
                    if record is not None and tell:
                        self._launched(run)
                        desk.emit(AttemptEnded(run.attempt, run.pod, exit_of(record)))
                    return
                except AgentUnreachable as error:
                    if pod.gone.is_set():
                        return
                    self._pods.strike(pod, "events", error)
                except (FirepoolError, StoreDown, OSError) as error:
                    # The stores cannot take it now (disk full): the agent keeps everything, so begin anew later.
                    desk.log.warning("not stored", attempt=run.attempt, pod=run.pod, cause=str(error))
                    if harvest is not None:
                        await harvest.drop()
                        harvest = None
                await self._pause(pod, pause_s)
                pause_s = min(pause_s * 2, RETRY_MOST_S)
        finally:
            if harvest is not None:
                await harvest.drop()

    def _started(self, run: Run, live: LiveJob, frame: Frame) -> None:
        desk = self._desk
        self._launched(run)
        at = desk.clock.of_monotonic(float(frame.json()["at_s"]))
        if run.rank == 0:
            took_s = max(0.0, at - live.ask.submitted_at)
            desk.metrics.first_instruction_s.labels(live.ask.sku, live.path or "").observe(took_s)
        desk.emit(FirstInstruction(run.attempt, run.pod, at))

    @staticmethod
    async def _pause(pod: LivePod, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await pod.gone.wait()
        except TimeoutError:
            return
