"""Tensors through the codec, where torch is installed (it is nobody's dependency here)."""

import importlib.util
import random

import pytest

from firepool_wire import codec

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed here")


def back(value: object) -> object:
    return codec.decode(codec.encode(value, None), None, None)


def test_tensors_come_back_with_dtype_shape_and_values() -> None:
    import torch

    for tensor in (
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.arange(4, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.empty(0, 3),
        torch.ones(3, requires_grad=True),
    ):
        found = back(tensor)
        assert isinstance(found, torch.Tensor) and not found.requires_grad
        assert found.dtype == tensor.dtype and torch.equal(found, tensor.detach().resolve_conj())


def test_tensors_without_a_plain_buffer_are_refused() -> None:
    import torch

    with pytest.raises(codec.NotSafe, match="layout"):
        codec.encode(torch.eye(2).to_sparse(), None)


def test_damaged_tensors_end_in_a_value_or_in_one_of_two_errors() -> None:
    import torch

    frame = codec.encode(torch.arange(4.0), None)
    rng = random.Random(2027)
    for _ in range(2000):
        damaged = bytearray(frame)
        for _ in range(2):
            damaged[rng.randrange(2, len(damaged))] = rng.randrange(256)
        try:
            codec.decode(bytes(damaged), None, None)
        except (codec.Malformed, codec.NotSafe):
            continue
