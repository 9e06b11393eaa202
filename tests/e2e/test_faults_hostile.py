# ruff: noqa: PTH118, PTH123, PTH208
"""Programs that misbehave: each ends with its own error, its pod is proved clean or replaced, and the neighbour notices
nothing.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.venue import Venue, wrong

pytestmark = [pytest.mark.linux, pytest.mark.slow]


@pytest.fixture(autouse=True)
def a_neighbour_runs_on(venue: Venue) -> Iterator[None]:
    """A job of the same caller on another pod, before, while and after: what is hostile is hostile to itself."""
    job = venue.start("exec sleep 600", lease_tag="neighbour")
    yield
    body = venue.body(job)
    assert (body["state"], body["retry_count"]) == ("RUNNING", 0), body
    venue.broker.call("POST", f"/v1/jobs/{job}:cancel")
    assert venue.broker.done(job)["state"] == "CANCELLED"


# -- too long, too much -----------------------------------------------------------------------------------------------


def waits_for_ever() -> None:
    import threading

    def beside() -> None:
        threading.Event().wait()

    threading.Thread(target=beside, daemon=True).start()
    threading.Event().wait()


def test_a_function_that_never_ends_times_out_with_the_stacks_of_all_threads(venue: Venue) -> None:
    body = venue.function(waits_for_ever, run_timeout_s=0.3)
    stacks = wrong(body, "RunTimeout", "limit")["stacks"]
    assert "in waits_for_ever" in stacks
    assert "in beside" in stacks
    assert (body["exit_code"], body["signal"]) in [(143, 15), (137, 9)]
    assert venue.recovered(body) == "verified"


def test_a_busy_loop_that_ignores_sigterm_is_killed_after_its_grace(venue: Venue) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: pass"
    body = venue.python(code, run_timeout_s=0.3, grace_s=0.2)
    wrong(body, "RunTimeout", "limit")
    assert (body["exit_code"], body["signal"]) == (137, 9)
    assert venue.recovered(body) == "verified"


def allocates(mib: int) -> int:
    return len([bytearray(1 << 20) for _ in range(mib)])


def test_a_function_past_its_memory_is_out_of_memory(venue: Venue) -> None:
    body = venue.function(allocates, 1000, sku="tight")
    wrong(body, "OOM", "user")
    assert body["usage"]["peak_rss_bytes"] > 30 << 20
    assert venue.recovered(body) == "verified"
    assert venue.value(venue.function(allocates, 10, sku="tight")) == 10


def test_a_job_may_set_itself_a_lower_limit(venue: Venue) -> None:
    body = venue.function(allocates, 200, memory_mib=64)
    wrong(body, "OOM", "user")
    assert venue.recovered(body) == "verified"


def test_a_full_dev_shm_is_empty_for_the_next_job(venue: Venue) -> None:
    body = venue.command("/bin/sh", "-c", "head -c 2g /dev/zero > /dev/shm/full; exit 7", sku="tight")
    assert body["state"] == "FAILED"
    assert body["error"]["code"] in ("NonZeroExit", "OOM"), body["error"]
    venue.recovered(body)


def test_a_full_disk_in_the_pod_is_the_jobs_own_and_free_for_the_next(venue: Venue) -> None:
    body = venue.command("/bin/sh", "-c", "head -c 2g /dev/zero > full", sku="tight")
    assert body["error"]["code"] in ("NonZeroExit", "OOM"), body["error"]
    assert body["error"]["fault"] == "user"
    venue.recovered(body)
    body = venue.python("open('small', 'wb').write(bytes(1 << 20)); print('written')", sku="tight")
    assert venue.log(body) == "written\n"


# -- processes --------------------------------------------------------------------------------------------------------

ESCAPES = """
import os, signal, time
for n in range(50):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if n % 10 == 0:
                while True: pass
            time.sleep(600)
        os._exit(0)
for n in range(50):
    os.wait()
