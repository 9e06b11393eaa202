"""When things break between program and broker: nothing is lost, nothing runs twice, nobody waits for ever."""

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import firepool
from firepool import errors
from tests.sdk.fake_broker import FakeBroker, until


@firepool.remote
def add(a: int, b: int = 1) -> int:
    return a + b


@firepool.remote
def sleeper() -> None:
    import threading

    threading.Event().wait()


def test_a_job_whose_answer_was_cut_off_runs_once(connected: FakeBroker) -> None:
    connected.next_submits.append("cut")
    assert add.remote(1).result() == 2
    assert len(connected.jobs) == 1 and connected.jobs["j1"].runs == 1
    assert connected.count("POST", "/v1/jobs") == 2


def test_overload_is_waited_out_as_long_as_the_broker_says(connected: FakeBroker) -> None:
    connected.next_submits += [errors.TooManyRequests("busy", retry_after_s=0.01)] * 3
    assert add.remote(1).result() == 2


def test_an_error_that_a_retry_cannot_help_is_the_jobs_own(connected: FakeBroker) -> None:
    connected.next_submits.append(errors.UnknownSku("no pool 'x'", known=["cpu"]))
    with pytest.raises(errors.UnknownSku):
        add.remote(1).result()
    connected.next_submits.append(errors.CapacityUnavailable("larger than the ceiling"))
    with pytest.raises(errors.CapacityUnavailable):
        add.remote(1).result()
    assert connected.count("POST", "/v1/jobs") == 2


def test_in_a_batch_every_job_has_its_own_error(connected: FakeBroker) -> None:
    add.remote(1).result()
    with connected.lock:
        first = add.remote(1)
        until(lambda: connected.count("POST", "/v1/jobs") == 2)
        good, bad = add.remote(2), add.options(idempotency_key="k").remote(3)
        connected.by_key["k"] = connected.jobs["j1"]
    assert first.result() == 2 and good.result() == 3
    with pytest.raises(errors.Conflict):
        bad.result()


def test_a_blob_that_the_broker_lost_is_sent_again(connected: FakeBroker) -> None:
    assert add.remote(1).result() == 2
    connected.blobs.clear()
    assert add.remote(2).result() == 3
    connected.blobs.clear()
    assert firepool.get([add.remote(n) for n in range(5)]) == [1, 2, 3, 4, 5]


def test_a_broken_event_stream_is_taken_up_where_it_broke(connected: FakeBroker) -> None:
    connected.hold()
    refs = [add.remote(n) for n in range(5)]
    until(lambda: len(connected.jobs) == 5)
    connected.cut_streams()
    connected.release()
    connected.cut_streams()
    assert firepool.get(refs) == [1, 2, 3, 4, 5]
    assert connected.count("GET", "/v1/events") >= 2


def test_no_broker_is_a_typed_error_that_names_the_address() -> None:
    with pytest.raises(errors.BrokerUnavailable, match=r"127\.0\.0\.1:9"):
        firepool.init("http://127.0.0.1:9", patience_s=0.1)
    assert not firepool.is_initialized()


def test_a_bad_token_is_refused_at_once(broker: FakeBroker) -> None:
    broker.token = "right"
    with pytest.raises(errors.Unauthenticated):
        firepool.init(broker.address, token="wrong")
    with firepool.init(broker.address, token="right") as connected:
        assert connected.how == "given"
    assert not firepool.is_initialized()


def test_a_second_init_is_an_error_unless_that_is_said(connected: FakeBroker) -> None:
    with pytest.raises(RuntimeError, match="shutdown"):
        firepool.init(connected.address)
    assert firepool.init(connected.address, ignore_reinit_error=True).address == connected.address
    with pytest.raises(ValueError, match="no setting"):
        firepool.init(adress="x")


