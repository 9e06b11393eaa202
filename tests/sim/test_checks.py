"""A check that cannot fail proves nothing: every property is broken here once, by a planted fault in an otherwise sound trace."""

from collections.abc import Callable

import pytest

from firepool_broker.sim.checks import PROPERTIES, Broken, judge
from firepool_broker.sim.checks.picture import Picture
from firepool_broker.sim.trace import Record, parse

#: A sound life of two jobs of one caller on one pod, and of the pools that all faults are planted in.
SOUND = """
0.0\tW\tpool\tsku=cpu\tprocessors=1\tmax_count=2\thold_s=100.000000\ttenure_s=60.000000\tboundary=retire\ttemplate=t0\tinfra_retries=5
0.0\tW\tlimit\tcaller=a\tmax_pods=2
0.0\tW\tup
0.0\tE\tBrokerStarted
1.0\tF\tCreatePod\tpod=p1\tsku=cpu\ttemplate=t0
1.1\tW\tborn\tpod=p1\tsku=cpu\ttemplate=t0
2.0\tW\tready\tpod=p1
3.0\tW\tsubmit\tjob=j1\tcaller=a\tsku=cpu\tpods=1\tqueue=q\ttag=t
3.1\tF\tPrepareLease\tattempt=j1:0\tpod=p1\tcaller=a\tqueue=q\ttag=t
3.2\tW\trow\tjob=j1\tstate=RUNNING\tversion=1\tattempt=j1:0\tretry=0\tpods=p1\tpath=warm
3.2\tW\taccept\tjob=j1\tstate=RUNNING
3.3\tW\tcode\tpod=p1\tattempt=j1:0\tjob=j1\tcaller=a\tqueue=q\ttag=t
4.0\tW\tdead\tpod=p1\tattempt=j1:0\thow=exited\tok=1
4.1\tW\treset\tpod=p1\tattempt=j1:0\tverdict=clean
4.1\tW\trow\tjob=j1\tstate=SUCCEEDED\tversion=2\tattempt=j1:0\tretry=0\tpath=warm\tcode=0
4.2\tE\tResetClean\tpod=p1\tattempt=j1:0
5.0\tW\tsubmit\tjob=j2\tcaller=a\tsku=cpu\tpods=1\tqueue=q\ttag=t
5.1\tF\tPrepareLease\tattempt=j2:0\tpod=p1\tcaller=a\tqueue=q\ttag=t
5.2\tW\trow\tjob=j2\tstate=RUNNING\tversion=1\tattempt=j2:0\tretry=0\tpods=p1\tpath=warm
5.2\tW\taccept\tjob=j2\tstate=RUNNING
5.3\tW\tcode\tpod=p1\tattempt=j2:0\tjob=j2\tcaller=a\tqueue=q\ttag=t
6.0\tW\tdead\tpod=p1\tattempt=j2:0\thow=exited\tok=1
6.1\tW\treset\tpod=p1\tattempt=j2:0\tverdict=clean
6.1\tW\trow\tjob=j2\tstate=SUCCEEDED\tversion=2\tattempt=j2:0\tretry=0\tpath=warm\tcode=0
6.2\tE\tResetClean\tpod=p1\tattempt=j2:0
"""

Records = list[Record]
Plant = Callable[[Records], Records]


def sound() -> Records:
    return [parse(line) for line in SOUND.strip().splitlines()]


def place(records: Records, kind: str, **about: str) -> int:
    """Index of the first record of this kind about these things."""
    for index, record in enumerate(records):
        if record.kind == kind and all(record.get(key) == value for key, value in about.items()):
            return index
    raise LookupError(f"no {kind} {about}")


def changed(kind: str, where: dict[str, str], **new: str) -> Plant:
    def plant(records: Records) -> Records:
        index = place(records, kind, **where)
        old = records[index]
        records[index] = Record(old.at, old.side, old.kind, {**old.about, **new})
        return records

    return plant


def dropped(kind: str, **where: str) -> Plant:
    def plant(records: Records) -> Records:
        del records[place(records, kind, **where)]
        return records

    return plant


def added(line: str, before: str, **where: str) -> Plant:
    """Lines planted before a record."""

    def plant(records: Records) -> Records:
        index = place(records, before, **where)
        return records[:index] + [parse(one) for one in line.splitlines()] + records[index:]

    return plant


