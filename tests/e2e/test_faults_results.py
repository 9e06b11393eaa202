"""Functions, arguments, results and output that cannot cross: each says which, and the pod is as good as before."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import firepool
from firepool import errors
from tests.e2e.test_readme import environment
from tests.e2e.venue import PYTHON, Venue, wrong

pytestmark = [pytest.mark.linux, pytest.mark.slow]


@pytest.fixture(scope="module")
def connected(venue: Venue) -> Any:
    token = (venue.broker.home / "token").read_text().strip()
    with firepool.init(venue.broker.address, token=token) as session:
        yield session


# -- on the way to the job --------------------------------------------------------------------------------------------


def test_a_function_that_cannot_be_pickled_fails_where_it_is_called(venue: Venue, connected: Any) -> None:
    lock = threading.Lock()
    before = venue.broker.json("GET", "/v1/jobs?limit=500")

    @firepool.remote
    def locks() -> bool:
        return lock.locked()

    with pytest.raises(Exception, match="pickle") as caught:
        locks.remote().result(60)
    assert not firepool.is_infra(caught.value)
    assert venue.broker.json("GET", "/v1/jobs?limit=500") == before, "nothing was created"


def test_an_argument_that_cannot_be_pickled_fails_where_it_is_given(venue: Venue, connected: Any) -> None:
    @firepool.remote
    def takes(x: object) -> int:
        return 1

    with pytest.raises(Exception, match="pickle") as caught:
        takes.remote(threading.Lock()).result(60)
    assert not firepool.is_infra(caught.value)
    assert takes.remote("plain").result(60) == 1


def test_a_payload_of_another_python_names_both_sides(venue: Venue) -> None:
    spec = venue.function_spec(lambda: 1)
    spec["entrypoint"]["function"]["python"] = "3.8"
    body = venue.broker.done(venue.broker.submit(spec))
    details = wrong(body, "SerializationMismatch", "user")
    assert (details["client_python"], details["pod_python"]) == ("3.8", PYTHON)
    assert body["exit_code"] is None, "nothing of it ever ran"
    assert venue.recovered(body) == "verified"


def test_a_payload_that_is_no_pickle_is_the_users_error(venue: Venue) -> None:
    spec = venue.function_spec(lambda: 1)
    spec["entrypoint"]["function"]["payload"] = venue.store(b"\x80\x05garbage")
    body = venue.broker.done(venue.broker.submit(spec))
    wrong(body, "UserError", "user")
    assert venue.recovered(body) == "verified"


# -- on the way back --------------------------------------------------------------------------------------------------


def a_lock() -> object:
    import threading

    return threading.Lock()


def a_pattern() -> object:
    import re

    return re.compile("x")


def some_bytes(count: int) -> bytes:
    return bytes(count)


def an_error_that_cannot_be_printed() -> None:
    class Mean(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

        def __reduce__(self) -> str:
            raise ValueError("no")

    raise Mean


def test_a_result_that_cannot_be_pickled_is_named_by_its_type(venue: Venue) -> None:
    body = venue.function(a_lock)
    assert "lock" in wrong(body, "ResultUnpicklable", "user")["type"]
    assert "lock" in venue.log(body)
    assert venue.recovered(body) == "verified"


def test_an_untrusted_pool_lets_no_pickle_out(venue: Venue) -> None:
    body = venue.function(a_pattern, sku="untrusted")
    wrong(body, "ResultUnpicklable", "user")
    assert venue.recovered(body) == "verified"
    assert venue.value(venue.function(some_bytes, 3, sku="untrusted")) == b"\0\0\0"


def test_a_result_over_the_pools_limit_is_refused_with_both_sizes(venue: Venue) -> None:
    body = venue.function(some_bytes, 200_000, sku="tight")
    details = wrong(body, "ResultTooLarge", "user")
    assert details["limit_bytes"] == 100_000
    assert details["result_bytes"] >= 200_000
    assert venue.recovered(body) == "verified"
    assert venue.value(venue.function(some_bytes, 50_000, sku="tight")) == bytes(50_000)


def test_an_error_that_can_neither_be_printed_nor_pickled_is_still_the_users(venue: Venue) -> None:
    body = venue.function(an_error_that_cannot_be_printed)
    assert "Mean" in wrong(body, "UserError", "user")["type"]
    assert venue.recovered(body) == "verified"


# -- output -----------------------------------------------------------------------------------------------------------


def test_200_mb_of_output_keep_their_begin_and_end_and_hold_nobody_up(venue: Venue) -> None:
    code = "import sys; line = 'x' * 99 + chr(10); print('begin'); [sys.stdout.write(line * 10_000) for _ in range(200)]; print('end')"
    body = venue.python(code, sku="tight")
    assert (body["state"], body["exit_code"]) == ("SUCCEEDED", 0), body
    log = venue.log(body)
    assert log.startswith("begin\n")
    assert log.endswith("end\n")
    assert len(log) < 1_100_000
    assert "bytes are missing here]" in log
    assert venue.recovered(body) == "verified"


def closes_its_output() -> str:
    import os

    print("before", flush=True)
    os.close(1)
    os.close(2)
    return "came back"


def test_a_function_that_closes_its_output_still_comes_back(venue: Venue) -> None:
    body = venue.function(closes_its_output)
    assert venue.value(body) == "came back"
    assert venue.log(body) == "before\n"
    assert venue.recovered(body) == "verified"


def closes_everything() -> None:
    import os

    os.closerange(0, 1024)


def test_a_function_that_closes_every_descriptor_is_told_that_its_result_is_lost(venue: Venue) -> None:
    body = venue.function(closes_everything)
    assert body["state"] == "FAILED"
    assert body["error"]["fault"] == "user"
    assert venue.recovered(body) == "verified"


# -- the client -------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_the_command_line_cancels_the_job_and_leaves_with_130(venue: Venue, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from firepool_ray.cli import main; main()",
        "submit",
        "--run",
        "interrupted",
        "--",
    ]
    code = "import time; print('runs', flush=True); time.sleep(600)"
    client = subprocess.Popen(
        [*command, "python", "-c", code],
        cwd=tmp_path,
        env=environment(venue.broker.home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert client.stdout is not None
        while (line := client.stdout.readline()) and "runs" not in line:
            pass
        assert "runs" in line
        client.send_signal(2)
        _, said = client.communicate(timeout=30)
    finally:
        client.kill()
        client.wait()
    assert client.returncode == 130, said
    [job] = venue.broker.json("GET", "/v1/jobs?run=interrupted")["jobs"]
    body = venue.broker.done(job["id"])
    assert body["state"] == "CANCELLED", (json.dumps(body), said)
    wrong(body, "Cancelled", "user")
    assert venue.recovered(body) == "verified"


async def test_the_sdk_in_a_running_loop_and_its_typed_errors(connected: Any) -> None:
    @firepool.remote
    def exits() -> None:
        raise SystemExit(3)

    with pytest.raises(errors.NonZeroExit):
        await exits.aio()
    with pytest.warns(RuntimeWarning), pytest.raises(errors.NonZeroExit):
        exits.remote().result(60)
