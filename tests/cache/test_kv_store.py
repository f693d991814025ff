"""What is written to a slot is what is read from it, and nothing else moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cache.kv_store import PlainKVStore

from ..strategies import tiny_config

CONFIG = tiny_config(2)
SLOTS = 12


@settings(max_examples=40)
@given(st.data(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_slots_keep_what_was_written_last_in_every_layer(data, dtype):
    store = PlainKVStore.allocate(CONFIG, SLOTS, dtype)
    written: dict[tuple[int, int], torch.Tensor] = {}
    for seed in range(data.draw(st.integers(1, 5))):
        layer = data.draw(st.integers(0, CONFIG.num_layers - 1))
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True))
        generator = torch.Generator().manual_seed(seed)
        kv = torch.randn(2, len(slots), CONFIG.num_kv_heads, CONFIG.head_dim, generator=generator).to(dtype)
        store.write(layer, torch.tensor(slots), kv[0], kv[1])
        written.update({(layer, s): kv[:, i] for i, s in enumerate(slots)})
    for (layer, slot), kv in written.items():
        k, v = store.read(layer, torch.tensor([[slot, slot]]))
        assert k.shape == v.shape == (1, 2, CONFIG.num_kv_heads, CONFIG.head_dim) and k.dtype == dtype
        assert torch.equal(k[0, 0], kv[0]) and torch.equal(k[0, 1], kv[0]) and torch.equal(v[0, 0], kv[1])


def test_bytes_per_token_are_those_of_k_and_v_in_all_layers():
    for dtype in (torch.float64, torch.bfloat16):
        store = PlainKVStore.allocate(CONFIG, SLOTS, dtype)
        assert store.bytes_per_token == CONFIG.kv_bytes_per_token(dtype.itemsize) == sum(t.nbytes for t in store.layers) / SLOTS


def test_shared_layers_hold_one_layers_kv():
    store = PlainKVStore.allocate(CONFIG, SLOTS, torch.float32, shared=True)
    assert store.bytes_per_token * CONFIG.num_layers == CONFIG.kv_bytes_per_token(4)
    kv = torch.ones(1, CONFIG.num_kv_heads, CONFIG.head_dim)
    store.write(1, torch.tensor([3]), kv, 2 * kv)
    assert torch.equal(store.read(0, torch.tensor([[3]]))[1][0], 2 * kv)


def test_poisoned_slots_are_nan_in_every_layer_and_others_are_not():
    store = PlainKVStore.allocate(CONFIG, SLOTS, torch.float32)
    for layer in store.layers:
        layer.fill_(1.0)
    store.poison(torch.tensor([2, 5]))
    for layer in range(CONFIG.num_layers):
        k, v = store.read(layer, torch.arange(SLOTS)[None])
        bad = torch.zeros(SLOTS, dtype=torch.bool)
        bad[[2, 5]] = True
        for t in (k, v):
            assert torch.equal(t[0].isnan().flatten(1).all(1), bad) and torch.equal(t[0].isnan().flatten(1).any(1), bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_slot_that_padding_reads_starts_finite(dtype, monkeypatch):
    """Memory from torch.empty may hold anything, NaN too."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    k, v = PlainKVStore.allocate(CONFIG, SLOTS, dtype).read(0, torch.tensor([[0]]))
    assert bool((k == 0).all()) and bool((v == 0).all())
