"""Output of jobs: both streams, in order, bounded as head, marker and tail, whatever the job does to its descriptors."""

import random
import time

import pytest

from firepool_agent.logs import LogCap
from firepool_wire.frames import Kind, Parser
from tests.agent.driver import Agent


def _collect(max_bytes: int, chunks: list[bytes]) -> tuple[bytes, LogCap]:
    written: list[bytes] = []
    cap = LogCap(max_bytes, written.append)
    for chunk in chunks:
        cap.add(1, chunk)
    cap.finish()
    frames = Parser().feed(b"".join(written))
    return b"".join(f.payload[1:] for f in frames if f.kind is Kind.LOG), cap


@pytest.mark.parametrize("seed", range(20))
def test_head_and_tail_are_kept_and_every_byte_is_counted(seed: int) -> None:
    draw = random.Random(seed)
    data = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 20_000)))
    chunks, at = [], 0
    while at < len(data):
        size = draw.randrange(1, 3_000)
        chunks.append(data[at : at + size])
        at += size
    limit = draw.randrange(100, 10_000)
    log, cap = _collect(limit, chunks)
    assert cap.kept + cap.dropped == len(data), f"seed {seed}"
    assert cap.kept <= limit
    if len(data) <= limit:
        assert log.replace(b"\n", b"").startswith(data[: limit - limit // 4].replace(b"\n", b""))
    head = limit - limit // 4
    assert log.startswith(data[:head])
    if len(data) > head:
        assert log.endswith(data[-min(limit // 4, len(data) - head) :])
    assert (b"missing here" in log) == (cap.dropped > 0)


def test_both_streams_arrive_and_stay_apart(agent: Agent) -> None:
    ended = agent.run(["sh", "-c", "for i in 1 2 3; do echo out $i; echo err $i >&2; done"])
    assert ended.out == "out 1\nout 2\nout 3\n"
    assert ended.err == "err 1\nerr 2\nerr 3\n"
    assert ended.exit.log_bytes == len(ended.out) + len(ended.err)


def test_what_a_function_prints_is_there_before_its_end(agent: Agent) -> None:
    def body() -> None:
        import sys

        print("one line")
        sys.stdout.write("no newline")

    assert agent.run_function(body).out == "one line\nno newline"


def test_a_job_that_prints_200_mb_is_capped_and_never_held_up(agent: Agent) -> None:
    script = "import sys\nline = b'x' * 99 + b'\\n'\nfor n in range(2000): sys.stdout.buffer.write(line * 1000)\nprint('the end')"
    began = time.monotonic()
    ended = agent.run(["python", "-c", script], max_log_bytes=1 << 20)
    assert ended.exit.exit_code == 0
    assert ended.exit.log_bytes <= 1 << 20
    assert ended.exit.log_bytes + ended.exit.log_dropped_bytes == 200_000_000 + len("the end\n")
    assert ended.out.startswith("x" * 99)
    assert ended.out.endswith("the end\n")
    assert "bytes are missing here" in ended.err
    assert time.monotonic() - began < 20


def test_a_job_that_closes_its_output_still_ends_as_it_ends(agent: Agent) -> None:
    def body() -> int:
        import os
        import sys

        print("last words", flush=True)
        sys.stdout.close()
        os.close(1)
        os.close(2)
        return 5

    ended = agent.run_function(body)
    assert ended.value() == 5
    assert ended.out == "last words\n"


def test_a_function_that_closes_everything_has_lost_its_result_and_is_told_so(agent: Agent) -> None:
    def body() -> int:
        import os

        os.closerange(0, 100)
        return 5

    ended = agent.run_function(body)
    assert ended.error is not None
    assert ended.error.fault == "user"


def test_a_job_that_writes_garbage_to_every_descriptor_harms_only_itself(agent: Agent) -> None:
    def body() -> None:
        import os

        for fd in range(100):
            try:
                os.write(fd, b"\xff" * 1000)
            except OSError:
                continue
        os._exit(0)

    ended = agent.run_function(body)
    assert ended.error is not None
    assert agent.run_function(lambda: 1).value() == 1


def test_a_background_process_that_holds_the_pipes_does_not_hold_up_the_end(agent: Agent) -> None:
    began = time.monotonic()
    ended = agent.run(["sh", "-c", "sleep 60 & setsid sleep 60 & echo done"])
    assert ended.out == "done\n"
    assert time.monotonic() - began < 10


def test_a_silent_log_ends_with_its_marker(agent: Agent) -> None:
    kinds = [f.kind for f in agent.run(["true"]).frames]
    assert kinds == [Kind.STARTED, Kind.EXIT, Kind.END]
