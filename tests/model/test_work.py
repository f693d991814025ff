"""The work of a step is that of its layers, one by one, whichever linear method each of them has."""

from __future__ import annotations

from functools import cache
from typing import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import ModelConfig, Transformer
from minillm.attention.torch_backend import TorchAttention
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.layers import PLAIN
from minillm.perf.work import Work
from minillm.quant.group_linear import GroupLinear
from minillm.quant.linear import LinearMethod, Packed, PlainLinear, Traffic

CONFIG = ModelConfig(64, 64, 64, 4, 4, 2, 16, 64, name="layers")


class Own(PlainLinear):
    """A method of one's own that says what it reads."""

    def __init__(self, read: int):
        self.read = read

    def traffic(self, packed: Packed, rows: int) -> Traffic:
        return Traffic(self.read)


class Slotted(PlainLinear):
    __slots__ = ()


METHODS: list[LinearMethod] = [
    PlainLinear(), Slotted(), Own(1), Own(2), GroupLinear(8, -1, True, 4), GroupLinear(4, 32, False, 4),
    GroupLinear(4, 32, False, 9), GroupLinear(4, 64, False, None), GroupLinear(3, 32, True, None),
]  # fmt: skip


class ByLayer:
    """The method of a number for each layer; the head plain."""

    def __init__(self, chosen: Sequence[int]):
        self.chosen = chosen

    def for_layer(self, name: str) -> LinearMethod:
        return METHODS[self.chosen[int(name.split(".")[2])]] if name.startswith("model.layers") else PlainLinear()


@cache
def model_of(chosen: tuple[int, ...]) -> Transformer:
    return Transformer.random(CONFIG, dtype=torch.float32, linear_method=ByLayer(chosen))


def counted(model: Transformer, rows: int) -> tuple[Work, Work]:
    """What the model says of a step of so many rows, and the sum of its layers' words."""
    batch = ForwardBatch.build([Row([0], 3, blocks=[i + 1]) for i in range(rows)], block_size=4)
    backend = TorchAttention(None)
    plan = backend.plan(batch, model.dtype)
    layers = sum((layer.work(batch, PLAIN, backend, plan) for layer in model.layers), Work())  # type: ignore[operator]
    return model.work(batch, backend, plan), layers


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(0, len(METHODS) - 1)] * 4), st.integers(1, 12))
def test_layers_are_counted_as_they_are_held(chosen: tuple[int, ...], rows: int) -> None:
    model, plain = model_of(chosen), model_of((0, 0, 0, 0))
    (total, layers), (all_plain, plain_layers) = counted(model, rows), counted(plain, rows)
    for needle in ("weight_bytes", "activation_bytes", "launches"):
        rest = getattr(all_plain, needle) - getattr(plain_layers, needle)  # embedding, norm, head
        assert getattr(total, needle) == rest + getattr(layers, needle), needle


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_a_model_of_some_layers_counts_those(kept: list[int]) -> None:
    some = model_of((2, 5, 2, 0)).skipping(kept)
    total, layers = counted(some, 2)
    whole, all_layers = counted(model_of((2, 5, 2, 0)), 2)
    assert total.weight_bytes - layers.weight_bytes == whole.weight_bytes - all_layers.weight_bytes


class Sparse(PlainLinear):
    """A learner's method, which reads some of its rows: how many is in no number of its own."""

    def __init__(self, read: list[int]):
        self.read = read

    def traffic(self, packed: Packed, rows: int) -> Traffic:
        return Traffic(sum(self.read))


class Kept(PlainLinear):
    """The same, in no dictionary."""

    __slots__ = ("read",)

    def __init__(self, read: int):
        self.read = read

    def traffic(self, packed: Packed, rows: int) -> Traffic:
        return Traffic(self.read)


@pytest.mark.parametrize("make", [lambda n: Sparse([n, n]), Kept], ids=["a list", "a slot"])
def test_methods_that_differ_in_more_than_numbers_are_counted_apart(make: Callable[[int], LinearMethod]) -> None:
    class Odd:
        def for_layer(self, name: str) -> LinearMethod:
            return make(int(name.split(".")[2])) if name.startswith("model.layers") else PlainLinear()

    total, layers = counted(Transformer.random(CONFIG, linear_method=Odd()), 2)
    plain, plain_layers = counted(model_of((0, 0, 0, 0)), 2)
    assert total.weight_bytes - layers.weight_bytes == plain.weight_bytes - plain_layers.weight_bytes
