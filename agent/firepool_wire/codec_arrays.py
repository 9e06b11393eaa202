"""Arrays as raw buffers: numpy arrays and scalars, torch tensors. Private to the codec.

Neither library is imported by writing (the value brought it) and reading imports it only when an array arrives; where
it is not installed the array comes back as a `Record` with `dtype`, `shape` and `data`.
"""

import importlib
import math
import re
from typing import Any

from firepool_wire import codec_tags as tag
from firepool_wire.codec_tags import Malformed, NotSafe, Record

#: dtypes without Python objects and without fields, in numpy's own spelling; `np.dtype` sees nothing else of a stranger.
_PLAIN_DTYPE = re.compile(r"[<>|=](?:[biufc]\d{1,2}|[SUV]\d{1,9}|[mM]8(?:\[\d{0,6}[a-zA-Zμ]{1,7}\])?)")
_TORCH_DTYPE = re.compile(r"[a-z][a-z0-9_]{1,24}")
_MAX_DIMENSIONS = 32


def _buffer(out: bytearray, head: bytes, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    """Tag and flags, dtype, shape, and the bytes at an aligned place."""
    name = dtype.encode()
    out += head + bytes((len(name), len(shape))) + name
    for length in shape:
        out += tag.LENGTH.pack(length)
    out += tag.LENGTH.pack(len(data))
    out += bytes(-len(out) % tag.ALIGN)
    out += data


def write_numpy(out: bytearray, value: Any) -> None:
    """A numpy array or scalar. Flags: 1 = a scalar, 2 = Fortran order."""
    dtype = getattr(value, "dtype", None)
    if type(value).__name__ not in ("ndarray",) and getattr(value, "shape", None) != ():
        raise NotSafe(f"a numpy.{type(value).__name__}, which is not a plain type")
    if dtype is None or dtype.hasobject or dtype.fields or not _PLAIN_DTYPE.fullmatch(dtype.str):
        raise NotSafe(f"a numpy array of dtype {dtype}, which has no plain buffer")
    scalar = type(value).__name__ != "ndarray"
    fortran = not scalar and value.flags.f_contiguous and not value.flags.c_contiguous
    data = value.tobytes(order="F" if fortran else "C")
    if len(value.shape) > _MAX_DIMENSIONS:
        raise NotSafe(f"a numpy array of {len(value.shape)} dimensions")
    _buffer(out, tag.NUMPY + bytes((scalar | fortran << 1,)), dtype.str, value.shape, data)


def write_torch(out: bytearray, value: Any) -> None:
    """A dense torch tensor, from whichever device; gradients stay behind."""
    if str(value.layout) != "torch.strided" or value.is_quantized or value.dim() > _MAX_DIMENSIONS:
        raise NotSafe(f"a torch tensor of layout {value.layout}, which has no plain buffer")
    torch = importlib.import_module("torch")
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    _buffer(out, tag.TORCH + b"\0", str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


def check_shape(shape: tuple[int, ...], itemsize: int, size: int) -> None:
    """Refuse a shape that does not fit its buffer. Raises: Malformed."""
    if itemsize * math.prod(shape) != size or any(length > 1 << 48 for length in shape):
        raise Malformed(f"an array of shape {shape} and {itemsize} bytes an item in a buffer of {size} bytes")


def read_numpy(dtype: str, shape: tuple[int, ...], flags: int, data: memoryview) -> object:
    """The array, read-only and without a copy; a scalar by value."""
    if not _PLAIN_DTYPE.fullmatch(dtype):
        raise Malformed(f"dtype {dtype!r}")
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return Record("numpy:ndarray", dtype=dtype, shape=shape, data=bytes(data))
    try:
        kind = numpy.dtype(dtype)
        check_shape(shape, kind.itemsize, len(data))
        flat = numpy.frombuffer(data, kind) if len(data) else numpy.empty(math.prod(shape), kind)
        array = flat.reshape(shape, order="F" if flags & 2 else "C")
    except (TypeError, ValueError, OverflowError, MemoryError) as wrong:
        raise Malformed(f"array of dtype {dtype} and shape {shape}: {wrong}") from None
    return array[()] if flags & 1 else array


def read_torch(dtype: str, shape: tuple[int, ...], data: memoryview) -> object:
    """The tensor, on the CPU, with a buffer of its own (torch has no read-only tensors)."""
    if not _TORCH_DTYPE.fullmatch(dtype):
        raise Malformed(f"dtype {dtype!r}")
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return Record("torch:Tensor", dtype=dtype, shape=shape, data=bytes(data))
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise Malformed(f"dtype {dtype!r}")
    check_shape(shape, kind.itemsize, len(data))
    if not len(data):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)
