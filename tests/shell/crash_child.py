"""Run as a process of its own and killed at any moment: stores, starts and ends jobs, and says what was acknowledged.

python crash_child.py FILE PREFIX        prints "<kind> <job>" for every answered write
"""

import asyncio
import os
import sys
from pathlib import Path

from firepool_broker.conformance.stores import end, running
from firepool_broker.shell.rows import Won
from firepool_broker.shell.store.database import Database
from firepool_broker.shell.store.jobs import SqliteJobs


async def one(store: SqliteJobs, job: str) -> None:
    """The life of one job."""
    for kind, write in (("started", running(job)), ("ended", end(job, result=b"r" * 500))):
        assert isinstance(await store.write(write), Won)
        os.write(1, f"{kind} {job}\n".encode())


async def main() -> None:
    """Batches of jobs without an end."""
    store = SqliteJobs(Database(Path(sys.argv[1])))
    await store.open()
    os.write(1, b"open\n")
    number = 0
    while True:
        await asyncio.gather(*(one(store, f"{sys.argv[2]}-{n}") for n in range(number, number + 20)))
        number += 20


if __name__ == "__main__":
    asyncio.run(main())
