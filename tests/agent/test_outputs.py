"""Files that outlive their attempt: by glob, by output directory, after every kind of end, and never anybody else's."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from firepool_wire.errors import NotFound, RunTimeout
from tests.agent.driver import Agent, Ended


def _run(agent: Agent, script: str, **launch: Any) -> tuple[str, Ended]:
    attempt = agent.begin(argv=["sh", "-c", script], **launch)
    return attempt, Ended(list(agent.events(attempt)))


def _kept(ended: Ended) -> list[str]:
    return sorted(o["path"] for o in ended.exit.outputs if "dropped" not in o)


def _fetch(agent: Agent, attempt: str, path: str) -> bytes:
    status, data = agent.raw("GET", agent.path(attempt, f"/outputs/{path}"))
    assert status == 200, data
    return data


def test_files_under_the_output_directory_are_kept_with_their_digest(agent: Agent) -> None:
    attempt, ended = _run(
        agent, 'mkdir -p "$FIREPOOL_OUTPUT_DIR/deep"; printf hello > "$FIREPOOL_OUTPUT_DIR/deep/a.txt"'
    )
    digest = hashlib.sha256(b"hello").hexdigest()
    assert ended.exit.outputs == [{"path": "deep/a.txt", "bytes": 5, "sha256": digest}]
    assert agent.reset(attempt)["clean"]
    assert _fetch(agent, attempt, "deep/a.txt") == b"hello"


def test_globs_choose_files_of_the_work_dir(agent: Agent) -> None:
    script = "mkdir -p runs/1/ckpt other; touch a.json b.txt runs/x.json runs/1/y.json runs/1/ckpt/w.pt other/z.json"
    cases = [
        (["*.json"], ["a.json"]),
        (["**/*.json"], ["a.json", "other/z.json", "runs/1/y.json", "runs/x.json"]),
        (["runs/**"], ["runs/1/ckpt/w.pt", "runs/1/y.json", "runs/x.json"]),
        (["runs/*/ckpt/*.pt", "b.???"], ["b.txt", "runs/1/ckpt/w.pt"]),
        (["runs/"], ["runs/1/ckpt/w.pt", "runs/1/y.json", "runs/x.json"]),
        (["../**", "/etc/*"], []),
    ]
    for globs, expected in cases:
        attempt, ended = _run(agent, script, outputs=globs)
        assert _kept(ended) == expected, globs
        agent.finish(attempt)


def test_outputs_are_kept_after_a_timeout_and_a_stop(agent: Agent) -> None:
    script = 'echo half > "$FIREPOOL_OUTPUT_DIR/part"; echo up; sleep 60'
    attempt, ended = _run(agent, script, run_timeout_s=0.3, grace_s=0)
    assert isinstance(ended.error, RunTimeout)
    assert _fetch(agent, attempt, "part") == b"half\n"
    agent.finish(attempt)
    attempt = agent.begin(argv=["sh", "-c", script])
    for frame in agent.events(attempt):
        if frame.payload[1:] == b"up\n":
            break
    agent.call("POST", agent.path(attempt, "/stop"), {"grace_s": 0})
    assert _kept(agent.finish(attempt)) == ["part"]


def test_links_and_pipes_are_no_outputs(agent: Agent) -> None:
    secret = agent.folder / "agent/secret"
    secret.write_text("secret")
    script = (
        f'cd "$FIREPOOL_OUTPUT_DIR"; ln -s {secret} link; ln -s {secret.parent} folder; mkfifo pipe; echo ok > good; '
        f"cd -; ln -s {secret} l.txt"
    )
    attempt, ended = _run(agent, script, outputs=["*.txt"])
    assert _kept(ended) == ["good"]
    for path in ("link", "folder/secret", "l.txt"):
        assert agent.raw("GET", agent.path(attempt, f"/outputs/{path}"))[0] == 404


def test_an_output_directory_that_is_a_link_is_not_followed(agent: Agent) -> None:
    (agent.folder / "agent/secret").write_text("secret")
    _, ended = _run(agent, f'rmdir "$FIREPOOL_OUTPUT_DIR"; ln -s {agent.folder}/agent "$FIREPOOL_OUTPUT_DIR"')
    assert ended.exit.outputs == []


def test_paths_out_of_the_outputs_are_not_found(agent: Agent) -> None:
    attempt, _ = _run(agent, 'echo x > "$FIREPOOL_OUTPUT_DIR/x"')
    for path in ("../journal", "..%2Fjournal", "%2Fetc%2Fpasswd", "", "y", "x/../../journal"):
        status, _ = agent.raw("GET", agent.path(attempt, f"/outputs/{path}"))
        assert status == NotFound.status, path


def test_files_over_the_limit_are_named_and_not_kept(agent: Agent) -> None:
    script = 'cd "$FIREPOOL_OUTPUT_DIR"; head -c 1000 /dev/zero > small; head -c 100000 /dev/zero > zbig'
    _, ended = _run(agent, script, max_output_bytes=10_000)
    assert _kept(ended) == ["small"]
    assert [o["path"] for o in ended.exit.outputs if "dropped" in o] == ["zbig"]
    assert ended.exit.discarded_bytes >= 100_000


def test_what_is_thrown_away_is_counted(agent: Agent) -> None:
    _, ended = _run(agent, 'head -c 5000 /dev/zero > lost; head -c 700 /dev/zero > "$FIREPOOL_OUTPUT_DIR/kept"')
    assert ended.exit.discarded_bytes == 5000


def test_outputs_go_with_the_acknowledgement(agent: Agent) -> None:
    attempt, _ = _run(agent, 'echo x > "$FIREPOOL_OUTPUT_DIR/x"')
    folder = agent.folder / "agent/state/attempts"
    assert any(p.is_dir() for p in folder.iterdir())
    agent.finish(attempt)
    assert list(folder.iterdir()) == []
    with pytest.raises(NotFound):
        agent.call("GET", agent.path(attempt, "/outputs/x"))


def test_strange_names_do_not_break_the_record(agent: Agent) -> None:
    script = "import os\nd = os.environb[b'FIREPOOL_OUTPUT_DIR']\nfor n in (b'\\xff', b'a b', b'new\\nline', '\\u00e4'.encode()): open(d + b'/' + n, 'w').close()"
    attempt = agent.begin(argv=["python", "-c", script])
    ended = agent.finish(attempt)
    assert ended.exit.exit_code == 0
    assert {os.fsencode(o["path"]) for o in ended.exit.outputs} == {b"\xff", b"a b", b"new\nline", "ä".encode()}


def test_nothing_is_left_where_the_job_wrote(agent: Agent) -> None:
    _, ended = _run(agent, "echo x > a; mkdir -p $HOME/b; echo y > $TMPDIR/c; pwd")
    slot = Path(ended.out.strip()).parent
    assert agent.reset()["clean"]
    assert not slot.exists()
