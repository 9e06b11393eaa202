"""What a launch needs in the pod: blobs pushed into its cache, dependencies' results, and the message that binds all.

Runs after the commit and before the attempt's process is let go. What is in the pod's cache already is not sent again.
"""

import asyncio
import base64
from dataclasses import asdict
from typing import Any

from firepool_broker.core.ids import AttemptId, retry_of
from firepool_broker.core.pools import Pool
from firepool_broker.shell.ports import JobRow
from firepool_broker.shell.runner.desk import Desk, LiveJob, LivePod, Run
from firepool_wire.agentapi import Launch
from firepool_wire.errors import Internal, NotFound, PackageError, StoreUnavailable
from firepool_wire.jobspec import FunctionEntry, JobSpec

#: Deadline of a launch for pools without a start timeout; the agent refuses it afterwards.
LAUNCH_DEADLINE_S = 300.0
#: Blobs up to this size are pushed without asking whether the pod has them: one round trip instead of two.
PUSH_UNASKED_BYTES = 64 * 1024
#: Settings of a pool that are the installers' business.
INSTALLER_KEYS = ("index_url", "ca", "proxy", "wheelhouse", "installer")


class Deliver:
    """Builds launch messages and fills pods' blob caches."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def launch_message(self, live: LiveJob, run: Run, pod: LivePod, world: int) -> Launch:
        """Everything that is bound late, for one pod of the attempt; its blobs are in the pod when this returns.

        Raises:
            FirepoolError: a blob is missing, or the pod refused it.
            AgentUnreachable: the pod did not answer.
        """
        spec = await self._full_spec(live)
        function = spec.entrypoint.function
        digests = blobs_of(spec)
        missing = [d for d in digests if d not in pod.blobs]
        if missing:
            await asyncio.gather(*(self._push(live.ask.caller, pod, digest) for digest in missing))
        pool = self._desk.pools.get(live.ask.sku) or Pool(sku=live.ask.sku)
        start_s = spec.start_timeout_s if spec.start_timeout_s is not None else pool.start_timeout_s
        memory = spec.memory_mib if spec.memory_mib is not None else pool.shape.memory_mib
        return Launch(
            deadline_s=self._desk.clock.deadline(start_s or LAUNCH_DEADLINE_S),
            function=_function_json(function) if function is not None else None,
            argv=list(spec.entrypoint.argv) if spec.entrypoint.argv is not None else None,
            args_blob=function.args_blob if function is not None else None,
            depends=await self._results(live) if live.ask.depends else [],
            package=spec.package,
            requirements=_requirements(spec, pool),
            env=dict(spec.env),
            injected=injected(live, run, world),
            run_timeout_s=spec.run_timeout_s if spec.run_timeout_s is not None else pool.run_timeout_s,
            start_timeout_s=start_s,
            grace_s=spec.grace_s,
            memory_bytes=memory * 1024 * 1024,
            max_log_bytes=pool.max_log_bytes,
            max_result_bytes=pool.max_result_bytes,
            outputs=list(spec.outputs),
            # A job may ask for more caution than its pool, never for less.
            untrusted=pool.untrusted or bool(spec.untrusted),
            installer={k: v for k, v in pool.settings if k in INSTALLER_KEYS},
        )

    def forget_blobs(self, pod: LivePod, spec: JobSpec) -> None:
        """The pod turned out to lack a blob that it was known to have (evicted): push again next time."""
        pod.blobs.difference_update(blobs_of(spec))

    async def _full_spec(self, live: LiveJob) -> JobSpec:
        if not live.light:
            return live.spec
        row = await self._desk.parts.store.get(live.ask.job)
        if row is None:
            raise Internal(f"the store lost job {live.ask.job}", job_id=live.ask.job)
        return row.spec

    async def _push(self, caller: str, pod: LivePod, digest: str) -> None:
        blobs, agents = self._desk.parts.blobs, self._desk.parts.agents
        try:
            path = await blobs.local_path(caller, digest)
            small = path.stat().st_size <= PUSH_UNASKED_BYTES
            if small or not await agents.has_blob(pod.address, digest):
                await agents.put_blob(pod.address, digest, path)
        except (NotFound, PackageError) as error:
            # It was whole when the job was taken: that it is not any more is our fault, never the job's.
            raise StoreUnavailable(
                f"the stored blob {digest} is damaged or lost: {error.message}", digest=digest
            ) from error
        pod.blobs.add(digest)

    async def _results(self, live: LiveJob) -> list[str]:
        """Result frames of the dependencies, base64, in the order of the function's placeholders."""
        depends = live.ask.depends
        rows = {row.job: row for row in await self._desk.parts.store.get_many(list(dict.fromkeys(depends)))}
        return [base64.b64encode(await self.result_of(rows.get(d), d)).decode() for d in depends]

    async def result_of(self, row: JobRow | None, job: str) -> bytes:
        """The result frames of a finished job. Raises: NotFound."""
        if row is None or (row.result is None and row.result_blob is None):
            raise NotFound(f"job {job} left no result", job_id=job)
        if row.result is not None:
            return row.result
        assert row.result_blob is not None
        return await self._desk.parts.blobs.get(row.caller, row.result_blob)


def blobs_of(spec: JobSpec) -> list[str]:
    """Digests that must be in the pod before the launch."""
    function = spec.entrypoint.function
    wanted = [spec.package]
    if function is not None:
        wanted += [function.payload, function.args_blob]
    return list(dict.fromkeys(d for d in wanted if d is not None))


def injected(live: LiveJob, run: Run, world: int) -> dict[str, str]:
    """Variables that the job sees and cannot override: who it is, as verified, and where it stands."""
    ask, spec = live.ask, live.spec
    variables = {
        "FIREPOOL_JOB_ID": ask.job,
        "FIREPOOL_ATTEMPT": run.attempt,
        "FIREPOOL_RETRY_COUNT": str(retry_of(AttemptId(run.attempt))),
        "FIREPOOL_CALLER": ask.caller,
        "FIREPOOL_PERSON": ask.person,
        "FIREPOOL_SKU": ask.sku,
        "FIREPOOL_QUEUE": ask.queue,
        "FIREPOOL_POD": run.pod,
        "FIREPOOL_RANK": str(run.rank),
        "FIREPOOL_WORLD_SIZE": str(world),
    }
    if ask.tag is not None:
        variables["FIREPOOL_LEASE_TAG"] = ask.tag
    if spec.run is not None:
        variables["FIREPOOL_RUN"] = spec.run
    return variables


def _function_json(function: FunctionEntry) -> dict[str, Any]:
    body = {name: getattr(function, name) for name in FunctionEntry.__slots__}
    body["depends"] = list(function.depends)
    return body


def _requirements(spec: JobSpec, pool: Pool) -> dict[str, Any] | None:
    if spec.requirements is None:
        return None
    body = asdict(spec.requirements)
    body["mode"] = spec.requirements.mode or pool.requirements_mode
    return body
