"""The claim order with its paths and reasons (spec §3), on a tracker without an engine around it.

Rooms: `claims`, `tracker`, `racks`, `leases`, `quota`.
"""

from collections.abc import Iterator

import pytest

from firepool_broker.core import claims
from firepool_broker.core.ids import Caller, Card, PodName, Queue, ReuseTag
from firepool_broker.core.jobs import JobRecord
from firepool_broker.core.leases import Lease
from firepool_broker.core.pods import PodRecord
from firepool_broker.core.pools import Pool
from firepool_broker.core.quota import Quota
from firepool_broker.core.racks import HELD, IDLE, PoolRecord
from firepool_broker.core.story import Story
from firepool_broker.core.timers import Timers
from firepool_broker.core.tracker import Tracker
from firepool_wire.words import Path, PodState, WhyNotWarmer
from tests.builders import a_limit, a_pool, an_ask


class Floor:
    """A tracker with one pool and short ways to fill it."""

    def __init__(self, pool: Pool | None = None) -> None:
        self.tracker = Tracker(Story(), Timers())
        self.quota = Quota()
        self.pool: PoolRecord = self.tracker.open_pool(pool or a_pool(ceiling=16))
        self.names: Iterator[int] = iter(range(10_000))

    def idle(self, at: float = 1.0, cards: tuple[str, ...] = (), strength: int = 3) -> PodRecord:
        pod = PodRecord(PodName(f"p{next(self.names)}"), self.pool.rack, 0.0)
        pod.cards, pod.strength = tuple(Card(card) for card in cards), strength
        self.tracker.add(pod)
        self.tracker.ready(pod, at)
        return pod

    def held(
        self,
        owner: str = "ann",
        *,
        queue: str = "default",
        tag: str | None = None,
        at: float = 1.0,
        layers: tuple[str, ...] = (),
    ) -> PodRecord:
        pod = PodRecord(PodName(f"p{next(self.names)}"), self.pool.rack, 0.0)
        pod.strength, pod.layers = 3, layers
        key = (Queue(queue), ReuseTag(tag) if tag is not None else None)
        self.tracker.adopt_held(pod, Caller(owner), key, at, at + 100.0)
        return pod

    def job(self, name: str = "j", **fields: object) -> JobRecord:
        ask = an_ask(name, **fields)  # type: ignore[arg-type]
        return JobRecord(ask, self.pool, self.quota.of(ask.caller))

    def claim(self, now: float = 10.0, **fields: object) -> Lease | WhyNotWarmer:
        return claims.claim(self.tracker, self.job(**fields), now)  # type: ignore[arg-type]

    def got(self, now: float = 10.0, **fields: object) -> Lease:
        lease = self.claim(now, **fields)
        assert isinstance(lease, Lease), lease
        return lease


# -- the order ------------------------------------------------------------------------------------------------------


def test_a_held_pod_of_the_same_queue_and_tag_comes_first() -> None:
    floor = Floor()
    floor.idle()
    floor.held(tag="other")
    same = floor.held(tag="mine")
    lease = floor.got(tag="mine")
    assert lease.pods == [same]
    assert (lease.path, lease.retire_after, lease.why) == (Path.WARM, (False,), None)


def test_among_equal_pods_the_most_recently_used_comes_first_so_that_others_expire() -> None:
    floor = Floor()
    floor.held(at=1.0)
    recent = floor.held(at=2.0)
    assert floor.got().pods == [recent]


def test_a_pod_that_has_the_requirements_installed_is_preferred() -> None:
    floor = Floor()
    installed = floor.held(at=1.0, layers=("sha256:a",))
    floor.held(at=2.0)
    assert floor.got(requirements="sha256:a").pods == [installed]


def test_then_a_held_pod_across_a_boundary_runs_once_and_retires() -> None:
    floor = Floor()
    floor.idle()
    other = floor.held(tag="other")
    lease = floor.got(tag="mine")
    assert lease.pods == [other]
    assert (lease.path, lease.retire_after, lease.why) == (Path.RECYCLED, (True,), WhyNotWarmer.TAG_BOUNDARY)


def test_then_a_never_used_pod_the_longest_ready_one_first() -> None:
    floor = Floor()
    old = floor.idle(at=1.0)
    floor.idle(at=2.0)
    lease = floor.got()
    assert lease.pods == [old]
    assert (lease.path, lease.retire_after) == (Path.WARM, (False,))


def test_s36_another_callers_held_pod_is_never_claimed() -> None:
    floor = Floor(a_pool(ceiling=1))
    floor.held("bob")
    assert floor.claim(caller="ann") is WhyNotWarmer.HELD_FOR_OTHER_CALLER


def test_s13_an_expired_hold_is_never_claimed() -> None:
    floor = Floor()
    pod = floor.held(at=1.0)
    assert floor.claim(now=pod.hold_deadline) is WhyNotWarmer.TAG_BOUNDARY
    assert isinstance(floor.claim(now=pod.hold_deadline - 0.001), Lease)


