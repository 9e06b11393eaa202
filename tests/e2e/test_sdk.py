"""The SDK against a real embedded broker: real pods, a real store, nothing in between faked."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import firepool
from firepool import errors
from firepool_ray._config import process_lives


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("FIREPOOL_HOME", str(folder))
        for name in ("FIREPOOL_ADDRESS", "FIREPOOL_TOKEN", "FIREPOOL_PROFILE"):
            patch.delenv(name, raising=False)
        yield folder


@pytest.fixture(scope="module", autouse=True)
def connected(home: Path) -> Iterator[firepool.Connected]:
    with firepool.init("embedded") as connected:
        yield connected


@firepool.remote
def add(a: int, b: int = 1) -> int:
    return a + b


@firepool.remote
def hang() -> None:
    import threading

    threading.Event().wait()


@dataclass
class Verdict:
    score: float
    why: str


def test_it_was_started_beside_this_program(connected: firepool.Connected) -> None:
    assert connected.how == "embedded" and connected.version["interpreters"]


def test_calls_and_values() -> None:
    assert firepool.get(add.remote(1)) == 2
    assert firepool.get([add.remote(n) for n in range(5)]) == [1, 2, 3, 4, 5]


def test_each_call_has_a_process_and_a_user_of_its_own() -> None:
    @firepool.remote
    def who() -> tuple[int, int, bool]:
        import os

        first = not os.path.exists("/tmp/mark")  # noqa: PTH110
        open("/tmp/mark", "w").close()  # noqa: PTH123
        return os.getpid(), os.getuid(), first

    found = firepool.get([who.remote() for _ in range(3)])
    assert all(first for _, _, first in found)


def test_the_users_own_class_and_exception_come_back() -> None:
    @firepool.remote
    def judge(x: int) -> Verdict:
        if x < 0:
            raise LookupError("negative")
        return Verdict(x / 2, "ok")

    assert judge.remote(3).result() == Verdict(1.5, "ok")
    with pytest.raises(LookupError, match="negative") as caught:
        judge.remote(-1).result()
    assert isinstance(caught.value, firepool.TaskError)
    assert 'raise LookupError("negative")' in caught.value.remote_traceback


def test_references_as_arguments() -> None:
    assert add.remote(add.remote(1), b=add.remote(2)).result() == 5  # type: ignore[arg-type]


def test_a_map_and_its_failures() -> None:
    @firepool.remote
    def judge(x: int) -> int:
        import os

        if x == 2:
            os._exit(7)
        return x * x

    found = list(judge.map(range(5), return_exceptions=True))
    assert found[:2] + found[3:] == [0, 1, 9, 16]
    assert isinstance(found[2], errors.NonZeroExit) and found[2].details["exit_code"] == 7


def test_a_generator_is_streamed() -> None:
    @firepool.remote
    def count(n: int):  # type: ignore[no-untyped-def]
        import time

        for i in range(n):
            yield i, time.monotonic()
            time.sleep(0.3)

    arrived = [(i, at, time.monotonic()) for i, at in count.remote(3)]
    assert [i for i, _, _ in arrived] == [0, 1, 2]
    assert arrived[0][2] < arrived[2][1], "the first value came before the last was made"


def test_cancelling_a_running_job() -> None:
    ref = hang.remote()
    deadline = time.monotonic() + 30
    while ref.state != "RUNNING":
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    ref.cancel(wait=True)
    with pytest.raises(errors.Cancelled):
        ref.result()


def test_a_run_time_out_is_not_the_infrastructures_fault() -> None:
    with pytest.raises(errors.RunTimeout) as caught:
        hang.options(run_timeout_s=0.5).remote().result(30)
    assert not firepool.is_infra(caught.value) and "hang" in str(caught.value.details.get("stacks", ""))


def test_an_untrusted_job_gives_plain_values_only() -> None:
    @firepool.remote(untrusted=True)
    def make(kind: str) -> object:
        import re

        return {"plain": (1, {"x"}), "fancy": re.compile("x")}[kind]

    assert make.remote("plain").result() == (1, {"x"})
    with pytest.raises(errors.ResultUnpicklable):
        make.remote("fancy").result()


def test_large_arguments_and_results() -> None:
    @firepool.remote
    def double(data: bytes) -> bytes:
        return data * 2

    data = os.urandom(1 << 20)
    assert double.remote(data).result() == data * 2


def test_numpy_arrays() -> None:
    import numpy as np

    @firepool.remote
    def scale(
        x: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]",
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
        return x * 2

    assert np.array_equal(scale.remote(np.arange(4.0)).result(), np.arange(4.0) * 2)


def test_first_party_modules_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "my_lib.py").write_text("def score(x):\n    return x + 0.5\n")
    (tmp_path / "my_rewards.py").write_text(
        "import firepool\nimport my_lib\n\n@firepool.remote\ndef reward(x):\n    return my_lib.score(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_rewards  # type: ignore[import-not-found]

    try:
        assert my_rewards.reward.remote(1).result() == 1.5
        by_name = my_rewards.reward.options(ship="import")
        assert by_name.remote(2).result() == 2.5
    finally:
        del sys.modules["my_lib"], sys.modules["my_rewards"]


async def test_awaiting() -> None:
    assert await asyncio.gather(*(add.aio(n) for n in range(3))) == [1, 2, 3]
    assert await add.remote(1) == 2
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hang.aio(), 0.5)


def test_context_in_the_job() -> None:
    @firepool.remote(lease_tag="tagged")
    def look() -> dict[str, object]:
        import os

        return {k: v for k, v in os.environ.items() if k.startswith("FIREPOOL_")}

    ref = look.remote()
    told = ref.result()
    assert told["FIREPOOL_JOB_ID"] == ref.job_id and told["FIREPOOL_LEASE_TAG"] == "tagged"


def test_a_command_with_its_log_and_exit_code() -> None:
    job = firepool.submit([sys.executable, "-c", "print('hello'); raise SystemExit(3)"])
    assert job.wait(60).exit_code == 3
    assert b"".join(job.logs.stream()) == b"hello\n"
    with pytest.raises(errors.NonZeroExit):
        job.result()


def test_a_folder_travels_with_a_command(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("import helper; print(helper.X)")
    (tmp_path / "helper.py").write_text("X = 'from the helper'")
    job = firepool.submit([sys.executable, "main.py"], package=str(tmp_path))
    job.result(60)
    assert job.logs.tail() == ["from the helper"]


def test_a_forked_child_connects_by_itself() -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, pickle.dumps(add.remote(40).result(60)))
        finally:
            os._exit(0)
    os.close(write_end)
    assert os.waitpid(child, 0)[1] == 0
    assert pickle.loads(os.read(read_end, 4096)) == 41
    os.close(read_end)
    assert add.remote(1).result() == 2


def test_ctrl_c_in_get_leaves_the_session_usable() -> None:
    ref = hang.remote()
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ref.result()
    with pytest.raises(errors.Cancelled):
        ref.result(60)
    assert add.remote(1).result() == 2


def test_an_unknown_pool_lists_the_known_ones() -> None:
    with pytest.raises(errors.UnknownSku) as caught:
        add.options(sku="h900").remote(1).result(60)
    assert "cpu" in str(caught.value.details)


def test_a_program_without_init_starts_a_broker_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
        import os, firepool
        from firepool_ray import _front

        @firepool.remote
        def double(x):
            return 2 * x

        print(firepool.get(double.remote(21)))
        print(_front.current()._child._process.pid, _front.current()._child.home)
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(code))
    told = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "FIREPOOL_HOME": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    answer, (pid, folder) = told.stdout.split("\n")[0], told.stdout.split("\n")[1].split()
    assert answer == "42"
    assert not process_lives(int(pid)) and not Path(folder).exists()
