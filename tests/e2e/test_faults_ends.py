"""The other ways in which a job ends without success: by signal, by its limits, with its client, with one of its ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.test_faults_requests import asked_with, token_of
from tests.e2e.venue import Venue, wrong

pytestmark = [pytest.mark.linux, pytest.mark.slow]


@contextmanager
def busy(venue: Venue, sku: str) -> Iterator[None]:
    """A pool of one pod, and the pod has a job."""
    job = venue.start("exec sleep 600", sku=sku)
    try:
        yield
    finally:
        venue.broker.call("POST", f"/v1/jobs/{job}:cancel")
        assert venue.broker.done(job)["state"] == "CANCELLED"


def test_a_crash_is_told_as_its_signal(venue: Venue) -> None:
    body = venue.command("/bin/sh", "-c", "kill -SEGV $$")
    assert int(wrong(body, "Signaled", "user")["signal"]) == 11
    assert (body["exit_code"], body["signal"]) == (139, 11)
    assert venue.recovered(body) == "verified"


def runs_out_of_device_memory() -> None:
    OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_what_torch_raises_without_device_memory_has_a_class_of_its_own(venue: Venue) -> None:
    body = venue.function(runs_out_of_device_memory)
    assert "runs_out_of_device_memory" in wrong(body, "GpuOOM", "user")["traceback"]
    assert venue.recovered(body) == "verified"


def test_a_job_that_waits_too_long_says_what_it_waited_for(venue: Venue) -> None:
    with busy(venue, "hint"):
        body = venue.command("/bin/true", sku="hint", queue_timeout_s=0.2)
    details = wrong(body, "QueueTimeout", "limit", retryable=True)
    assert details["blocked_by"]
    assert body["exit_code"] is None


def test_more_than_a_callers_limit_can_ever_allow_is_refused(venue: Venue) -> None:
    venue.broker.json("POST", "/v1/callers", {"caller": "small", "limits": {"max_pods": 1}})
    header = f"Bearer {token_of(venue, 'small', caller='small')}"
    spec = {"entrypoint": {"argv": ["/bin/true"]}, "pods": 2}
    status, problem = asked_with(venue, header, "POST", body=spec)
    assert status == 403
    wrong(problem, "QuotaExceeded", "limit")


def test_a_job_ends_with_the_client_that_no_longer_renews_it(venue: Venue) -> None:
    body = venue.command("/bin/sleep", "600", client_lease_s=1, grace_s=0.1)
    wrong(body, "ClientGone", "user")
    assert venue.recovered(body) == "verified"


def test_a_rank_that_fails_is_named_and_the_others_are_stopped(venue: Venue) -> None:
    code = "if [ $FIREPOOL_RANK = 1 ]; then exit 9; fi; sleep 600"
    body = venue.command("/bin/sh", "-c", code, pods=2, grace_s=0.1)
    assert int(wrong(body, "RankFailed", "user")["rank"]) == 1
    after = [venue.python("print('next')", lease_tag=None) for _ in body["pods"]]
    assert [a["state"] for a in after] == ["SUCCEEDED"] * 2


def test_a_cancelled_job_is_cancelled_when_its_processes_are_gone(venue: Venue) -> None:
    job = venue.start("trap '' TERM; while true; do sleep 0.05; done", grace_s=0.1)
    assert venue.broker.call("POST", f"/v1/jobs/{job}:cancel")[0] < 300
    body = venue.broker.done(job)
    assert body["state"] == "CANCELLED"
    wrong(body, "Cancelled", "user")
    assert venue.recovered(body) == "verified"