print(len([p for p in os.listdir('/proc') if p.isdigit()]) > 50)
"""


def test_fifty_children_with_sessions_of_their_own_die_with_their_job(venue: Venue) -> None:
    body = venue.python(ESCAPES)
    assert (body["state"], venue.log(body)) == ("SUCCEEDED", "True\n"), body
    assert venue.recovered(body) == "verified"


def kills_all_it_can() -> None:
    import os

    while True:
        os.kill(-1, 9)


def test_a_loop_of_kill_all_kills_only_itself(venue: Venue) -> None:
    code = "import os\nif os.fork() == 0:\n  while True: os.kill(-1, 9)\nwhile True: os.kill(-1, 9)"
    body = venue.python(code, run_timeout_s=0.5)
    assert body["state"] == "FAILED"
    assert body["error"]["fault"] in ("user", "limit"), body["error"]
    assert venue.recovered(body) == "verified"
    body = venue.function(kills_all_it_can, run_timeout_s=0.3)
    assert body["error"]["fault"] in ("user", "limit"), body["error"]
    assert venue.recovered(body) == "verified"


def kills_its_parent() -> str:
    import os
    import signal

    parent = os.getppid()
    for target in (parent, 1):
        try:
            os.kill(target, signal.SIGKILL)
        except (PermissionError, ProcessLookupError):
            continue
    return "still here"


def test_a_function_that_kills_its_parent_ends_nobody_elses_work(venue: Venue) -> None:
    body = venue.function(kills_its_parent, run_timeout_s=5)
    assert body["state"] == "SUCCEEDED" or body["error"]["fault"] == "user", body["error"]
    assert venue.recovered(body) == "verified"


def test_a_fork_bomb_stops_at_the_pods_limit(venue: Venue) -> None:
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    body = venue.python(code, run_timeout_s=0.5, grace_s=0, sku="tight")
    assert body["error"]["code"] in ("RunTimeout", "OOM", "Signaled"), body["error"]
    venue.recovered(body)


# -- the agent --------------------------------------------------------------------------------------------------------


def looks_for_the_agent(home: str) -> dict[str, Any]:
    """What of the agent and the broker a job can find, read, signal or call."""
    import os
    import socket

    seen: dict[str, Any] = {"read": [], "signalled": [], "called": [], "secrets": []}
    me = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == me:
            continue
        for file in ("environ", "mem", "maps", "fd", "root"):
            try:
                path = f"/proc/{name}/{file}"
                os.listdir(path) if file in ("fd", "root") else open(path, "rb").read(1)  # noqa: SIM115
                seen["read"].append(path)
            except OSError:
                continue
        try:
            os.kill(int(name), 0)
            seen["signalled"].append(name)
        except OSError:
            continue
    sockets = [line.split()[-1] for line in open("/proc/net/unix") if "/" in line]  # noqa: SIM115
    for folder, folders, names in os.walk("/"):
        folders[:] = [d for d in folders if os.path.join(folder, d) not in ("/proc", "/sys", "/usr", "/dev", "/opt")]
        for name in names:
            path = os.path.join(folder, name)
            if name in ("token", "broker.json", "store.db") and ".venv" not in path:
                seen["secrets"].append(path)
            if name.endswith(".sock"):
                sockets.append(path)
    for path in [*sockets, *(f"{home}/{name}" for name in ("token", "broker.json", "store.db"))]:
        try:
            if path.startswith(home) and not path.endswith(".sock"):
                seen["secrets"].append(open(path, "rb").read(1) and path)  # noqa: SIM115
                continue
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(path)
                seen["called"].append(path)
        except OSError:
            continue
    return seen


def test_a_job_finds_no_token_no_socket_and_no_process_of_the_agent(venue: Venue) -> None:
    body = venue.function(looks_for_the_agent, str(venue.broker.home))
    assert venue.value(body) == {"read": [], "signalled": [], "called": [], "secrets": []}
    assert venue.recovered(body) == "verified"


def test_variables_of_the_loader_the_topology_and_ours_are_dropped_and_named(venue: Venue) -> None:
    env = {
        "LD_PRELOAD": "/tmp/evil.so",
        "RANK": "7",
        "FIREPOOL_CALLER": "mallory",
        "FIREPOOL_TOKEN": "stolen",
        "PYTHONHOME": "/tmp",
        "CUDA_DEVICE_MEMORY_LIMIT": "1",
        "MINE": "kept",
    }
    names = sorted(set(env) - {"MINE"})
    code = f"import os; print([os.environ.get(n) for n in {[*names, 'MINE', 'FIREPOOL_DROPPED_ENV']}])"
    body = venue.python(code, env=env)
    assert body["dropped_env"] == names
    told = [None, "local", None, None, None, None, "kept", ",".join(names)]
    assert venue.log(body) == f"{told}\n"
    assert venue.recovered(body) == "verified"
