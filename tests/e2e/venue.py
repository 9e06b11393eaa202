"""What the tests of bad input and faults share: a broker with a few pools, jobs by plain HTTP, and the proof that a pod
recovered.
"""

import base64
import hashlib
import io
import json
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from firepool_wire import codec
from firepool_wire.frames import Items, ItemStatus, Kind, Parser
from tests.e2e.process import BrokerProcess

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

#: `cpu` is what a user gets; the others differ in the one thing that their tests are about.
POOLS = """
[pools.cpu]
max_count = 3
min_count = 1
max_idle_count = 3
step = 3
[pools.cpu.shape]
memory_mib = 256

[pools.untrusted]
max_count = 1
untrusted = true
[pools.untrusted.shape]
memory_mib = 256

[pools.tight]
max_count = 1
max_result_bytes = 100_000
max_log_bytes = 1_000_000
[pools.tight.shape]
memory_mib = 64

[pools.hint]
max_count = 1
tag_boundary = "hint"
max_infra_retries = 0
[pools.hint.shape]
memory_mib = 256

[pools.cards]
max_count = 1
[pools.cards.shape]
accelerator = "h200"
gpus = 1
memory_mib = 256
simulated = true

[pools.wheels]
max_count = 1
preload = ["colorsys"]
[pools.wheels.shape]
memory_mib = 256
[pools.wheels.settings]
wheelhouse = "WHEELHOUSE"
"""

#: What the next job on a pod looks at: who else runs, and what lies where a job may write. It prints nothing else.
LOOK_AROUND = """
import os, sys
others = [n for n in os.listdir("/proc") if n.isdigit() and int(n) not in (1, os.getpid())]
files = [f"{d}/{n}" for d in (os.getcwd(), "/tmp", "/dev/shm") for n in os.listdir(d)]
# An interpreter that lies below /tmp stays visible there, read-only.
files = [f for f in files if not any(p.startswith(f + "/") for p in (sys.prefix, sys.base_prefix, *sys.path))]
print(others, files)
"""


