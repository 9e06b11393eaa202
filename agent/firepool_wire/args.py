"""The argument frame of a function job: one pickle per call, and where results of other jobs go into it.

Each call is pickled by itself, so that the process that runs one item of a map reads only its own. Placeholders are
positions beside the pickle, not objects in it: the job interpreter needs no class of ours to read its arguments.
Everyone imports this through `codec`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from firepool_wire.codec_read import decode
from firepool_wire.codec_tags import Malformed
from firepool_wire.codec_write import encode

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Ref(NamedTuple):
    """A place for the result of `function.depends[n]`: a position, or the name of a keyword argument."""

    slot: int | str
    n: int


class PackedCall(NamedTuple):
    """One call, still pickled."""

    pickled: bytes
    refs: tuple[Ref, ...]

    def load(self, loads: Callable[[bytes], Any], resolve: Callable[[int], Any]) -> Call:
        """Unpickle it and put the results of `resolve(n)` into their places.

        Raises:
            Malformed: a placeholder points nowhere.
        """
        args, kwargs = loads(self.pickled)
        if not self.refs:
            return args, kwargs
        places = list(args)
        for ref in self.refs:
            if isinstance(ref.slot, str):
                kwargs[ref.slot] = resolve(ref.n)
            elif 0 <= ref.slot < len(places):
                places[ref.slot] = resolve(ref.n)
            else:
                raise Malformed(f"placeholder for argument {ref.slot} of {len(places)}")
        return tuple(places), kwargs


def pack_args(
    calls: Sequence[Call],
    dumps: Callable[[object], bytes],
    refs: Callable[[object], int | None] | None = None,
) -> bytes:
    """Calls as one argument frame.

    Args:
        calls: `(args, kwargs)` of each call.
        dumps: a pickler; what it raises passes through.
        refs: for a top-level argument that stands for the result of another job, the place of that job in
            `function.depends`, else None. References inside containers stay what they are.
    """
    return encode([_pack_call(args, kwargs, dumps, refs) for args, kwargs in calls], None)


def _pack_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dumps: Callable[[object], bytes],
    refs: Callable[[object], int | None] | None,
) -> tuple[bytes, list[tuple[int | str, int]]]:
    found: list[tuple[int | str, int]] = []
    if refs is not None:
        slots: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        found = [(slot, n) for slot, value in slots if (n := refs(value)) is not None]
    if found:
        taken = {slot for slot, _ in found}
        args = tuple(None if slot in taken else value for slot, value in enumerate(args))
        kwargs = {name: None if name in taken else value for name, value in kwargs.items()}
    return dumps((args, kwargs)), found


def split_args(data: bytes) -> list[PackedCall]:
    """The calls of a frame without unpickling any of them.

    Raises:
        Malformed: not an argument frame.
    """
    calls = decode(data, None, None)
    try:
        return [PackedCall(_bytes(pickled), tuple(_ref(*ref) for ref in refs)) for pickled, refs in calls]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as wrong:
        raise Malformed(f"not an argument frame: {wrong}") from None


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a pickle is missing")
    return value


def _ref(slot: object, n: object) -> Ref:
    if not isinstance(slot, int | str) or not isinstance(n, int):
        raise TypeError("a placeholder is not a pair of place and number")
    return Ref(slot, n)


def unpack_args(data: bytes, loads: Callable[[bytes], Any], resolve: Callable[[int], Any]) -> list[Call]:
    """Every call of a frame, unpickled, with `resolve(n)` in the place of every result of `function.depends[n]`."""
    return [call.load(loads, resolve) for call in split_args(data)]
