"""Prefill attention in tiles over the paged cache (FlashAttention: Dao et al. 2022, arXiv 2205.14135; the loop order with the
queries outside is FlashAttention-2's, Dao 2023, arXiv 2307.08691).

Attention is softmax(QKᵀ/√d) V. Written out, the n × n scores and weights go to memory and come back. But a softmax can be summed
in pieces: with m the largest score so far, keep Σ exp(s − m) v and Σ exp(s − m), and multiply both by exp(m − m′) when a larger
m′ turns up. So one program holds BLOCK_M queries in registers, walks over their keys BLOCK_N at a time and writes only the
result: O(n · d) bytes for each pass over K and V instead of O(n²). exp(x) is taken as 2^(x · log₂e), which the hardware has.

Three runs over the keys: those at the left edge of a window and those on the diagonal need a mask, those between do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.tiles import attend, load_queries
from minillm.perf.work import Work

LOG2E = 1.4426950408889634


@triton.jit
def flash_prefill_kernel(
    q_ptr, kv_ptr, out_ptr, tables_ptr, q_starts_ptr, q_lens_ptr, kv_lens_ptr, tile_rows_ptr, tile_firsts_ptr,
    scale_log2, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_slot, stride_v, stride_kv_head,
    stride_table,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows_ptr + tile).to(tl.int64)
    q_len, kv_len = tl.load(q_lens_ptr + row), tl.load(kv_lens_ptr + row)
    packed = tl.load(tile_firsts_ptr + tile) + tl.arange(0, BLOCK_M)
    valid = packed < q_len * GROUP
    query = tl.minimum(packed // GROUP, q_len - 1)  # rows beyond the end repeat the last query and are not stored
    token, head = tl.load(q_starts_ptr + row) + query, kv_head * GROUP + packed % GROUP
    position = kv_len - q_len + query  # bottom-right: the last query stands at the last key
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else tl.zeros_like(position)
    kv_ptr += kv_head * stride_kv_head
    table_ptr = tables_ptr + row * stride_table

    q = load_queries(q_ptr, token, head, valid, stride_q_token, stride_q_head, HEAD_DIM, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    low, high = tl.min(first, 0), tl.max(position, 0) + 1
    # keys that every query of the tile sees, in whole steps of BLOCK_N from where the masked ones on the left end
    start = low
    if SINKS > 0:
        acc, top, total = attend(
            q, acc, top, total, 0, tl.minimum(low, SINKS), position, first, kv_ptr, table_ptr, scale_log2, stride_slot, stride_v,
            True, SINKS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
    if WINDOW > 0:
        start = tl.minimum(low + tl.cdiv(tl.max(first, 0) - low, BLOCK_N) * BLOCK_N, high)
        acc, top, total = attend(
            q, acc, top, total, low, start, position, first, kv_ptr, table_ptr, scale_log2, stride_slot, stride_v,
            True, SINKS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
    stop = start + tl.maximum(tl.min(position, 0) + 1 - start, 0) // BLOCK_N * BLOCK_N
    acc, top, total = attend(
        q, acc, top, total, start, stop, position, first, kv_ptr, table_ptr, scale_log2, stride_slot, stride_v,
        False, 0, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc, top, total = attend(
        q, acc, top, total, stop, high, position, first, kv_ptr, table_ptr, scale_log2, stride_slot, stride_v,
        True, SINKS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip

    out = acc / tl.where(total > 0, total, 1.0)[:, None]  # a query that sees nothing gives 0
    d = tl.arange(0, BLOCK_D)
    at = token.to(tl.int64) * stride_out_token + head * stride_out_head
    tl.store(
        out_ptr + at[:, None] + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=valid[:, None] & (d[None, :] < HEAD_DIM),
    )


@dataclass(frozen=True)
class Tile:
    """BLOCK_M packed query rows by BLOCK_N keys, and how the compiler spreads them."""

    m: int
    n: int
    warps: int
    stages: int


def prefill_tile(head_dim: int, dtype: torch.dtype, wide: bool = False) -> Tile:
    """What compiles without a spill (`minillm kernels` shows it). wide: the matrix units read their operands from shared
    memory, as NVIDIA's do since Hopper (sm_90); elsewhere these take registers from the tile. float32 is not for matrix units:
    small tiles."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1) if head_dim <= 128 else Tile(16, 16, 4, 1)
    if head_dim <= 64:
        return Tile(128, 64, 4, 2) if wide else Tile(64, 64, 4, 2)
    if head_dim <= 128:
        return Tile(128, 64, 8, 2) if wide else Tile(128, 32, 8, 2)
    return Tile(64, 32, 8, 1)


def is_wide(device: torch.device) -> bool:
    """Whether ``prefill_tile`` may choose the wide tiles on this device."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def precision_of(dtype: torch.dtype) -> str:
    """A product of float32 is TF32, ten bits, on a GPU unless it is told otherwise."""
    return "ieee" if dtype == torch.float32 else "tf32"


def flash_prefill(
    q: Tensor, kv: Tensor, tables: Tensor, q_starts: Tensor, q_lens: Tensor, kv_lens: Tensor, tile_rows: Tensor,
    tile_firsts: Tensor, out: Tensor, *, block_size: int, tile: Tile, window: int | None = None, sinks: int = 0,
) -> None:  # fmt: skip
    """Causal attention of ragged queries over paged keys; results go into ``out``.

    q, out [tokens, heads, head_dim], last dimension dense; kv [slots, 2, kv_heads, head_dim]; tables [rows, blocks] int32.
    q_starts, q_lens, kv_lens [rows] int32: where a row's queries start in q, how many they are, and how many keys it has.
    tile_rows, tile_firsts [tiles] int32: the row that a tile belongs to and its first packed row.
    window: a query sees the last so many keys and, with sinks, the first so many of its row.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = kv.shape[2]
    if len(tile_rows) == 0:
        return
    flash_prefill_kernel[(len(tile_rows), kv_heads)](
        q, kv, out, tables, q_starts, q_lens, kv_lens, tile_rows, tile_firsts, LOG2E / head_dim**0.5,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), tables.stride(0),
        WINDOW=window or 0, SINKS=sinks if window else 0, GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_M=tile.m, BLOCK_N=tile.n, PRECISION=precision_of(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def work(pairs: int, keys: int, tokens: int, heads: int, kv_heads: int, head_dim: int, element: int, dtype: str) -> Work:
    """pairs: query-key pairs seen. keys: keys that some query sees, summed over rows. Queries are read and results written once;
    scores never reach memory. ``keys_read_by_tiles`` counts what the tiles of a prompt read again, mostly from the cache."""
    return Work(
        flops={dtype: 4 * pairs * heads * head_dim},
        kv_read_bytes=2 * keys * kv_heads * head_dim * element,
        activation_bytes=2 * tokens * heads * head_dim * element,
        launches=1,
    )


def keys_read_by_tiles(q_len: int, kv_len: int, group: int, tile_m: int) -> int:
    """Keys read by all tiles of one row and KV head without a window: each reads those up to its own last query's."""
    total, offset = 0, kv_len - q_len
    for first in range(0, q_len * group, tile_m):
        last = min(first + tile_m, q_len * group) - 1
        total += offset + last // group + 1
    return total