def test_a_protocol_that_is_too_old_is_named(broker: FakeBroker) -> None:
    broker.version["protocol"] = 0
    with pytest.raises(errors.BrokerUnavailable, match="protocol 0"):
        firepool.init(broker.address)


def test_leases_are_renewed_while_jobs_run(broker: FakeBroker) -> None:
    firepool.init(broker.address, client_lease_s=0.4)
    leased, detached = sleeper.remote(), sleeper.options(detach=True).remote()
    until(lambda: len(broker.jobs) == 2 and any(job.renewed > 1 for job in broker.jobs.values()))
    by_id = {ref.job_id: ref for ref in (leased, detached)}
    renewed = [by_id[job.id] for job in broker.jobs.values() if job.renewed]
    assert renewed == [leased]
    detached.cancel(wait=True)


def test_shutdown_cancels_what_is_not_detached_and_tells_who_waits(broker: FakeBroker) -> None:
    firepool.init(broker.address)
    leased, detached = sleeper.remote(), sleeper.options(detach=True).remote()
    until(lambda: leased.job_id is not None and detached.job_id is not None)
    failed: list[BaseException] = []
    waiter = threading.Thread(target=lambda: failed.append(leased.exception()))  # type: ignore[arg-type]
    waiter.start()
    firepool.shutdown()
    waiter.join(20)
    assert isinstance(failed[0], errors.Cancelled | firepool.SessionClosed)
    until(lambda: broker.jobs[str(leased.job_id)].state == "CANCELLED")
    assert broker.jobs[str(detached.job_id)].state == "RUNNING"


def test_ctrl_c_in_get_cancels_and_leaves_the_session_usable(connected: FakeBroker) -> None:
    ref = sleeper.remote()
    until(lambda: ref.state == "RUNNING")
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        firepool.get([ref])
    until(lambda: connected.jobs["j1"].state == "CANCELLED")
    assert add.remote(1).result() == 2


def test_a_forked_child_has_a_session_of_its_own(connected: FakeBroker) -> None:
    before = sleeper.remote()
    until(lambda: before.job_id is not None)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ready, _ = firepool.wait([before], timeout=0.05)
            told = (
                add.remote(40).result(30),
                len(ready),
                [t.name for t in threading.enumerate()].count("firepool-sender"),
            )
            os.write(write_end, pickle.dumps(told))
        finally:
            os._exit(0)
    os.close(write_end)
    assert os.waitpid(child, 0)[1] == 0
    assert pickle.loads(os.read(read_end, 4096)) == (41, 0, 1)
    os.close(read_end)
    assert add.remote(1).result() == 2
    before.cancel(wait=True)


def test_a_reference_can_be_pickled_and_picked_up_elsewhere(connected: FakeBroker) -> None:
    pickled = pickle.dumps(add.remote(1))
    code = (
        "import pickle, sys, firepool\n"
        f"firepool.init({connected.address!r})\n"
        f"print(pickle.loads({pickled!r}).result(30))\n"
    )
    told = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert told.stdout == "2\n", told.stderr


def test_many_threads_share_a_session(connected: FakeBroker) -> None:
    found: list[int] = []

    def work(n: int) -> None:
        found.append(add.remote(n).result())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [n + 1 for n in range(8)]


def test_the_client_holds_few_descriptors_and_no_finished_jobs(connected: FakeBroker) -> None:
    from firepool_ray import _front

    add.remote(0).result()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        firepool.get([add.remote(n) for n in range(4)])
    session = _front.current()
    until(lambda: not session._by_id and not session._by_key)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


def test_a_program_that_ends_without_shutdown_ends(connected: FakeBroker) -> None:
    code = (
        "import firepool\n"
        f"firepool.init({connected.address!r})\n"
        "@firepool.remote\n"
        "def nap():\n    import threading; threading.Event().wait()\n"
        "r = nap.remote()\n"
        "while r.state != 'RUNNING': pass\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    until(lambda: connected.jobs["j1"].state == "CANCELLED")