def appended(lines: str) -> Plant:
    return lambda records: records + [parse(line) for line in lines.strip().splitlines()]


def both(*plants: Plant) -> Plant:
    def plant(records: Records) -> Records:
        for each in plants:
            records = each(records)
        return records

    return plant


J2 = {"job": "j2"}
#: A second pod, ready, and a job that runs on it.
P2 = "1.5\tW\tborn\tpod=p2\tsku=cpu\ttemplate=t0\tcards=c1\n1.6\tW\tready\tpod=p2"

#: property name → a fault that breaks it (and, judged first, nothing else).
PLANTED: dict[str, Plant] = {
    "one_attempt_at_once": dropped("dead", attempt="j1:0"),
    "one_lease_at_once": dropped("ResetClean", attempt="j1:0"),
    "no_code_before_its_commit": changed("row", {"job": "j2", "state": "RUNNING"}, attempt="j2:1"),
    "a_pod_that_failed_to_prepare_retires": added(
        "4.8\tF\tPrepareLease\tattempt=j9:0\tpod=p1\n4.9\tE\tLeasePrepareFailed\tattempt=j9:0\tpod=p1",
        "PrepareLease",
        attempt="j2:0",
    ),
    "a_gang_has_all_its_pods": changed("submit", J2, pods="2"),
    "consecutive_users_are_one_caller": changed("code", {"attempt": "j2:0"}, caller="b"),
    "one_job_after_a_boundary": both(
        changed("code", {"attempt": "j2:0"}, tag="other"),
        appended(
            "7.0\tW\tsubmit\tjob=j3\tcaller=a\tsku=cpu\tpods=1\tqueue=q\ttag=other\n"
            "7.2\tW\trow\tjob=j3\tstate=RUNNING\tversion=1\tattempt=j3:0\tpods=p1\tpath=warm\n"
            "7.3\tW\tcode\tpod=p1\tattempt=j3:0\tjob=j3\tcaller=a\tqueue=q\ttag=other"
        ),
    ),
    "an_expired_hold_is_never_claimed": changed("pool", {}, hold_s="0.5"),
    "a_hold_is_broken_only_for_need": appended("20.0\tF\tDeletePod\tpod=p1\twhy=idle"),
    "only_clean_pods_run_again": changed("reset", {"attempt": "j1:0"}, verdict="unclean"),
    "one_pod_serves_a_card": both(
        changed("born", {"pod": "p1"}, cards="c1"),
        added(P2, "ready", pod="p1"),
        added(
            "5.3\tW\trow\tjob=j9\tstate=RUNNING\tattempt=j9:0\tpods=p2\tpath=warm\n"
            "5.31\tW\tcode\tpod=p2\tattempt=j9:0\tjob=j9\tcaller=a\tqueue=q\ttag=t",
            "dead",
            attempt="j2:0",
        ),
        added("5.0\tW\tsubmit\tjob=j9\tcaller=a\tsku=cpu\tpods=1\tqueue=q\ttag=t", "submit", job="j2"),
    ),
    "a_stale_pod_serves_nobody": changed("born", {"pod": "p1"}, template="t-old"),
    "a_running_job_is_not_killed_to_make_room": added("5.5\tF\tDeletePod\tpod=p1\twhy=room", "dead", attempt="j2:0"),
    "a_caller_stays_within_its_limits": both(
        changed("limit", {}, max_pods="1"),
        added(P2, "ready", pod="p1"),
        added(
            "5.0\tW\tsubmit\tjob=j9\tcaller=a\tsku=cpu\tpods=1\tqueue=q\ttag=t\n"
            "5.01\tW\trow\tjob=j9\tstate=RUNNING\tattempt=j9:0\tpods=p2\tpath=warm\n"
            "5.02\tW\tcode\tpod=p2\tattempt=j9:0\tjob=j9\tcaller=a\tqueue=q\ttag=t",
            "submit",
            job="j2",
        ),
    ),
    "the_one_writer_knows_every_version": appended("7.0\tW\tstale\twrite=End\tjob=j2"),
    "equal_jobs_are_served_in_their_order": both(
        added(
            "2.5\tW\tsubmit\tjob=j0\tcaller=a\tsku=cpu\tpods=1\tqueue=q\ttag=t\n"
            "2.55\tE\tJobSubmitted\task=j0\n"
            "2.6\tW\trow\tjob=j0\tstate=QUEUED\tversion=1\n2.7\tE\tJobStored\tjob=j0",
            "submit",
            job="j1",
        ),
        added("3.05\tE\tJobSubmitted\task=j1", "PrepareLease", attempt="j1:0"),
    ),
    "attempt_ids_never_repeat": both(
        changed("row", {"job": "j2", "state": "SUCCEEDED"}, state="QUEUED", code="", failure="HostLost"),
        changed("dead", {"attempt": "j2:0"}, ok=""),
        appended("7.0\tW\trow\tjob=j2\tstate=RUNNING\tattempt=j2:0\tpods=p1\tpath=warm"),
    ),
    "what_is_accepted_is_durable": both(
        changed("row", {"job": "j2", "state": "RUNNING"}, job="j8"), dropped("code", attempt="j2:0")
    ),
    "a_terminal_job_never_changes": appended("7.0\tW\trow\tjob=j2\tstate=QUEUED\tversion=3"),
    "success_is_real": changed("dead", {"attempt": "j2:0"}, ok=""),
    "nothing_before_the_start": dropped("BrokerStarted"),
    "a_finished_attempt_is_not_run_again": changed("row", {"job": "j2", "state": "SUCCEEDED"}, state="QUEUED", code=""),
    "an_end_is_written_only_when_all_is_dead": both(
        changed("row", {"job": "j2", "state": "SUCCEEDED"}, state="CANCELLED", failure="Cancelled"),
        dropped("dead", attempt="j2:0"),
    ),
    "attempts_of_a_job_never_overlap": both(
        added(P2, "ready", pod="p1"),
        added(
            "5.4\tW\trow\tjob=j2\tstate=RUNNING\tattempt=j2:1\tretry=1\tpods=p2\tpath=warm\n"
            "5.5\tW\tcode\tpod=p2\tattempt=j2:1\tjob=j2\tcaller=a\tqueue=q\ttag=t",
            "dead",
            attempt="j2:0",
        ),
    ),
    "a_failure_has_its_class": changed("row", {"job": "j2", "state": "SUCCEEDED"}, state="FAILED", code="1"),
    "a_start_has_its_path_and_reason": changed("row", {"job": "j2", "state": "RUNNING"}, path="new"),
    "never_above_the_ceiling": changed("pool", {}, max_count="0"),
    "a_pod_name_is_never_used_again": appended(
        "7.0\tW\tgone\tpod=p1\twhy=lost\n7.1\tF\tCreatePod\tpod=p1\tsku=cpu\ttemplate=t0"
    ),
}