def test_s12_in_hint_mode_a_tag_only_prefers_but_a_queue_still_retires() -> None:
    floor = Floor(a_pool(ceiling=16, tag_boundary="hint"))
    floor.held(queue="other", at=3.0)
    same_queue = floor.held(tag="x", at=1.0)
    first = floor.got(tag="y")
    assert (first.pods, first.path, first.retire_after) == ([same_queue], Path.WARM, (False,))
    second = floor.got(tag="y")
    assert (second.path, second.retire_after) == (Path.RECYCLED, (True,))


def test_a_callers_own_boundary_overrides_the_pools() -> None:
    floor = Floor(a_pool(ceiling=16))
    floor.quota.of(Caller("ann")).limit(a_limit(tag_boundary="hint"))
    floor.held(tag="x")
    assert floor.got(tag="y").path is Path.WARM


def test_without_run_once_across_a_boundary_is_a_wall() -> None:
    floor = Floor(a_pool(ceiling=16, run_once_across=False))
    floor.held(tag="x")
    assert floor.claim(tag="y") is WhyNotWarmer.TAG_BOUNDARY
    idle = floor.idle()
    assert floor.got(tag="y").pods == [idle]


def test_a_pool_without_holds_retires_at_release() -> None:
    floor = Floor(a_pool(ceiling=16, caller_hold_s=0.0))
    floor.idle()
    assert floor.got().retire_after == (True,)


def test_a_stale_pod_serves_nobody() -> None:
    floor = Floor()
    floor.held()
    floor.idle()
    floor.tracker.switch(floor.pool, a_pool(template="t1").template)
    assert floor.claim() is WhyNotWarmer.STALE_TEMPLATE


def test_a_pod_that_is_too_weakly_isolated_is_skipped_and_stays_claimable() -> None:
    floor = Floor()
    weak, strong = floor.idle(at=1.0, strength=1), floor.idle(at=2.0, strength=3)
    job = floor.job()
    job.strength = 3
    lease = claims.claim(floor.tracker, job, 10.0)
    assert isinstance(lease, Lease) and lease.pods == [strong]
    assert floor.got().pods == [weak]


# -- new ------------------------------------------------------------------------------------------------------------


def test_a_pod_that_became_ready_after_the_first_refusal_is_new() -> None:
    floor = Floor()
    job = floor.job()
    job.refused_at = 5.0
    floor.idle(at=6.0)
    lease = claims.claim(floor.tracker, job, 10.0)
    assert isinstance(lease, Lease) and lease.path is Path.NEW


def test_a_pod_that_was_ready_before_the_first_refusal_is_warm() -> None:
    floor = Floor()
    job = floor.job()
    job.refused_at = 5.0
    floor.idle(at=4.0)
    lease = claims.claim(floor.tracker, job, 10.0)
    assert isinstance(lease, Lease) and lease.path is Path.WARM


# -- limits ---------------------------------------------------------------------------------------------------------


def test_s2_a_caller_never_gets_more_than_its_limit() -> None:
    floor = Floor(a_pool(ceiling=16))
    floor.quota.of(Caller("ann")).limit(a_limit(pods=2))
    for _ in range(5):
        floor.idle()
    leases = [floor.claim(name=f"j{n}") for n in range(4)]
    assert [isinstance(lease, Lease) for lease in leases] == [True, True, False, False]
    assert leases[2] is WhyNotWarmer.CALLER_QUOTA
    assert isinstance(floor.claim(caller="bob"), Lease)


def test_s2_processors_are_limited_too() -> None:
    floor = Floor(a_pool("h200", gpus=2, ceiling=8))
    floor.quota.of(Caller("ann")).limit(a_limit(processors=5))
    for number in range(5):
        floor.idle(cards=(f"a{number}", f"b{number}"))
    assert isinstance(floor.claim(pods=2, sku="h200"), Lease)
    assert floor.claim(name="k", sku="h200") is WhyNotWarmer.CALLER_QUOTA


def test_held_pods_do_not_count_against_their_owner() -> None:
    floor = Floor()
    floor.quota.of(Caller("ann")).limit(a_limit(pods=1))
    floor.held()
    floor.held()
    assert isinstance(floor.claim(), Lease)


# -- gangs ----------------------------------------------------------------------------------------------------------


def test_s8_a_gang_takes_all_its_pods_or_none() -> None:
    floor = Floor()
    for _ in range(3):
        floor.idle()
    assert floor.claim(pods=4) is WhyNotWarmer.GANG_INCOMPLETE
    assert floor.pool.rack.counts[IDLE] == 3
    floor.idle()
    assert len(floor.got(pods=4).pods) == 4


def test_a_gangs_own_held_pods_count_too_and_come_first() -> None:
    floor = Floor()
    held = floor.held()
    idle = [floor.idle(), floor.idle()]
    lease = floor.got(pods=2)
    assert lease.pods == [held, idle[0]]
    assert floor.pool.rack.counts[HELD] == 0


