"""Every kernel on a real GPU, in the precisions it ships with, against float64 on the same numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.config import ModelConfig
from minillm.model.layers import PLAIN, rope_table

DTYPES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 700), (3, 130), (64, 64), (129, 129), (77, 300)]


def config_of(heads: int, kv_heads: int, dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        max_position=4096,
    )  # fmt: skip


def batch_of(lengths: list[tuple[int, int]], device: torch.device, block_size: int = 16) -> tuple[ForwardBatch, int]:
    """Rows with blocks dealt out in a shuffled order, and the slots that they need."""
    need = [-(-kv // block_size) for _, kv in lengths]
    blocks = (torch.randperm(sum(need)) + 1).tolist()
    rows = []
    for (q_len, kv_len), n in zip(lengths, need, strict=True):
        rows.append(Row([0] * q_len, kv_len - q_len, [blocks.pop() for _ in range(n)]))
    return ForwardBatch.build(rows, block_size, device=device), (sum(need) + 1) * block_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, dim", [(9, 3, 64), (32, 8, 128), (10, 2, 80), (7, 1, 96), (4, 4, 192), (16, 2, 256)])
@pytest.mark.parametrize("window, sinks", [(None, 0), (40, 0), (40, 4)])
def test_attention(gpu, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None, sinks: int) -> None:
    from minillm.attention.triton_backend import TritonAttention

    config = config_of(heads, kv_heads, dim)
    batch, slots = batch_of(LENGTHS, gpu)
    kv = torch.randn(slots, 2, kv_heads, dim, device=gpu).to(dtype)
    q = torch.randn(batch.num_tokens, heads, dim, device=gpu).to(dtype)
    exact = TorchAttention(window, sinks)
    expected = exact.forward(q.double(), 0, PlainKVStore([kv.double()]), exact.plan(batch, torch.float64))
    backend = TritonAttention(config, dtype, gpu, window, sinks)
    got = backend.forward(q, 0, PlainKVStore([kv]), backend.plan(batch, dtype))
    torch.testing.assert_close(got.double(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])


def test_a_slot_beyond_two_to_the_31_is_read(gpu: torch.device) -> None:
    from minillm.attention.triton_backend import TritonAttention

    config, block_size = config_of(8, 8, 128), 16
    blocks = 2**31 // (block_size * 2 * 8 * 128) + 4
    if torch.cuda.mem_get_info()[0] < 2 * blocks * block_size * 2 * 8 * 128 * 1.2:
        pytest.skip("less than 5 GB of GPU memory are free")
    kv = torch.zeros(blocks * block_size, 2, 8, 128, dtype=torch.float16, device=gpu)
    kv[-32:] = torch.randn(32, 2, 8, 128, device=gpu).half()
    batch = ForwardBatch.build(
        [Row([0], 31, [blocks - 1, blocks - 2]), Row([0] * 32, 0, [blocks - 2, blocks - 1])], 16, device=gpu
    )
    q = torch.randn(33, 8, 128, device=gpu).half()
    exact, backend = TorchAttention(), TritonAttention(config, torch.float16, gpu)
    expected = exact.forward(q, 0, PlainKVStore([kv]), exact.plan(batch, torch.float16))
    got = backend.forward(q, 0, PlainKVStore([kv]), backend.plan(batch, torch.float16))
    torch.testing.assert_close(got, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_operators(gpu: torch.device, dtype: torch.dtype) -> None:
    from minillm.kernels.fused import FusedOperators

    fused, close = FusedOperators(), {"rtol": 2 * DTYPES[dtype], "atol": 2 * DTYPES[dtype]}
    for width in (576, 4096, 5120):
        x, delta, weight = (torch.randn(*shape, device=gpu).to(dtype) for shape in ((33, width), (33, width), (width,)))
        for got, expected in zip(fused.add_norm(x, delta, weight, 1e-5), PLAIN.add_norm(x, delta, weight, 1e-5), strict=True):
            torch.testing.assert_close(got, expected, **close)
        gate_up = torch.randn(33, 2 * width, device=gpu).to(dtype)
        torch.testing.assert_close(fused.swiglu(gate_up), PLAIN.swiglu(gate_up), **close)
    config = config_of(9, 3, 80)
    heads, positions = torch.randn(33, 15, 80, device=gpu).to(dtype), torch.arange(33, device=gpu) * 7
    cos, sin = rope_table(config, dtype).to(gpu)[positions].unsqueeze(2).unbind(1)
    slots = torch.randperm(40, device=gpu)[:33]
    stores = [PlainKVStore([torch.zeros(40, 2, 3, 80, dtype=dtype, device=gpu)]) for _ in range(2)]
    q = [
        operators.rotate_and_store(heads[:, :12], heads[:, 12:], cos, sin, slots, store, 0)
        for operators, store in zip((PLAIN, fused), stores, strict=True)
    ]
    torch.testing.assert_close(q[1], q[0], **close)
    torch.testing.assert_close(stores[1].layers[0], stores[0].layers[0], **close)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64, 65])
@pytest.mark.parametrize("k, n, group", [(576, 192, 32), (4096, 1024, 128), (960, 320, 96), (512, 64, -1)])
def test_four_bit_products(gpu: torch.device, dtype: torch.dtype, rows: int, k: int, n: int, group: int) -> None:
    from minillm.kernels.matmul import dequantise, w4a16_matmul

    groups = 1 if group == -1 else k // group
    words = [torch.randint(-(2**31), 2**31, (length, n // 8), device=gpu, dtype=torch.int64).int() for length in (k, groups)]
    scales = (torch.rand(groups, n, device=gpu) * 0.01 + 0.001).to(dtype)
    x, bias = torch.randn(rows, k, device=gpu).to(dtype), torch.randn(n, device=gpu).to(dtype)
    shift = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=gpu)
    codes, zeros = ((w[:, :, None] >> shift & 15).flatten(1) for w in words)
    length = k // groups
    dense = (codes - zeros.repeat_interleave(length, 0)).double() * scales.double().repeat_interleave(length, 0)
    torch.testing.assert_close(dequantise(words[0], scales, words[1], group).double(), dense, rtol=DTYPES[dtype], atol=1e-3)
    got = w4a16_matmul(x, words[0], scales, words[1], group, bias).double()
    expected = x.double() @ dense + bias.double()
    torch.testing.assert_close(got, expected, rtol=2 * DTYPES[dtype], atol=DTYPES[dtype] * math.sqrt(k) / 4)


def test_scores_near_1e5_give_no_nan(gpu: torch.device) -> None:
    from minillm.attention.triton_backend import TritonAttention

    config = config_of(4, 2, 64)
    batch, slots = batch_of([(1, 100), (40, 70)], gpu)
    kv: Tensor = torch.randn(slots, 2, 2, 64, device=gpu).half() * 200
    q = torch.randn(batch.num_tokens, 4, 64, device=gpu).half() * 200
    backend = TritonAttention(config, torch.float16, gpu)
    assert backend.forward(q, 0, PlainKVStore([kv]), backend.plan(batch, torch.float16)).isfinite().all()


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 513])
@pytest.mark.parametrize("k, n", [(576, 192), (4096, 1024), (100, 37)])
def test_eight_bit_products_are_exact(gpu: torch.device, rows: int, k: int, n: int) -> None:
    from minillm.kernels.int8_matmul import int8_matmul

    x, w = (torch.randint(-127, 128, (size, k), device=gpu, dtype=torch.int8) for size in (rows, n))
    channel = torch.rand(n, device=gpu) + 0.5
    expected = (x.double() @ w.double().t()).float() * channel
    assert torch.equal(int8_matmul(x, w, channel, torch.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_rounded_as_on_the_cpu(gpu: torch.device, dtype: torch.dtype) -> None:
    from minillm.quant.w8a8 import quantise_rows

    x = torch.randn(33, 1500).to(dtype)
    x[4], x[5] = 0, float("nan")
    fine = [n for n in range(33) if n != 5]
    (got, scales), (expected, theirs) = quantise_rows(x.to(gpu)), quantise_rows(x)
    assert torch.equal(scales.cpu()[fine], theirs[fine]) and not scales[5].isfinite()
    assert (got.cpu()[fine].int() - expected[fine].int()).abs().max() <= 1
