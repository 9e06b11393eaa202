"""A package of 200 files and 5 MB, from the submit call to the first instruction of a function that needs it (paper §9.2).

First: nobody has seen these bytes; it includes packing them, the upload, the way to the pod, checking and unpacking. Repeat: the
same package again, on the pod that has it. Every sample of the one is followed by one of the other. Serial, warm pod.
"""

import random
import tempfile
import time
from pathlib import Path

import firepool_ray as firepool
from benchmarks.harness import Context
from benchmarks.stats import percentile
from benchmarks.venue import Venue, pool

NAME = "handoff"

SKU = "handoff"
WARM_UP = 2
FILES, FILE_BYTES = 200, 25_000


def write_package(folder: Path, dice: random.Random) -> None:
    """200 modules of 25 kB of code that compresses as code does (to about a quarter)."""
    words = [f"name_{dice.randrange(1 << 32):x}" for _ in range(400)]
    for number in range(FILES):
        lines, size = [], 0
        while size < FILE_BYTES:
            line = f"{dice.choice(words)} = {dice.choice(words)!r}, {dice.randrange(1 << 40)}\n"
            lines.append(line)
            size += len(line)
        place = folder / f"part_{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"module_{number}.py").write_text("".join(lines)[:FILE_BYTES])


def probe() -> tuple[int, int, int]:
    """CLOCK_MONOTONIC in nanoseconds, and how many files of how many bytes lie in the work dir."""
    import time
    from pathlib import Path

    now = time.monotonic_ns()
    sizes = [path.stat().st_size for path in Path().rglob("*") if path.is_file()]
    return now, len(sizes), sum(sizes)


def hand_off(folder: Path) -> float:
    """Seconds from the submit call to the function's first instruction. Raises: RuntimeError: the package is not whole."""
    function = firepool.remote(sku=SKU, lease_tag="loop", ship="value", package=str(folder))(probe)
    called_ns = time.monotonic_ns()
    ran_ns, files, size = firepool.get(function.remote())
    if (files, size) != (FILES, FILES * FILE_BYTES):
        raise RuntimeError(f"{files} files of {size} bytes arrived, not {FILES} of {FILES * FILE_BYTES}")
    return (ran_ns - called_ns) / 1e9


def run(ctx: Context) -> None:
    """Measure and report."""
    report, dice = ctx.report, random.Random(ctx.seed)
    count = 30 if ctx.quick else 100
    first_s: list[float] = []
    repeat_s: list[float] = []
    with Venue(pool(SKU, pods=1, ready=1)), tempfile.TemporaryDirectory(prefix="firepool-handoff-") as place:
        ctx.say(f"{count} packages, each handed over twice …")
        for number in range(WARM_UP + count):
            if ctx.out_of_time():
                break
            folder = Path(place) / f"package-{number}"
            write_package(folder, dice)
            first, repeat = hand_off(folder), hand_off(folder)
            if number >= WARM_UP:
                first_s.append(first)
                repeat_s.append(repeat)
    report.figure("first_p50_ms", percentile(first_s, 0.5) * 1e3, len(first_s))
    report.figure("first_p90_ms", percentile(first_s, 0.9) * 1e3, len(first_s))
    report.figure("repeat_p50_ms", percentile(repeat_s, 0.5) * 1e3, len(repeat_s))
    report.figure("repeat_p90_ms", percentile(repeat_s, 0.9) * 1e3, len(repeat_s))
    report.bar("first_p50_ms", "<=", 250)
    report.bar("repeat_p50_ms", "<=", 30)
    report.note(
        "first includes reading and packing the folder in the client; both end at the function's first instruction."
    )
