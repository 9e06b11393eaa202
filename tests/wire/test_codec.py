"""The safe codec: what comes back is what went, hostile bytes end in one of two errors, arguments find their places."""

import dataclasses
import datetime as dt
import enum
import math
import pickle
import random
import sys
import zoneinfo
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from firepool_wire import codec


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    score: float
    why: str = ""
    parts: tuple[int, ...] = ()


@dataclasses.dataclass
class Loose:
    a: object


class Pair(NamedTuple):
    left: object
    right: object


class Colour(enum.StrEnum):
    RED = "red"


HERE = {"Verdict": Verdict, "Loose": Loose, "Pair": Pair, "Colour": Colour}


def known(name: str) -> type | None:
    return HERE.get(name.rpartition(":")[2])


def back(value: object) -> object:
    return codec.decode(codec.encode(value, None), None, known)


zones = st.one_of(st.none(), st.integers(-1439, 1439).map(lambda m: dt.timezone(dt.timedelta(minutes=m))))
keys = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.tuples(st.integers(), st.text()),
)
leaves = st.one_of(
    keys,
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(codec=None)),
    st.binary().map(bytearray),
    st.datetimes(timezones=zones),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.just(Colour.RED),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.sets(keys),
        st.frozensets(keys),
        st.dictionaries(keys, inner),
        st.builds(Verdict, st.floats(allow_nan=False), st.text(), st.lists(st.integers()).map(tuple)),
        st.builds(Loose, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=20,
)


@given(values)
def test_a_plain_value_comes_back_equal_and_of_the_same_type(value: object) -> None:
    found = back(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple | Loose | Pair)


def test_special_numbers_survive() -> None:
    assert math.isnan(back(math.nan))  # type: ignore[arg-type]
    assert math.copysign(1, back(-0.0)) == -1  # type: ignore[arg-type]
    assert back([2**63, -(2**63), -(2**63) - 1, 10**400]) == [2**63, -(2**63), -(2**63) - 1, 10**400]
    assert str(back(Decimal("sNaN"))) == "sNaN"
    assert back(True) is True


def test_text_with_lone_surrogates_survives() -> None:
    assert back("broken \ud800 output") == "broken \ud800 output"


@given(
    hnp.arrays(
        st.sampled_from(["<f4", ">f8", "<i8", "|u1", "|b1", "<c16", "<U3", "|S4", "<M8[ns]", "<f2"]),
        hnp.array_shapes(min_dims=0, min_side=0),
    )
)
def test_arrays_come_back_with_dtype_and_shape(array: np.ndarray) -> None:
    found = codec.decode(codec.encode({"logits": array}, None), None, None)["logits"]  # type: ignore[index]
    assert found.dtype == array.dtype and found.shape == array.shape
    assert found.tobytes() == array.tobytes()


def test_arrays_are_read_only_views_aligned_in_the_frame() -> None:
    found = back(np.arange(1000.0))
    assert isinstance(found, np.ndarray)
    assert not found.flags.writeable and found.flags.aligned


def test_fortran_order_and_strides_do_not_change_the_values() -> None:
    array = np.asfortranarray(np.arange(24).reshape(2, 3, 4))
    assert np.array_equal(back(array), array)  # type: ignore[arg-type]
    assert np.array_equal(back(array[:, ::2, ::-1]), array[:, ::2, ::-1])  # type: ignore[arg-type]


def test_numpy_scalars_stay_numpy_scalars() -> None:
    for value in (np.float32(0.5), np.bool_(True), np.int64(-3)):
        found = back(value)
        assert type(found) is type(value) and found == value


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {"a": [1, {2: lambda: 0}]},
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4")]),
        dt.datetime(2027, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        type("Sub", (dict,), {})(),
        type("Num", (float,), {})(1.0),
    ],
)
def test_what_is_not_plain_is_pickled_or_refused(value: object) -> None:
    with pytest.raises(codec.NotSafe):
        codec.encode(value, None)
    frame = codec.encode(value, lambda v: b"pickled " + type(v).__name__.encode())
    seen: list[bytes] = []
    codec.decode(frame, seen.append, None)
    assert seen == [b"pickled " + type(value).__name__.encode()]
    with pytest.raises(codec.NotSafe, match="pickle"):
        codec.decode(frame, None, None)


