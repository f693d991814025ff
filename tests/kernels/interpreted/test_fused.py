"""Fused operators against the plain ones of the model."""

from __future__ import annotations

import pytest
import torch

from minillm.cache.kv_store import PlainKVStore
from minillm.kernels.fused import FusedOperators, rms_norm, rope_store, swiglu
from minillm.model.config import ModelConfig
from minillm.model.layers import PLAIN, rope_table

FUSED = FusedOperators()
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def config_of(heads: int, kv_heads: int, dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        max_position=64,
    )  # fmt: skip


@pytest.mark.parametrize("width", [1, 80, 576, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_with_and_without_a_residual_is_the_plain_one(width: int, dtype: torch.dtype) -> None:
    x, delta, weight = randn(3, width, dtype=dtype), randn(3, width, dtype=dtype, seed=1), randn(width, dtype=dtype, seed=2)
    before, close = x.clone(), {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(FUSED.norm(x, weight, 1e-5), PLAIN.norm(x, weight, 1e-5), **close)
    for got, expected in zip(FUSED.add_norm(x, delta, weight, 1e-5), PLAIN.add_norm(x, delta, weight, 1e-5), strict=True):
        torch.testing.assert_close(got, expected, **close)
    assert torch.equal(x, before)


def test_norm_takes_heads_out_of_a_wider_tensor_and_no_rows() -> None:
    wide, weight = randn(4, 9, 16), randn(16, seed=1)
    torch.testing.assert_close(FUSED.norm(wide[:, 2:5], weight, 1e-6), PLAIN.norm(wide[:, 2:5], weight, 1e-6))
    across = wide.transpose(0, 2)
    torch.testing.assert_close(FUSED.norm(across, weight[:4], 1e-6), PLAIN.norm(across, weight[:4], 1e-6))
    assert rms_norm(wide[:0], weight, 1e-6)[1].shape == (0, 9, 16)


def test_norm_of_zeros_and_of_huge_values_is_finite() -> None:
    weight = torch.ones(80)
    assert (FUSED.norm(torch.zeros(2, 80), weight, 1e-6) == 0).all()
    torch.testing.assert_close(FUSED.norm(torch.full((1, 80), 1e15), weight, 1e-6), torch.ones(1, 80))


@pytest.mark.parametrize("heads, kv_heads, dim", [(3, 1, 16), (9, 3, 64), (5, 5, 80), (7, 1, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotation_and_write_leave_what_the_plain_ones_leave(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    config = config_of(heads, kv_heads, dim)
    qkv, positions = randn(3, heads + 2 * kv_heads, dim, dtype=dtype), torch.tensor([0, 5, 63])
    cos, sin = rope_table(config, dtype)[positions].unsqueeze(2).unbind(1)
    slots, layer = torch.tensor([4, 9, 2]), 1
    stores = [PlainKVStore.allocate(config, 12, dtype) for _ in range(2)]
    for store in stores:
        store.poison(torch.arange(12))
    q = [
        operators.rotate_and_store(qkv[:, :-kv_heads], qkv[:, -kv_heads:], cos, sin, slots, store, layer)
        for operators, store in zip((PLAIN, FUSED), stores, strict=True)
    ]
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(q[1], q[0], **close)
    for i in (0, 1):
        torch.testing.assert_close(stores[1].layers[i], stores[0].layers[i], equal_nan=True, **close)


def test_a_negative_slot_writes_nothing_and_other_slots_stay() -> None:
    config = config_of(2, 1, 16)
    memory, qkv = torch.full((7, 2, 1, 16), 7.0), randn(2, 4, 16)
    kv = memory[1:]  # slot -1 lies in front of it
    cos, sin = rope_table(config, torch.float32)[:2].unsqueeze(2).unbind(1)
    rope_store(qkv[:, :3], qkv[:, 3:], cos, sin, torch.tensor([-1, 3]), kv)
    changed = (memory != 7).flatten(1).any(1)
    assert changed.tolist() == [False, False, False, False, True, False, False]


def test_another_store_is_written_in_its_own_way() -> None:
    class Other(PlainKVStore):
        def write(self, layer, slots, k, v):
            self.seen = slots.tolist()

    config = config_of(2, 1, 16)
    store, qkv = Other([torch.full((6, 2, 1, 16), 7.0)]), randn(2, 4, 16)
    cos, sin = rope_table(config, torch.float32)[:2].unsqueeze(2).unbind(1)
    FUSED.rotate_and_store(qkv[:, :3], qkv[:, 3:], cos, sin, torch.tensor([1, 3]), store, 0)
    assert store.seen == [1, 3] and (store.layers[0] == 7).all()


@pytest.mark.parametrize("rows, width", [(1, 1), (2, 1023), (1, 1025), (3, 80), (0, 8)])
def test_gated_activation_is_the_plain_one(rows: int, width: int) -> None:
    gate_up = randn(rows, 2 * width) * 5
    torch.testing.assert_close(swiglu(gate_up), PLAIN.swiglu(gate_up), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(swiglu(gate_up.half()), PLAIN.swiglu(gate_up.half()), rtol=4e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's: the kernel means it
def test_gated_activation_of_extreme_gates_is_zero_or_the_product() -> None:
    assert swiglu(torch.tensor([[-1e5, 1e5, 3.0, 3.0]])).tolist() == [[0.0, 3e5]]


def test_fusing_moves_fewer_bytes_in_fewer_launches() -> None:
    config = config_of(9, 3, 64)
    for name, arguments in (("add_norm", (8, 576, 2)), ("rotate_and_store", (8, config, 2)), ("swiglu", (8, 1536, 2))):
        plain, fused = (getattr(o, f"{name}_work")(*arguments) for o in (PLAIN, FUSED))
        assert fused.launches == 1 < plain.launches and fused.activation_bytes < plain.activation_bytes
        assert (fused.weight_bytes, fused.kv_write_bytes) == (plain.weight_bytes, plain.kv_write_bytes)