def test_the_trace_that_faults_are_planted_in_is_sound():
    judge(sound())


def test_every_property_has_a_planted_fault():
    assert set(PLANTED) == {rule.name for rule in PROPERTIES}


def _only(name: str, records: Records) -> None:
    """Judge by one property alone, so that another one cannot answer for it."""
    picture = Picture()
    [rule] = [rule for rule in PROPERTIES if rule.name == name]
    for record in records:
        if (record.side, record.kind) in {(rule.side, kind) for kind in rule.kinds}:
            what = rule.judge(picture, record)
            if what is not None:
                raise Broken(rule.number, rule.sentence, what, record)
        picture.take(record)


@pytest.mark.parametrize("name", [rule.name for rule in PROPERTIES])
def test_a_planted_fault_is_caught_by_its_own_property(name):
    _only(name, sound())
    records = PLANTED[name](sound())
    with pytest.raises(Broken) as caught:
        _only(name, records)
    [rule] = [rule for rule in PROPERTIES if rule.name == name]
    assert caught.value.number == rule.number


@pytest.mark.parametrize("name", [rule.name for rule in PROPERTIES])
def test_a_planted_fault_fails_the_whole_judgement(name):
    with pytest.raises(Broken):
        judge(PLANTED[name](sound()))


def test_a_job_that_was_accepted_and_never_ended_is_lost():
    records = [record for record in sound() if not (record.kind == "row" and record.get("state") == "SUCCEEDED")]
    with pytest.raises(Broken, match="S42: no accepted job is lost: j1 is RUNNING"):
        judge(records)


def test_an_unclean_pod_that_is_left_standing_is_found_at_the_end():
    records = sound()
    records[place(records, "ResetClean", attempt="j2:0")] = parse("6.2\tE\tResetUnclean\tpod=p1\tattempt=j2:0")
    with pytest.raises(Broken, match="S16: an unclean pod retires"):
        judge(records)
