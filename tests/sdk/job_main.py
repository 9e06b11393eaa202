"""A job's process for the fake broker: the agent's own runner of functions, without a pod around it.

Reads one JSON order from standard input, writes RESULT frames to the descriptor named on the command line; what the job
prints goes to standard output as in a pod.
"""

import base64
import io
import json
import os
import sys
import time
import zipfile

import cloudpickle  # noqa: F401 - the runner uses the cloudpickle that is loaded, as the zygote does

from firepool_agent import calls
from firepool_agent.order import Order
from firepool_agent.stackdump import Stacks


def blob(text: str) -> int:
    fd = os.memfd_create("blob")
    os.write(fd, base64.b64decode(text))
    return fd


def main() -> int:
    out = int(sys.argv[1])
    told = json.loads(sys.stdin.read())
    # Tests' own folders are not on the path of a pod.
    sys.path[:] = [p for p in sys.path if not p.startswith(told["hide"])]
    if told["package"]:
        where = f"{told['work']}/package"
        zipfile.ZipFile(io.BytesIO(base64.b64decode(told["package"]))).extractall(where)
        sys.path.insert(0, where)
        os.chdir(where)
    Stacks.arm(os.open(os.devnull, os.O_WRONLY))
    blobs = {name: blob(told[name]) for name in ("payload", "args") if told[name]}
    order = Order(
        attempt=told["attempt"],
        function=told["function"],
        depends=told["depends"],
        untrusted=told["untrusted"],
        max_result_bytes=64 << 20,
    )
    return calls.run(order, blobs, calls.Sink(lambda data: os.write(out, data) and None, time.monotonic))


if __name__ == "__main__":
    os._exit(main())