def test_a_refusal_says_where_and_what() -> None:
    with pytest.raises(codec.NotSafe, match=r"re\.Pattern.* at value\['rows'\]\[1\]\.a\[0\]"):
        codec.encode({"rows": [0, Loose([__import__("re").compile("x")])]}, None)


def test_identity_inside_a_pickled_value_is_kept() -> None:
    shared: list[int] = []
    value = [shared, shared, object]
    found = codec.decode(codec.encode(value, pickle.dumps), pickle.loads, None)
    assert found[0] is found[1]  # type: ignore[index]


def test_a_cycle_is_pickled_or_refused_and_never_recurses_without_end() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(codec.NotSafe, match="deep"):
        codec.encode(loop, None)
    found = codec.decode(codec.encode(loop, pickle.dumps), pickle.loads, None)
    assert found[0] is found  # type: ignore[index]


def test_a_class_that_is_not_imported_comes_back_as_a_record() -> None:
    found = codec.decode(codec.encode(Verdict(1.0, "ok"), None), None, lambda name: None)
    assert isinstance(found, codec.Record)
    assert (found.score, found.why, found.parts) == (1.0, "ok", ())
    assert codec.record_of(found).endswith(":Verdict")
    assert found == codec.decode(codec.encode(Verdict(1.0, "ok"), None), None, lambda name: None)


def test_an_enum_of_an_unknown_class_comes_back_as_its_value() -> None:
    assert codec.decode(codec.encode(Colour.RED, None), None, lambda name: None) == "red"


def test_the_default_resolver_imports_nothing() -> None:
    name = next(n for n in ("chunk", "sndhdr", "this", "antigravity", "turtledemo") if n not in sys.modules)
    assert codec.imported_class(f"{name}:Anything") is None
    assert name not in sys.modules
    assert codec.imported_class("decimal:Decimal") is Decimal
    assert codec.imported_class("os:system") is None
    assert codec.imported_class("no_such_module:X.Y") is None


def test_reading_a_dataclass_runs_none_of_its_code() -> None:
    ran: list[str] = []

    @dataclasses.dataclass
    class Trap:
        path: str

        def __post_init__(self) -> None:
            ran.append("post_init")

    frame = codec.encode(Trap("x"), None)
    ran.clear()
    assert codec.decode(frame, None, lambda name: Trap) == Trap("x")
    assert ran == ["post_init"]  # the comparison's own Trap, not the one that was read


def test_a_class_with_a_finaliser_is_never_made_from_bytes() -> None:
    @dataclasses.dataclass
    class Gadget:
        path: str

    frame = codec.encode(Gadget("/etc/passwd"), None)
    Gadget.__del__ = lambda self: None  # type: ignore[attr-defined]
    assert isinstance(codec.decode(frame, None, lambda name: Gadget), codec.Record)


def test_a_dataclass_with_state_beside_its_fields_is_not_plain() -> None:
    value = Loose(1)
    value.extra = 2  # type: ignore[attr-defined]
    with pytest.raises(codec.NotSafe, match="extra"):
        codec.encode(value, None)


def test_local_classes_are_left_to_the_pickler_where_there_is_one() -> None:
    @dataclasses.dataclass
    class Local:
        a: int

    assert codec.decode(codec.encode(Local(1), lambda v: b"by value"), lambda b: b, None) == b"by value"
    assert isinstance(codec.decode(codec.encode(Local(1), None), None, None), codec.Record)


# -- hostile bytes --


def harmless(data: bytes) -> None:
    try:
        codec.decode(data, None, known)
    except (codec.Malformed, codec.NotSafe):
        pass


@settings(max_examples=300)
@given(st.binary(max_size=200))
@example(b"l\xff\xff\xff\xff")
@example(b"b" + b"\xff" * 8)
@example(b"D" + b"\0" * 8)
def test_random_bytes_end_in_a_value_or_in_one_of_two_errors(data: bytes) -> None:
    harmless(b"f\x01" + data)
    harmless(data)


@settings(max_examples=300)
@given(values, st.integers(0, 2**32), st.integers(1, 5))
def test_damaged_frames_end_in_a_value_or_in_one_of_two_errors(value: object, seed: int, flips: int) -> None:
    rng = random.Random(seed)
    frame = bytearray(codec.encode(value, None))
    for _ in range(flips):
        frame[rng.randrange(2, len(frame))] = rng.randrange(256)
    harmless(bytes(frame))
    harmless(bytes(frame[: rng.randrange(len(frame))]))


