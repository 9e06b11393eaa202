"""What dies or fills up underneath the jobs: agents, the nursery, the store's disk. Nothing is lost, nothing runs twice at
once, and the machine's faults never look like the user's.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.process import broker
from tests.e2e.test_thread import nurseries
from tests.e2e.venue import Venue, pools_file, wrong

pytestmark = [pytest.mark.linux, pytest.mark.slow]


def processes() -> dict[int, tuple[int, bytes]]:
    """Parent and command line of every process, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found[int(entry.name)] = (parent, (entry / "cmdline").read_bytes())
            except OSError:
                continue
    return found


def agent_of(venue: Venue, mark: str) -> int:
    """The agent below which a process with this mark in its command line runs."""
    known = processes()
    nursery = nursery_of(venue)
    [pid] = [pid for pid, (_, words) in known.items() if mark.encode() in words and b"sh" not in words.split(b"\0")[0]]
    while known[pid][0] != nursery:
        pid = known[pid][0]
    return pid


def nursery_of(venue: Venue) -> int:
    """The nursery's own process: the agents that it forked look like it."""
    known, alike = processes(), nurseries(venue.broker.home)
    [nursery] = [pid for pid in alike if known[pid][0] not in alike]
    return nursery


#: Runs for ever as a first attempt; a later one says so and ends.
TWICE = 'echo "attempt $FIREPOOL_RETRY_COUNT"; [ $FIREPOOL_RETRY_COUNT -gt 0 ] || exec sleep {mark}'


def test_a_job_whose_agent_is_killed_runs_again_on_another_pod(venue: Venue) -> None:
    job = venue.start(TWICE.format(mark="31415.9"))
    [pod] = venue.body(job)["pods"]
    os.kill(agent_of(venue, "31415.9"), signal.SIGKILL)
    body = venue.broker.done(job)
    assert (body["state"], body["retry_count"]) == ("SUCCEEDED", 1), body
    assert body["pods"] != [pod]
    assert venue.log(body) == "runs\nattempt 0\nruns\nattempt 1\n", "the log of both attempts is whole"
    assert pod not in venue.pods()
    assert venue.recovered(body) == "verified"


def test_where_the_pool_allows_no_second_attempt_the_host_is_lost_and_it_is_not_the_users_fault(venue: Venue) -> None:
    job = venue.start(TWICE.format(mark="27182.8"), sku="hint")
    os.kill(agent_of(venue, "27182.8"), signal.SIGKILL)
    body = venue.broker.done(job)
    wrong(body, "HostLost", "infra", retryable=True)
    assert body["exit_code"] is None, "nobody saw a process exit"
    assert venue.recovered(body) == "replaced"


def test_when_the_nursery_is_killed_its_jobs_run_again_and_later_ones_too(venue: Venue) -> None:
    job = venue.start(TWICE.format(mark="16180.3"))
    os.kill(nursery_of(venue), signal.SIGKILL)
    body = venue.broker.done(job)
    assert (body["state"], body["retry_count"]) == ("SUCCEEDED", 1), body
    assert venue.recovered(body) == "verified"


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=0755", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Use up every byte."""
    file = folder / "ballast"
    with file.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(1 << 16))
        except OSError:
            pass
        try:
            while True:
                out.write(b"x" * 64)
        except OSError:
            pass
    return file


@pytest.mark.root
def test_a_full_disk_refuses_new_jobs_and_loses_none_that_was_taken(small_disk: Path, tmp_path: Path) -> None:
    with broker(small_disk, "--pools", pools_file(tmp_path)) as one:
        venue = Venue(one)
        job = venue.start("for n in $(seq 400); do echo line $n; sleep 0.005; done; exit 3")
        ballast = fill(small_disk)
        problem = venue.broker.until(lambda: refusal(venue), "a refusal")
        wrong(problem, "StoreUnavailable", "infra", retryable=True)
        assert problem["http"] == 503
        wrong(venue.refused("POST", "/v1/blobs", bytes(1 << 20)), "StoreUnavailable", "infra", retryable=True)
        ballast.unlink()
        body = venue.broker.done(job)
        assert (body["state"], body["exit_code"], body["retry_count"]) == ("FAILED", 3, 0), body
        assert venue.log(body) == "".join(["runs\n", *(f"line {n}\n" for n in range(1, 401))])
        assert venue.recovered(body) == "verified"


def refusal(venue: Venue) -> object:
    """What the next submission is refused with; None: it was taken."""
    status, _ = venue.broker.call("POST", "/v1/jobs", {"entrypoint": {"argv": ["/bin/true"]}})
    if status < 400:
        return None
    return venue.refused("POST", "/v1/jobs", {"entrypoint": {"argv": ["/bin/true"]}})
