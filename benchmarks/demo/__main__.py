"""`python -m benchmarks.demo [--full] [--seed N] [--start S]`."""

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks import workloads
from benchmarks.demo import loops, show
from benchmarks.demo.venue import Venue

#: Seconds that a simulated pod start takes in the short demo: enough to see, short enough to wait for.
START_S = 1.0
#: The paper's cached start of an H200 pod (paper Table 1), for `--full`.
FULL_START_S = 22.1
PAUSES = 0.2


def options() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description="Watch real reward jobs run on warm pods."
    )
    parser.add_argument(
        "--full", action="store_true", help="bodies and pauses of the spec, and a 22.1 s pod start (about 35 minutes)"
    )
    parser.add_argument("--seed", type=int, default=2027)
    parser.add_argument(
        "--start", type=float, default=None, metavar="S", help=f"simulated pod start, seconds (default {START_S})"
    )
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parents[1] / "out" / "demo.json", help="where the figures go"
    )
    return parser.parse_args()


def main() -> int:
    """Run every workload in every arm, interleaved, then show what was seen. 1 when a verdict was wrong."""
    chosen = options()
    start_s = chosen.start if chosen.start is not None else (FULL_START_S if chosen.full else START_S)
    show.opening(start_s, full=chosen.full)
    began = time.monotonic()
    pauses = 1.0 if chosen.full else PAUSES
    works = [workloads.w_rl(chosen.seed), workloads.w_agent(chosen.seed)]
    results: list[loops.Result] = []
    with Venue(start_s) as venue, show.progress(sum(loops.jobs_of(w) for w in works) * len(workloads.ARMS)) as bar:
        for turn, work in enumerate(works):
            # Interleaved and turned round, so that no arm always runs first.
            arms = workloads.ARMS if turn % 2 == 0 else workloads.ARMS[::-1]
            for arm in arms:
                loop = loops.Loop(
                    arm.jobs(workloads.scaled(work, pauses=pauses)), arm.name, chosen.seed, full=chosen.full
                )
                results.append(loop.run(venue, bar))
        explained = show.first_cold(results, venue)
    right = show.closing(results, explained, time.monotonic() - began)
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps([r.figures() for r in results], indent=2) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