def test_a_gangs_decisions_are_per_pod_and_its_path_the_coldest() -> None:
    floor = Floor()
    floor.held(tag="x")
    floor.idle()
    lease = floor.got(pods=2, tag="y")
    assert (lease.path, lease.retire_after) == (Path.RECYCLED, (True, False))


def test_s8_a_gangs_pods_are_on_distinct_cards() -> None:
    floor = Floor(a_pool("h200", gpus=1, ceiling=8))
    floor.idle(cards=("a",))
    floor.idle(cards=("a",))
    assert floor.claim(pods=2, sku="h200") is WhyNotWarmer.GANG_INCOMPLETE
    floor.idle(cards=("b",))
    cards = [pod.cards[0] for pod in floor.got(pods=2, sku="h200").pods]
    assert sorted(cards) == ["a", "b"]


def test_s23_a_pod_whose_card_serves_another_one_is_not_claimable() -> None:
    floor = Floor(a_pool("h200", gpus=1, ceiling=8))
    floor.idle(cards=("a",))
    floor.idle(cards=("a",))
    floor.got(sku="h200")
    assert floor.claim(name="k", sku="h200") is WhyNotWarmer.CARD_BUSY


def test_s52_a_gang_that_waits_holds_no_pod() -> None:
    floor = Floor()
    floor.idle()
    floor.held()
    assert floor.claim(pods=5) is WhyNotWarmer.GANG_INCOMPLETE
    assert {pod.state for pod in floor.tracker.pods.values()} == {PodState.IDLE, PodState.HELD}
    assert floor.quota.of(Caller("ann")).pods == 0


# -- single use -----------------------------------------------------------------------------------------------------


def test_a_single_use_job_takes_a_dedicated_pod_and_retires_it() -> None:
    floor = Floor()
    pod = PodRecord(PodName("own"), floor.pool.rack, 0.0, single_use=True)
    pod.strength = 3
    floor.tracker.add(pod)
    floor.tracker.ready(pod, 1.0)
    assert isinstance(floor.claim(), WhyNotWarmer), "a warm job never gets it"
    lease = floor.got(name="own", single_use=True)
    assert (lease.pods, lease.path, lease.retire_after) == ([pod], Path.SINGLE_USE, (True,))


def test_a_never_used_pod_may_serve_a_single_use_job_if_it_is_deleted_then() -> None:
    floor = Floor()
    pod = floor.idle()
    lease = floor.got(single_use=True)
    assert (lease.pods, lease.retire_after, pod.single_use) == ([pod], (True,), True)
    claims.give_back(floor.tracker, lease)
    assert (pod.single_use, pod.state) == (False, PodState.IDLE)


def test_a_single_use_job_never_gets_a_used_pod() -> None:
    floor = Floor()
    floor.held()
    assert isinstance(floor.claim(single_use=True), WhyNotWarmer)


# -- undo -----------------------------------------------------------------------------------------------------------


def snapshot(floor: Floor) -> object:
    """Everything of every pod, count and index that a claim may touch."""
    rack = floor.pool.rack
    return (
        [
            (p.name, p.state, p.owner, p.key, p.released_at, p.hold_deadline, p.single_use, p.lease)
            for p in floor.tracker.pods.values()
        ],
        list(rack.counts),
        {owner: (shelf.held, set(shelf.all)) for owner, shelf in rack.shelves.items()},
        {pod for pod in rack.idle if pod.state is PodState.IDLE},
        [(usage.pods, usage.processors) for usage in floor.quota.all()],
        dict(floor.tracker.serving),
    )


@pytest.mark.parametrize(
    "fields", [{}, {"pods": 3}, {"tag": "x"}, {"single_use": True}, {"pods": 2, "single_use": True}]
)
def test_s5_an_undone_claim_leaves_everything_as_it_was(fields: dict[str, object]) -> None:
    floor = Floor()
    for number in range(3):
        floor.idle(at=float(number), cards=(f"c{number}",))
    floor.held()
    floor.job(**fields)  # type: ignore[arg-type]
    before = snapshot(floor)
    lease = floor.got(**fields)
    assert snapshot(floor) != before
    claims.give_back(floor.tracker, lease)
    assert snapshot(floor) == before


# -- reasons --------------------------------------------------------------------------------------------------------


def test_the_reason_says_that_pods_are_starting() -> None:
    floor = Floor()
    floor.tracker.add(PodRecord(PodName("new"), floor.pool.rack, 0.0))
    assert floor.claim() is WhyNotWarmer.PODS_STARTING


def test_the_reason_says_that_the_pool_is_at_its_ceiling() -> None:
    floor = Floor(a_pool(ceiling=1))
    floor.idle()
    floor.got(caller="bob")
    assert floor.claim() is WhyNotWarmer.POOL_AT_CEILING


def test_the_reason_says_that_there_simply_is_no_pod() -> None:
    assert Floor().claim() is WhyNotWarmer.NO_IDLE_POD_OF_OWNER
