"""The agent house's processes: `firepool-agent serve CONFIG`, `firepool-agent nursery …`, `firepool-agent probe`."""

import json
import os
import socket
import sys
from pathlib import Path

_USAGE = """usage: firepool-agent serve CONFIG      serve one pod; CONFIG is a PodConfig as JSON
       firepool-agent nursery …        make pods on this machine (see firepool-agent nursery --help)
       firepool-agent probe            what this machine can do, as JSON (for `firepool doctor`)"""


def main(argv: list[str] | None = None) -> int:
    """Run one of the agent's processes. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    match words:
        case ["serve", config]:
            return _serve(Path(config))
        case ["nursery", *rest]:
            from firepool_agent import nursery

            return nursery.main(rest)
        case ["probe"]:
            return _probe()
    print(_USAGE, file=sys.stderr)  # noqa: T201 - a command's usage
    return 2


def _serve(path: Path) -> int:
    from firepool_agent.server import serve
    from firepool_wire.nursery import PodConfig

    config = PodConfig.from_json(json.loads(path.read_text()))
    if config.listen_fd < 0:
        config.listen_fd = _listen(config.socket)
    return serve(config)


def _probe() -> int:
    from firepool_agent import gpu, levels

    found = levels.probe()
    body = {
        "isolation": str(found.level),
        "why": found.why,
        "fix": found.fix,
        "facts": found.facts,
        "cards": [card.to_json() for card in gpu.find_cards()],
    }
    print(json.dumps(body))  # noqa: T201 - the answer
    return 0


def _listen(path: str) -> int:
    """Listen on a new socket that only this user may use."""
    sock = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(before)
    sock.listen(64)
    return sock.detach()


if __name__ == "__main__":
    raise SystemExit(main())
