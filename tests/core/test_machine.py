"""Random lives of the engine in the model world: whatever happens in whatever order, the safety properties hold (they are
asserted in `world` and by `Engine.check`), and afterwards everything comes to its end: no job is lost (S42), none runs twice at
once (S47), no pod is leaked.

Rooms: all of them together, and `checks`, which watches.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from firepool_broker.core.events import CallerLimited, CancelRequested, PoolsConfigured
from firepool_broker.core.ids import Caller, JobId, PodName, TemplateDigest
from firepool_wire.words import TERMINAL, PodState
from tests.builders import a_failure, a_limit, a_pool, an_ask
from tests.core.world import World

CALLERS = ("ann", "bob", "cyd")
#: How a piece of work ends: mostly well, sometimes not.
WAYS = st.sampled_from(("ok", "ok", "ok", "ok", "fail"))


class Lives(RuleBasedStateMachine):
    """One world, one engine (and its successors after crashes)."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            (
                a_pool("cpu", ceiling=4, idle_timeout_s=20.0, caller_hold_s=15.0, hold_tenure_min_s=2.0, step=3),
                a_pool("h200", gpus=2, ceiling=3, min_count=1, max_idle_count=1, tag_boundary="hint", step=2),
            )
        )
        self.submitted = 0

    # -- callers ----------------------------------------------------------------------------------------------------

    @rule(
        caller=st.sampled_from(CALLERS),
        sku=st.sampled_from(("cpu", "cpu", "h200")),
        tag=st.sampled_from((None, "x", "y")),
        pods=st.sampled_from((1, 1, 1, 2, 3)),
        single_use=st.sampled_from((False, False, False, True)),
        retries=st.integers(0, 2),
        priority=st.integers(0, 1),
        depends=st.booleans(),
    )
    def submit(self, depends: bool, **fields: Any) -> None:
        self.submitted += 1
        rows = self.world.rows
        live = [job for job, row in rows.items() if row.state not in TERMINAL]
        fields["max_retries"] = fields.pop("retries")
        inputs = (live[-1],) if depends and live else ()
        self.world.submit(an_ask(f"j{self.submitted}", submitted_at=self.world.now, depends=inputs, **fields))

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, self.submitted))
        self.world.send(CancelRequested(JobId(f"j{number}"), a_failure("Cancelled"), "ann"))

    @rule(caller=st.sampled_from(CALLERS), pods=st.sampled_from((None, 3, 4)))
    def limit(self, caller: str, pods: int | None) -> None:
        self.world.send(CallerLimited(Caller(caller), a_limit(pods)))

    # -- the world --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.writes)
    @rule(way=st.sampled_from(("ok", "ok", "ok", "ok", "ok", "fail", "unknown", "unknown_lost")))
    def write(self, way: str) -> None:
        self.world.write(way)

    @precondition(lambda self: self.world.work)
    @rule(data=st.data(), way=WAYS, settling=st.booleans())
    def work(self, data: st.DataObject, way: str, settling: bool) -> None:
        index = data.draw(st.integers(0, len(self.world.work) - 1))
        work = self.world.work.pop(index)
        if work.kind == "reset" and way == "ok" and settling:
            way = "settling"
        self.world.finish(work, way)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(seconds=st.sampled_from((0.01, 0.05, 1.0, 5.0, 40.0)))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data(), oom=st.booleans())
    def die(self, data: st.DataObject, oom: bool) -> None:
        pod = data.draw(st.sampled_from(sorted(self.world.agents)))
        for event in self.world.die(PodName(pod), oom):
            self.world.send(event)

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data())
    def miss(self, data: st.DataObject) -> None:
        self.world.unreachable(PodName(data.draw(st.sampled_from(sorted(self.world.agents)))))

    @rule()
    def crash(self) -> None:
        self.world.crash()
        self.world.recover()

    @rule(template=st.sampled_from(("t0", "t1")), ceiling=st.sampled_from((3, 4)))
    def reconfigure(self, template: str, ceiling: int) -> None:
        cpu, h200 = self.world.pools
        fields = {name: getattr(cpu, name) for name in cpu.__slots__}
        fields |= {"template": TemplateDigest(template), "max_count": ceiling}
        self.world.pools = (type(cpu)(**fields), h200)
        self.world.send(PoolsConfigured(self.world.pools))

    @invariant()
    def s2_nobody_is_over_a_limit_that_was_in_force_at_the_claim(self) -> None:
        self.world.engine.check(everything=True)

    def teardown(self) -> None:
        """Liveness: once nothing goes wrong any more, every accepted job ends and every pod is idle, held or gone."""
        world = self.world
        for caller in CALLERS:
            world.send(CallerLimited(Caller(caller), a_limit()))
        world.run_out()
        assert world.engine.ticks_that_helped == 0, "an event forgot to wake dispatch"
        assert set(world.accepted) <= set(world.rows), "S42 an accepted job was lost"
        resting = {PodState.IDLE, PodState.HELD, PodState.RETIRING, PodState.STARTING}
        assert set(world.states().values()) <= resting, world.states()
        assert not world.engine._state.jobs and not world.engine._state.leases


Lives.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLives = Lives.TestCase
