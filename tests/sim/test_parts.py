"""The parts of the simulated shell on their own: clock, delays, trace, ledger."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firepool_broker.core.asks import Ask, Exit, Failure, FoundJob
from firepool_broker.core.effects import CommitEnd, CommitStart, CreatePod, StoreJob
from firepool_broker.core.events import AttemptEnded
from firepool_broker.core.ids import AttemptId, Caller, JobId, Person, PodName, Queue, Sku, TemplateDigest
from firepool_broker.sim.clock import Clock
from firepool_broker.sim.faults import Dice, Faults
from firepool_broker.sim.ledger import End, Insert, Ledger, Move, Pending, Start
from firepool_broker.sim.trace import Record, about, parse
from firepool_broker.sim.venue import LOCAL, VENUES, Delay
from firepool_wire.words import Fault, JobState, Path

# -- clock -----------------------------------------------------------------------------------------------------------


def test_what_is_due_at_one_instant_runs_in_the_order_in_which_it_was_asked_for():
    clock, done = Clock(), []
    for name in "abc":
        clock.at(1.0, lambda name=name: done.append(name))
    clock.run(2.0, lambda: False)
    assert done == ["a", "b", "c"]


def test_time_never_goes_back_and_stops_at_the_horizon():
    clock, seen = Clock(), []
    clock.at(5.0, lambda: clock.at(1.0, lambda: seen.append(clock.now)))
    clock.at(9.0, lambda: seen.append(clock.now))
    clock.run(6.0, lambda: False)
    assert seen == [5.0]
    assert not clock.idle


# -- delays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("venue", VENUES.values(), ids=lambda venue: venue.name)
def test_every_delay_of_a_venue_names_its_source_and_keeps_its_percentiles(venue):
    dice = Random(1)
    delays = [value for name in venue.__dataclass_fields__ if isinstance(value := getattr(venue, name), Delay)]
    assert len(delays) == 14
    for delay in delays:
        assert delay.source
        drawn = sorted(delay.draw(dice) for _ in range(4000))
        assert drawn[2000] == pytest.approx(delay.p50_s, rel=0.1)
        assert drawn[3600] == pytest.approx(delay.p90_s, rel=0.15)


def test_a_delay_with_its_percentiles_the_wrong_way_round_is_refused():
    with pytest.raises(ValueError, match="p50 <= p90"):
        Delay(2.0, 1.0, "nowhere")


def test_faults_never_change_how_long_things_take():
    fair, foul = Dice.of(3, Faults()), Dice.of(3, Faults(hang=0.5))
    assert not fair.strikes(fair.plan.hang)
    foul.strikes(foul.plan.hang)
    assert LOCAL.start.draw(fair.time) == LOCAL.start.draw(foul.time)


def test_a_negative_fault_is_refused():
    with pytest.raises(ValueError, match="commit_lost"):
        Faults(commit_lost=-0.1)


# -- trace -----------------------------------------------------------------------------------------------------------

_words = st.text("ab \t\n\r=%,:/ü\u2028\x00", min_size=1, max_size=8)


@given(
    st.floats(0, 1e6).map(lambda at: round(at, 6)),
    st.sampled_from("EFW"),
    st.dictionaries(st.sampled_from(["pod", "job", "why"]), _words),
)
def test_a_record_survives_being_written_and_read(at, side, facts):
    record = Record(at, side, "kind", facts)
    line = record.line()
    assert "\n" not in line
    assert parse(line) == record


def test_a_line_that_is_not_of_a_trace_is_refused():
    with pytest.raises(ValueError, match="no side"):
        parse("1.0\tX\tkind")


def test_nested_facts_are_written_by_their_ids():
    failure = Failure(code="OOM", message="too much", fault=Fault.USER, retryable=False)
    ended = AttemptEnded(AttemptId("j:0"), PodName("p"), Exit(exit_code=137, signal=9, failure=failure))
    assert about(ended) == {"attempt": "j:0", "pod": "p", "exit": "exit:137/OOM"}
    assert about(CreatePod(PodName("p"), Sku("cpu"), TemplateDigest("t"))) == {
        "pod": "p",
        "sku": "cpu",
        "template": "t",
    }
    assert about(StoreJob(_ask(), JobState.QUEUED)) == {"ask": "j", "state": "QUEUED"}


# -- ledger ----------------------------------------------------------------------------------------------------------


def _ask(job: str = "j") -> Ask:
    return Ask(job=JobId(job), caller=Caller("a"), person=Person("a@a"), sku=Sku("cpu"))


def _start(version: int = 1, *, insert: bool = False, retry: int = 0, token: int = 1) -> Start:
    commit = CommitStart(
        attempt=AttemptId(f"j:{retry}"),
        insert=insert,
        version=version,
        pods=(PodName("p"),),
        path=Path.WARM,
        why_not_warmer="",
        retire_after=(True,),
        caller=Caller("a"),
        queue=Queue("q"),
        tag=None,
    )
    return Start(commit, _ask(), token, at=2.0)


def _end(version: int, state: JobState = JobState.SUCCEEDED, retry: int = 0) -> End:
    return End(
        CommitEnd(
            attempt=AttemptId("j:0"),
            version=version,
            state=state,
            exit=Exit(exit_code=0),
            failure=None,
            retry_count=retry,
            infra_retries=0,
            path=Path.WARM,
            why_not_warmer="",
        )
    )


def _pending(write, fate="won", durable=True) -> Pending:
    return Pending(write, fate, durable, lambda verdict: None)


def test_each_write_raises_the_version_by_one_and_a_stale_one_changes_nothing():
    ledger = Ledger()
    assert ledger.apply(Insert(_ask(), JobState.QUEUED)).version == 1
    assert ledger.apply(_start(version=7)) is None
    assert ledger.apply(_start(version=1)).version == 2
    assert ledger.apply(Move(JobId("j"), 2)).cancel_requested
    assert ledger.apply(_end(2)) is None
    assert ledger.apply(_end(3)).state is JobState.SUCCEEDED
    assert ledger.apply(_end(4)) is None


def test_a_start_that_is_written_once_is_running_with_its_bindings():
    ledger = Ledger()
    row = ledger.apply(_start(0, insert=True))
    assert (row.version, row.state, row.token) == (1, JobState.RUNNING, 1)
    assert ledger.apply(_start(0, insert=True)) is None
    [binding] = ledger.bindings_of([PodName("p"), PodName("other")])
    assert (binding.attempt, binding.caller, binding.retire_after) == ("j:0", "a", True)


def test_a_requeued_job_is_found_with_its_raised_retry_count_and_without_pods():
    ledger = Ledger()
    ledger.apply(_start(0, insert=True))
    ledger.apply(_end(1, JobState.QUEUED, retry=1))
    [found] = ledger.unfinished()
    assert found == FoundJob(
        ask=_ask(), state=JobState.QUEUED, retry_count=1, version=2, path=Path.WARM, retire_after=True, started_at=2.0
    )


@pytest.mark.parametrize("durable", [True, False])
def test_a_broker_that_dies_inside_a_commit_leaves_all_of_it_or_nothing(durable):
    ledger = Ledger()
    ledger.waiting = [_pending(Insert(_ask("x"), JobState.QUEUED)), _pending(Insert(_ask("y"), JobState.QUEUED))]
    assert ledger.take_group()
    ledger.waiting.append(_pending(Insert(_ask("z"), JobState.QUEUED)))
    rows = ledger.crash(durable=durable)
    assert [row.ask.job for row in rows] == (["x", "y"] if durable else [])
    assert set(ledger.rows) == ({"x", "y"} if durable else set())
    assert not ledger.waiting


def test_an_unknown_commit_is_durable_or_not_but_never_told():
    for durable in (True, False):
        ledger = Ledger()
        ledger.waiting = [_pending(_start(0, insert=True, token=5), "unknown", durable)]
        ledger.take_group()
        [(_, verdict, row)] = ledger.finish_group()
        assert verdict == "unknown"
        assert (row is not None) is durable
        assert ("j" in ledger.rows) is durable


def test_a_commit_under_way_makes_the_next_writes_wait_together():
    ledger = Ledger()
    ledger.waiting = [_pending(Insert(_ask("x"), JobState.QUEUED))]
    assert ledger.take_group()
    ledger.waiting += [_pending(Insert(_ask(name), JobState.QUEUED)) for name in "yz"]
    assert not ledger.take_group()
    ledger.finish_group()
    assert ledger.take_group()
    assert len(ledger.in_flight) == 2
