"""Blocks leave a store and come back bit for bit, in every layer, and nothing else moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cache.block_io import BlockIO
from minillm.cache.kv_store import PlainKVStore
from minillm.cache.quantised_kv import QuantisedKVStore

from ..strategies import tiny_config

CONFIG = tiny_config(2)


def filled(dtype=torch.float32, block_size=3, blocks=5) -> PlainKVStore:
    store = PlainKVStore.allocate(CONFIG, block_size * blocks, dtype)
    for i, kv in enumerate(store.layers):
        kv.copy_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(i)))
    return store


def bits(store: PlainKVStore) -> torch.Tensor:
    return torch.stack(store.layers).view(torch.uint8)


@settings(max_examples=40)
@given(st.data(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(1, 4))
def test_blocks_can_be_moved_to_other_blocks_bit_for_bit(data, dtype, block_size):
    store = filled(dtype, block_size, 7)
    io = BlockIO(store, CONFIG.num_layers, block_size)
    before = [kv.clone() for kv in store.layers]
    source = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True))
    target = data.draw(st.permutations(range(7)))[: len(source)]
    contents = io.get(source)
    assert all(c.dtype == torch.uint8 and c.shape == (io.nbytes,) for c in contents)
    assert io.nbytes == store.bytes_per_token * block_size
    io.put(target, contents)
    for kv, old in zip(store.layers, before, strict=True):
        for block in range(7):
            came_from = source[target.index(block)] if block in target else block
            rows = slice(block * block_size, (block + 1) * block_size)
            assert torch.equal(kv[rows], old[came_from * block_size : (came_from + 1) * block_size])


def test_nan_infinity_and_minus_zero_survive():
    store = filled()
    io = BlockIO(store, CONFIG.num_layers, 3)
    store.layers[0][3:6] = torch.tensor([float("nan"), -0.0, float("inf")])[:, None, None, None]
    before = bits(store).clone()
    contents = io.get([1])
    store.poison(torch.arange(3, 6))
    io.put([1], contents)
    assert torch.equal(bits(store), before)


def test_what_was_copied_does_not_change_when_the_block_is_reused():
    store = filled()
    io = BlockIO(store, CONFIG.num_layers, 3)
    (data,) = io.get([2])
    kept = data.clone()
    store.poison(torch.arange(15))
    assert torch.equal(data, kept)


def test_a_wrong_number_of_bytes_is_refused_and_writes_nothing():
    store = filled()
    io = BlockIO(store, CONFIG.num_layers, 3)
    good, before = io.get([1]), bits(store).clone()
    with pytest.raises(ValueError, match=f"{io.nbytes} bytes, got {io.nbytes - 1}"):
        io.put([2, 3], [good[0], good[0][:-1]])
    assert torch.equal(bits(store), before)


class Rounding(PlainKVStore):
    """Every write halves the last bits: reading and writing back drifts."""

    def write(self, layer, slots, k, v):
        super().write(layer, slots, k * 0.999, v * 0.999)


def test_a_store_that_rounds_at_every_write_is_refused():
    with pytest.raises(ValueError, match="Rounding does not keep what it gave out"):
        BlockIO(Rounding.allocate(CONFIG, 15, torch.float32), CONFIG.num_layers, 3)


class Latent:
    """A store of another shape: K is wider than V."""

    num_slots, bytes_per_token = 12, 2 * (5 + 3) * 4

    def __init__(self):
        self.k, self.v = torch.zeros(2, 12, 1, 5), torch.zeros(2, 12, 1, 3)

    def write(self, layer, slots, k, v):
        self.k[layer, slots], self.v[layer, slots] = k, v

    def read(self, layer, slots):
        return self.k[layer, slots], self.v[layer, slots]


def test_k_and_v_may_differ_in_shape():
    store = Latent()
    io = BlockIO(store, 2, 4)
    store.k.normal_(), store.v.normal_()
    k, v = store.k.clone(), store.v.clone()
    contents = io.get([0, 2])
    io.put([2, 0], contents)
    assert io.nbytes == 4 * store.bytes_per_token
    assert torch.equal(store.k[:, 8:], k[:, :4]) and torch.equal(store.v[:, :4], v[:, 8:])
    assert torch.equal(store.v[:, 4:8], v[:, 4:8])


@settings(max_examples=40)
@given(
    st.sampled_from(["int8", "fp8"]), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(1, 4),
    st.permutations(range(5)), st.integers(0, 9),
)  # fmt: skip
def test_a_quantised_block_travels_in_its_own_bits_whatever_they_are(kind, dtype, block_size, target, seed):
    """Any bits at all, also those of NaN and of reaches that no row could have."""
    store = QuantisedKVStore.allocate(kind, CONFIG, block_size * 5, dtype)
    io = BlockIO(store, CONFIG.num_layers, block_size)
    assert io.nbytes == store.bytes_per_token * block_size
    raw = [t.view(torch.uint8) for t in (*store.values, *store.reaches)]
    for i, t in enumerate(raw):
        t.copy_(torch.randint(0, 256, t.shape, generator=torch.Generator().manual_seed(10 * seed + i), dtype=torch.uint8))
    before = [t.clone().unflatten(0, (5, block_size)) for t in raw]
    contents = io.get(range(5))
    assert all(c.untyped_storage().nbytes() == io.nbytes for c in contents), "one that leaves takes its memory along"
    store.poison(torch.arange(5 * block_size))
    io.put(target, contents)
    for t, old in zip(raw, before, strict=True):
        assert torch.equal(t.unflatten(0, (5, block_size))[list(target)], old)


def test_bytes_of_another_kind_of_store_are_refused_and_both_are_named():
    plain = BlockIO(filled(torch.bfloat16), CONFIG.num_layers, 3)
    eight = BlockIO(QuantisedKVStore.allocate("fp8", CONFIG, 15, torch.bfloat16), CONFIG.num_layers, 3)
    with pytest.raises(ValueError, match=rf"float8_e4m3fn \[2, 2, 4\].* has {eight.nbytes} bytes, got {plain.nbytes}"):
        eight.put([1], plain.get([1]))
    with pytest.raises(ValueError, match=rf"bfloat16 K \[2, 4\].* has {plain.nbytes} bytes, got {eight.nbytes}"):
        plain.put([1], eight.get([1]))


def test_a_store_that_hides_a_part_of_its_memory_is_refused():
    store = QuantisedKVStore.allocate("int8", CONFIG, 15, torch.float32)
    store.raw_tensors = store.values
    with pytest.raises(ValueError, match="QuantisedKVStore does not keep what it gave out"):
        BlockIO(store, CONFIG.num_layers, 3)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (3, "must be a list of tensors, got 3"),
        ([], r"must be a list of tensors, got \[\]"),
        ([None], "must be a list of tensors"),
        ([torch.zeros(15)], r"contiguous, \[15 slots, ...\] each, got \[15\]"),
        ([torch.zeros(14, 3)], r"got \[14, 3\], contiguous"),
        ([torch.zeros(3, 15).T], r"got \[15, 3\], not contiguous"),
    ],
)
def test_raw_tensors_that_cannot_be_moved_as_bytes_are_refused(raw, message):
    store = QuantisedKVStore.allocate("int8", CONFIG, 15, torch.float32)
    store.raw_tensors = raw
    with pytest.raises(ValueError, match=f"raw_tensors of QuantisedKVStore .*{message}"):
        BlockIO(store, CONFIG.num_layers, 3)