@settings(max_examples=200)
@given(hnp.arrays(st.sampled_from(["<f4", "|b1", "<M8[ns]", "<U2"]), hnp.array_shapes()), st.integers(0, 2**32))
def test_damaged_arrays_end_in_a_value_or_in_one_of_two_errors(array: np.ndarray, seed: int) -> None:
    rng = random.Random(seed)
    frame = bytearray(codec.encode(array, None))
    for _ in range(3):
        frame[rng.randrange(2, min(len(frame), 60))] = rng.randrange(256)
    harmless(bytes(frame))


def test_a_forged_length_reserves_no_memory() -> None:
    with pytest.raises(codec.Malformed, match="announced"):
        codec.decode(b"f\x01b" + (1 << 60).to_bytes(8, "big"), None, None)
    with pytest.raises(codec.Malformed, match="announced"):
        codec.decode(b"f\x01l" + b"\xff" * 4, None, None)


def test_depth_is_bounded() -> None:
    with pytest.raises(codec.Malformed, match="deep"):
        codec.decode(b"f\x01" + b"l\0\0\0\1" * 50_000 + b"N", None, None)


def test_a_crowd_of_colliding_keys_is_refused_quickly() -> None:
    prime = 2**61 - 1
    crowd = {"keys": [n * prime for n in range(1, 20_000)]}
    frame = codec.encode(crowd["keys"], None)
    forged = frame.replace(b"f\x01l", b"f\x01x", 1)
    with pytest.raises(codec.Malformed, match="share one hash"):
        codec.decode(forged, None, None)


def test_unhashable_keys_are_malformed() -> None:
    with pytest.raises(codec.Malformed, match="hashed"):
        codec.decode(b"f\x01x\0\0\0\1l\0\0\0\0", None, None)


def test_bytes_behind_the_value_are_malformed() -> None:
    with pytest.raises(codec.Malformed, match="behind"):
        codec.decode(codec.encode(1, None) + b"N", None, None)


def test_a_pickle_inside_a_plain_frame_is_malformed() -> None:
    with pytest.raises(codec.Malformed, match="unknown tag"):
        codec.decode(b"f\x01l\0\0\0\1P" + pickle.dumps(1), pickle.loads, None)


# -- arguments --


def test_arguments_come_back_call_by_call() -> None:
    calls = [((1, "a"), {"k": [2]}), ((), {})]
    frame = codec.pack_args(calls, pickle.dumps)
    assert codec.unpack_args(frame, pickle.loads, lambda n: None) == calls


def test_results_of_other_jobs_go_into_their_places() -> None:
    depends: list[str] = []

    def refs(value: object) -> int | None:
        if not isinstance(value, Pair):
            return None
        depends.append(str(value.left))
        return len(depends) - 1

    frame = codec.pack_args([((Pair("j1", 0), 2), {"x": Pair("j2", 0), "y": [Pair("j3", 0)]})], pickle.dumps, refs)
    assert depends == ["j1", "j2"]
    [(args, kwargs)] = codec.unpack_args(frame, pickle.loads, lambda n: f"result {n}")
    assert args == ("result 0", 2)
    assert kwargs == {"x": "result 1", "y": [Pair("j3", 0)]}


def test_one_item_of_a_map_is_read_without_unpickling_the_others() -> None:
    frame = codec.pack_args([((n,), {}) for n in range(3)], pickle.dumps)
    second = codec.split_args(frame)[1]
    seen: list[bytes] = []
    assert second.load(lambda b: (seen.append(b), pickle.loads(b))[1], lambda n: None) == ((1,), {})
    assert len(seen) == 1


@given(values)
def test_any_other_frame_is_malformed_or_holds_only_pickled_calls(value: object) -> None:
    frame = codec.encode(value, None)
    try:
        calls = codec.split_args(frame)
    except codec.Malformed:
        return
    assert all(isinstance(call.pickled, bytes) for call in calls)


def test_a_placeholder_that_points_nowhere_is_malformed() -> None:
    call = codec.PackedCall(pickle.dumps(((1,), {})), (codec.Ref(5, 0),))
    with pytest.raises(codec.Malformed, match="argument 5 of 1"):
        call.load(pickle.loads, lambda n: None)
