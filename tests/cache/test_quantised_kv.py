"""KV in 8 bits: close to what was written, the same when written again, and never NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.cache.block_io import BlockIO
from minillm.cache.quantised_kv import QuantisedKVStore, bytes_per_element

from ..strategies import tiny_config

CONFIG = tiny_config(2)
KINDS = st.sampled_from(["int8", "fp8"])
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
BOUND = {"int8": 0.5 / 127, "fp8": 1 / 16}  # of a row's largest magnitude; fp8 keeps four significant bits


def written(kind: str, dtype: torch.dtype, rows: torch.Tensor) -> tuple[QuantisedKVStore, torch.Tensor]:
    """rows [n, head_dim]: row i is K of token i + 1 in every head of layer 1, and -row is V."""
    store = QuantisedKVStore.allocate(kind, CONFIG, len(rows) + 1, dtype)
    k = rows.to(dtype)[:, None].expand(-1, CONFIG.num_kv_heads, -1)
    store.write(1, torch.arange(1, len(rows) + 1), k, -k)
    return store, k


values = st.one_of(st.just(0.0), st.floats(-5, 5, width=16), st.floats(5, 6, width=16), st.floats(-6e4, 6e4, width=16))
four = st.one_of(st.lists(values, min_size=4, max_size=4), values.map(lambda x: [x] * 4))


@settings(max_examples=200)
@given(KINDS, DTYPES, st.lists(four, min_size=1, max_size=5))
def test_an_error_is_a_small_share_of_the_rows_largest_value_and_never_nan(kind, dtype, rows):
    store, k = written(kind, dtype, torch.tensor(rows))
    back, minus = store.read(1, torch.arange(1, len(rows) + 1)[None])
    reach = k.double().abs().amax(-1, keepdim=True)
    assert back.dtype == dtype and torch.isfinite(back).all() and torch.equal(back, -minus)
    rounding = torch.finfo(dtype).eps  # the product is rounded to the model's dtype
    assert ((back[0].double() - k.double()).abs() <= reach * (BOUND[kind] * 1.001 + rounding) + 1e-9).all()


@settings(max_examples=100)
@given(KINDS, DTYPES, st.lists(four, min_size=1, max_size=5))
def test_writing_what_was_read_changes_no_byte(kind, dtype, rows):
    store, _ = written(kind, dtype, torch.tensor(rows))
    slots = torch.arange(1, len(rows) + 1)
    k, v = store.read(1, slots[None])
    before = store.values[1].view(torch.uint8).clone(), store.reaches[1].clone()
    store.write(1, slots, k[0], v[0])
    again = store.read(1, slots[None])
    assert torch.equal(again[0], k) and torch.equal(again[1], v)
    assert torch.equal(store.reaches[1][1:], before[1][1:])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_of_zeros_constants_and_tiny_numbers(kind):
    rows = torch.tensor([[0.0] * 4, [3.0] * 4, [1e-42] * 4, [-2.5] * 4, [1e-30, 0, 0, -1e-30]])
    store, _ = written(kind, torch.float32, rows)
    back, _ = store.read(1, torch.arange(1, 6)[None])
    assert torch.isfinite(store.reaches[1][1:]).all()
    torch.testing.assert_close(back[0, :, 0], rows, rtol=1e-6, atol=1e-40)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_one_large_value_does_not_reach_other_tokens_or_heads(kind):
    store = QuantisedKVStore.allocate(kind, CONFIG, 4, torch.float32)
    k = torch.rand(2, CONFIG.num_kv_heads, 4)
    alone = k.clone()
    k[0, 0, 2] = 1e6
    store.write(0, torch.tensor([1, 2]), k, k)
    with_it, _ = store.read(0, torch.tensor([[1, 2]]))
    store.write(0, torch.tensor([1, 2]), alone, alone)
    without, _ = store.read(0, torch.tensor([[1, 2]]))
    assert torch.equal(with_it[0, 1], without[0, 1]) and torch.equal(with_it[0, 0, 1], without[0, 0, 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_row_that_is_not_finite_comes_back_as_nan_and_no_other_row_notices(kind, dtype, bad):
    store = QuantisedKVStore.allocate(kind, CONFIG, 4, dtype)
    k = torch.rand(2, CONFIG.num_kv_heads, 4).to(dtype)
    spoilt = k.clone()
    spoilt[0, 1, 2] = bad
    store.write(0, torch.tensor([1, 2]), spoilt, k)
    got, v = store.read(0, torch.tensor([[1, 2]]))
    assert got[0, 0, 1].isnan().all(), "a fault must not come back as a plausible number"
    store.write(0, torch.tensor([1, 2]), k, k)
    clean, _ = store.read(0, torch.tensor([[1, 2]]))
    assert torch.equal(got[0, 0, 0], clean[0, 0, 0]) and torch.equal(got[0, 1], clean[0, 1]) and torch.isfinite(v).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_largest_numbers_of_a_dtype_do_not_overflow(kind, dtype):
    most = torch.finfo(dtype).max
    store, k = written(kind, dtype, torch.tensor([[most, -most, most / 2, 1.0], [most] * 4]))
    back, _ = store.read(1, torch.arange(1, 3)[None])
    assert torch.isfinite(back).all() and torch.equal(back[0, 1], k[1]) and torch.equal(back[0, 0, :, :2], k[0, :, :2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_bytes_per_token_are_those_of_every_tensor_of_the_store(kind, dtype):
    store = QuantisedKVStore.allocate(kind, CONFIG, 12, dtype)
    held = sum(t.nbytes for t in (*store.values, *store.reaches))
    assert store.bytes_per_token * 12 == held
    assert store.bytes_per_token == CONFIG.kv_bytes_per_token(bytes_per_element(kind, dtype, CONFIG.head_dim))
    one = QuantisedKVStore.allocate(kind, CONFIG, 12, dtype, shared=True)
    assert one.bytes_per_token * CONFIG.num_layers == store.bytes_per_token


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_blocks_travel_and_are_copied_without_a_change(kind, dtype):
    store = QuantisedKVStore.allocate(kind, CONFIG, 16, dtype)
    noise = torch.randn(2, 16, 2, CONFIG.num_kv_heads, CONFIG.head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    for layer in range(2):
        store.write(layer, torch.arange(16), noise[layer, :, 0], noise[layer, :, 1])
    io = BlockIO(store, 2, 4)  # overwrites the last block to see whether it may be used
    kept = [store.read(layer, torch.arange(4, 8)[None]) for layer in range(2)]
    content = io.get([1])
    io.put([2], content)
    store.copy(torch.arange(4, 8), torch.arange(12, 16))
    for layer in range(2):
        for first in (8, 12):
            k, v = store.read(layer, torch.arange(first, first + 4)[None])
            assert torch.equal(k, kept[layer][0]) and torch.equal(v, kept[layer][1])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_poisoned_slots_are_nan_and_others_are_not(kind):
    store, _ = written(kind, torch.float32, torch.ones(5, 4))
    store.write(0, torch.arange(6), *[torch.ones(6, CONFIG.num_kv_heads, 4)] * 2)
    store.poison(torch.tensor([2, 5]))
    for layer in range(2):
        k, v = store.read(layer, torch.tensor([[1, 2, 3, 4, 5]]))
        bad = torch.tensor([False, True, False, False, True])
        assert torch.equal(k.isnan().flatten(2).all(-1)[0], bad) and torch.equal(v.isnan().flatten(2).any(-1)[0], bad)
    assert torch.isfinite(torch.stack(store.read(1, torch.zeros(1, 1, dtype=torch.int64)))).all(), "what padding reads"