class Venue:
    """A running broker and what one does with it."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def function(self, function: Callable[..., object], *args: object, **fields: Any) -> Any:
        """Run a function to its end; the job's body."""
        return self.broker.done(self.broker.submit(self.function_spec(function, *args, **fields)))

    def function_spec(self, function: Callable[..., object], *args: object, **fields: Any) -> dict[str, Any]:
        """The spec of a call; the function travels by value, its payload is stored."""
        module = sys.modules[function.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            payload = cloudpickle.dumps(function)
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        packed = codec.pack_args([(args, {})], cloudpickle.dumps, lambda _: None)
        entry = {"payload": self.store(payload), "args": base64.b64encode(packed).decode(), "python": PYTHON}
        return {"entrypoint": {"function": entry}, **fields}

    def command(self, *argv: str, **fields: Any) -> Any:
        """Run a command to its end; the job's body."""
        return self.broker.done(self.broker.submit({"entrypoint": {"argv": list(argv)}, **fields}))

    def python(self, code: str, **fields: Any) -> Any:
        """Run a Python program to its end; the job's body."""
        return self.command("python", "-c", code, **fields)

    def start(self, code: str, **fields: Any) -> str:
        """A shell program that runs now; its job's id."""
        job = self.broker.submit({"entrypoint": {"argv": ["/bin/sh", "-c", f"echo runs; {code}"]}, **fields})
        self.broker.until(lambda: "runs" in self.log({"id": job}), f"the start of {job}")
        return job

    def body(self, job: str) -> Any:
        return self.broker.json("GET", f"/v1/jobs/{job}")

    def log(self, body: Any) -> str:
        """All that the job has printed."""
        return self.broker.call("GET", f"/v1/jobs/{body['id']}/logs")[1].decode()

    def value(self, body: Any) -> object:
        """What a call returned."""
        assert body["state"] == "SUCCEEDED", body
        items = Items()
        for frame in Parser().feed(self.broker.call("GET", f"/v1/jobs/{body['id']}/result")[1]):
            assert frame.kind is Kind.RESULT
            item = items.feed(frame.payload)
            if item is not None:
                assert item[1] is ItemStatus.VALUE, item
                return codec.decode(item[2], None, None)
        raise AssertionError("the result has no value")

    # -- blobs and refusals -------------------------------------------------------------------------------------------

    def store(self, data: bytes) -> str:
        """The digest under which the bytes are stored now."""
        return str(self.broker.json("POST", "/v1/blobs", data)["digest"])

    def refused(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The problem with which a request is refused, the HTTP status beside it."""
        status, answer = self.broker.call(method, path, body)
        assert status >= 400, (status, answer)
        return {"http": status, **json.loads(answer)}

    # -- pods ---------------------------------------------------------------------------------------------------------

    def pods(self) -> dict[str, Any]:
        return {pod["name"]: pod for pod in self.broker.json("GET", "/v1/pods")["pods"]}

    def story(self, pod: str) -> list[str]:
        return list(self.broker.json("GET", f"/v1/pods/{pod}/story")["story"])

    def recovered(self, body: Any) -> str:
        """See that the job's pod was proved clean (`verified`) or is gone (`replaced`), and that the next job of its
        owner finds nothing of it, wherever it runs."""
        [name] = body["pods"]
        rest = self.broker.until(lambda: self._at_rest(name), f"the rest of pod {name}: {self.story(name)}")
        told = self.story(name)
        if rest == "held":
            assert "held <- Reset" in told[-1] or "held <- PodSettled" in told[-1], told
        after = self.python(LOOK_AROUND, sku=body["sku"], lease_tag=body["lease_tag"])
        assert (after["state"], after["retry_count"]) == ("SUCCEEDED", 0), after
        found = self.log(after)
        assert found == "[] []\n", found
        assert (after["pods"] == [name]) == (rest == "held"), (after, told)
        return "verified" if rest == "held" else "replaced"

    def _at_rest(self, name: str) -> str | None:
        pod = self.pods().get(name)
        if pod is None:
            return "gone"
        return str(pod["state"]) if pod["state"] == "held" else None


def wrong(body: Any, code: str, fault: str, *, retryable: bool = False) -> dict[str, Any]:
    """See that a failed job (or a refusal) names this error; its details."""
    error = body if "code" in body else body["error"]
    assert error is not None, body
    assert (error["code"], error["fault"], error["retryable"]) == (code, fault, retryable), error
    assert error["message"], error
    return dict(error.get("details") or {})


def archive(*entries: tuple[str, bytes], kind: int = stat.S_IFREG) -> bytes:
    """A zip archive whose entries say that they are of this kind."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in entries:
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (kind | 0o644) << 16
            z.writestr(info, data)
    return out.getvalue()


def archive_of_zeros(entries: int, each: int) -> bytes:
    """An archive of files of zeros, compressed once and repeated."""
    data, packer = bytes(each), zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(data) + packer.flush()
    out, names, places = io.BytesIO(), [f"{n}.bin".encode() for n in range(entries)], []
    about = struct.pack("<5H3L", 20, 0, zipfile.ZIP_DEFLATED, 0, 33, zlib.crc32(data), len(packed), each)
    for name in names:
        places.append(out.tell())
        out.write(b"PK\3\4" + about + struct.pack("<2H", len(name), 0) + name + packed)
    begin = out.tell()
    for name, place in zip(names, places, strict=True):
        tail = struct.pack("<5H2L", len(name), 0, 0, 0, 0, 0o100644 << 16, place)
        out.write(b"PK\1\2" + struct.pack("<H", 20) + about + tail + name)
    out.write(b"PK\5\6" + struct.pack("<4H2LH", 0, 0, entries, entries, out.tell() - begin, begin, 0))
    return out.getvalue()


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def pools_file(folder: Path, wheelhouse: Path | str = "") -> str:
    """The pools above as a file."""
    file = folder / "pools.toml"
    file.write_text(POOLS.replace("WHEELHOUSE", str(wheelhouse)))
    return str(file)
