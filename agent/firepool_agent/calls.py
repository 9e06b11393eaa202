"""Running the user's function inside the attempt's process: one call, a map of forked items, or a generator.

Job side: standard library only. The body runs on the main thread (signal handlers and alarms work as in a script).
"""

import base64
import binascii
import importlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from firepool_agent import items
from firepool_agent.order import Order, read_blob
from firepool_agent.outcome import Outcome, Packer, flush
from firepool_wire import codec
from firepool_wire.args import PackedCall
from firepool_wire.frames import Items, ItemStatus, Kind, Parser, pack, pack_item


class Sink:
    """The way back to the agent: frames on the job socket."""

    def __init__(self, send: Callable[[bytes], None], now: Callable[[], float]) -> None:
        self._send = send
        self._now = now
        self._started = False
        self._gathered: list[bytes] = []

    def started(self) -> None:
        """Tell the moment of the first instruction (once)."""
        if not self._started:
            self._started = True
            self._send(pack(Kind.STARTED, b'{"at_s":%.6f}' % self._now()))

    def item(self, index: int, outcome: Outcome) -> None:
        """Deliver one finished item."""
        self.gather(index, outcome)
        self.push()

    def gather(self, index: int, outcome: Outcome) -> None:
        """Add a finished item to what `push` will send."""
        self._gathered += [pack(Kind.RESULT, part) for part in pack_item(index, outcome.status, outcome.payload)]

    def push(self) -> None:
        """Send what was gathered."""
        data = b"".join(self._gathered)
        self._gathered.clear()
        self._send(data)


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its packed arguments: what `map` items are forked around."""

    function: Callable[..., Any]
    calls: list[PackedCall]
    resolve: Callable[[int], Any]

    def run(self, index: int, packer: Packer) -> Outcome:
        """Unpickle the arguments of one item, call, pack what comes back."""
        try:
            args, kwargs = self.calls[index].load(pickle.loads, self.resolve)
            result = self.function(*args, **kwargs)
            if hasattr(result, "__await__"):
                result = _awaited(result)
        except BaseException as error:  # noqa: BLE001 - whatever the user raises is the outcome
            return packer.raised(error)
        return packer.value(result)


def _awaited(awaitable: Any) -> Any:
    """The value of a coroutine. `asyncio` is not loaded before it is needed: it would double what every fork copies."""
    import asyncio

    async def body() -> Any:
        return await awaitable

    return asyncio.run(body())


def run(order: Order, blobs: dict[str, int], sink: Sink) -> int:
    """Run the order's function. Returns the process's exit code."""
    assert order.function is not None
    entry = order.function
    packer = Packer(untrusted=order.untrusted, protocol=int(entry.get("pickle", 5)), limit_bytes=order.max_result_bytes)
    try:
        call = _load(entry, order, blobs)
    except BaseException as error:  # noqa: BLE001 - unpickling and importing run user code
        sink.item(0, failed := packer.raised(error))
        return failed.exit_code
    sink.started()
    match entry.get("kind", "call"):
        case "map":
            items.run_all(len(call.calls), lambda index: call.run(index, packer), items.Batch(sink.gather, sink.push))
            return 0
        case "generator":
            return _generate(call, packer, sink)
        case _:
            outcome = call.run(0, packer)
            flush()
            sink.item(0, outcome)
            return outcome.exit_code


def _generate(call: Call, packer: Packer, sink: Sink) -> int:
    count = 0
    try:
        args, kwargs = call.calls[0].load(pickle.loads, call.resolve)
        for value in _iterate(call.function(*args, **kwargs)):
            outcome = packer.value(value)
            sink.item(count, outcome)
            count += 1
            if outcome.status is ItemStatus.ERROR:
                return outcome.exit_code
    except BaseException as error:  # noqa: BLE001 - whatever the user raises is the outcome
        failed = packer.raised(error)
        flush()
        sink.item(count, failed)
        return failed.exit_code
    flush()
    sink.item(count, Outcome(ItemStatus.STOP, b""))
    return 0


def _iterate(values: Any) -> Iterator[Any]:
    if not hasattr(values, "__anext__"):
        yield from values
        return
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        while True:
            try:
                yield loop.run_until_complete(values.__anext__())
            except StopAsyncIteration:
                return
    finally:
        loop.close()


def _load(entry: dict[str, Any], order: Order, blobs: dict[str, int]) -> Call:
    if entry.get("payload"):
        function = pickle.loads(read_blob(blobs["payload"]))
    else:
        function = _import(entry["import_path"])
    if "args" in blobs:
        data = read_blob(blobs["args"])
    else:
        data = base64.b64decode(entry.get("args") or "")
    return Call(_undecorated(function), codec.split_args(data), lambda n: _resolved(order.depends, n))


def _import(path: str) -> Any:
    module, _, qualname = path.partition(":")
    value = importlib.import_module(module)
    for name in qualname.split("."):
        value = getattr(value, name)
    return value


def _undecorated(function: Any) -> Any:
    """The function itself where its module name now means the `@remote` handle around it."""
    return getattr(function, "__firepool_function__", function)


def _resolved(depends: list[str], n: int) -> Any:
    """The value of another job that argument `n` stands for: its one item, or the list of its items."""
    try:
        data = base64.b64decode(depends[n], validate=True)
    except (IndexError, binascii.Error) as why:
        raise ValueError(f"the result that argument {n} stands for did not arrive: {why}") from None
    parts = Items()
    found = [item for frame in Parser().feed(data) if (item := parts.feed(frame.payload)) is not None]
    values = [
        codec.decode(frame, pickle.loads, codec.imported_class)
        for _, status, frame in sorted(found)
        if status is ItemStatus.VALUE
    ]
    return values[0] if len(found) == 1 and values else values
