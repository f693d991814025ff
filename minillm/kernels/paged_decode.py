"""Decode attention, split over the keys (flash-decoding: Dao, Haziza, Massa and Sizov 2023; the partial softmax of Milakov and
Gimelshein 2018, arXiv 1805.02867).

One decoding row has one query: cut by queries there is one program per row and KV head, and a GPU with a hundred processors idles
while one of them walks over all keys. So the keys are cut as well. Each part leaves its own sum, Σ exp(s − m) v / Σ exp(s − m),
and log Σ exp(s); a second kernel merges them with weights exp(logsum − largest logsum), exactly, whatever the number of parts.
With one part there is nothing to merge and the first kernel writes the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.flash_prefill import LOG2E, Tile, precision_of
from minillm.kernels.tiles import attend, load_queries
from minillm.perf.work import Work


@triton.jit
def paged_decode_kernel(
    q_ptr, kv_ptr, out_ptr, parts_ptr, logsums_ptr, tables_ptr, q_starts_ptr, q_lens_ptr, kv_lens_ptr, tile_rows_ptr,
    scale_log2, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_slot, stride_v, stride_kv_head,
    stride_table, num_splits,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tile_rows_ptr + tile).to(tl.int64)
    q_len, kv_len = tl.load(q_lens_ptr + row), tl.load(kv_lens_ptr + row)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    valid = m < q_len * GROUP
    query = tl.minimum(m // GROUP, q_len - 1)
    token, head = tl.load(q_starts_ptr + row) + query, kv_head * GROUP + m % GROUP
    position = kv_len - q_len + query
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else tl.zeros_like(position)
    kv_ptr += kv_head * stride_kv_head
    table_ptr = tables_ptr + row * stride_table

    q = load_queries(q_ptr, token, head, valid, stride_q_token, stride_q_head, HEAD_DIM, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    low = tl.min(first, 0)
    share = tl.cdiv(tl.cdiv(kv_len - low, num_splits), BLOCK_N) * BLOCK_N
    start = low + split * share
    stop = tl.minimum(start + share, kv_len)
    if SINKS > 0:
        if split == 0:
            acc, top, total = attend(
                q, acc, top, total, 0, tl.minimum(low, SINKS), position, first, kv_ptr, table_ptr, scale_log2, stride_slot,
                stride_v, True, SINKS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION,
            )  # fmt: skip
    acc, top, total = attend(
        q, acc, top, total, start, stop, position, first, kv_ptr, table_ptr, scale_log2, stride_slot, stride_v,
        True, SINKS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        part = ((split * tl.num_programs(0) + tile).to(tl.int64) * tl.num_programs(1) + kv_head) * BLOCK_M + m
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + d[None, :], out, mask=valid[:, None] & (d[None, :] < HEAD_DIM))
        logsum = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(logsums_ptr + part, logsum, mask=valid)
    else:
        at = token.to(tl.int64) * stride_out_token + head * stride_out_head
        tl.store(
            out_ptr + at[:, None] + d[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=valid[:, None] & (d[None, :] < HEAD_DIM),
        )


@triton.jit
def merge_kernel(
    out_ptr, parts_ptr, logsums_ptr, q_starts_ptr, q_lens_ptr, tile_rows_ptr, stride_out_token, stride_out_head, num_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program per tile, KV head and packed row; parts are folded in one after another, as keys were."""
    tile, kv_head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tile_rows_ptr + tile)
    d = tl.arange(0, BLOCK_D)
    if m < tl.load(q_lens_ptr + row) * GROUP:
        acc = tl.zeros([BLOCK_D], tl.float32)
        top = float("-inf")
        total = 0.0
        for split in range(0, num_splits):
            part = ((split * tl.num_programs(0) + tile).to(tl.int64) * tl.num_programs(1) + kv_head) * BLOCK_M + m
            logsum = tl.load(logsums_ptr + part)
            new_top = tl.maximum(top, logsum)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight, shrink = tl.exp2(logsum - shift), tl.exp2(top - shift)
            acc = acc * shrink + weight * tl.load(parts_ptr + part * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
            total = total * shrink + weight
            top = new_top
        token = (tl.load(q_starts_ptr + row) + m // GROUP).to(tl.int64)
        at = token * stride_out_token + (kv_head * GROUP + m % GROUP) * stride_out_head
        out = acc / tl.where(total > 0, total, 1.0)
        tl.store(out_ptr + at + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def decode_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """16 packed rows are the fewest that a tensor core multiplies; a group of up to 16 heads fits."""
    if dtype == torch.float32:
        return Tile(16, 32, 4, 1) if head_dim <= 128 else Tile(16, 16, 4, 1)
    return Tile(16, 64, 4, 3) if head_dim <= 128 else Tile(16, 32, 4, 2)


def choose_splits(tiles: int, kv_heads: int, longest: int, processors: int) -> int:
    """Parts per row: enough programs to fill the processors twice, none with fewer than 256 keys."""
    if tiles == 0:
        return 1
    return max(1, min(-(-2 * processors // (tiles * kv_heads)), longest // 256, 64))


def paged_decode(
    q: Tensor, kv: Tensor, tables: Tensor, q_starts: Tensor, q_lens: Tensor, kv_lens: Tensor, tile_rows: Tensor, out: Tensor, *,
    block_size: int, tile: Tile, num_splits: int, window: int | None = None, sinks: int = 0,
) -> None:  # fmt: skip
    """Attention of the rows that tile_rows [tiles] int32 names, with at most tile.m / group queries each; see ``flash_prefill``
    for the rest. num_splits: parts that a row's keys are cut into."""
    heads, head_dim = q.shape[1:]
    kv_heads, group, tiles = kv.shape[2], heads // kv.shape[2], len(tile_rows)
    if tiles == 0:
        return
    split = num_splits > 1
    block_d = max(16, triton.next_power_of_2(head_dim))
    parts_shape = (num_splits, tiles, kv_heads, tile.m) if split else (1,)
    logsums = torch.empty(parts_shape, dtype=torch.float32, device=q.device)
    parts = torch.empty((*parts_shape, head_dim) if split else (1,), dtype=torch.float32, device=q.device)
    paged_decode_kernel[(tiles, kv_heads, num_splits)](
        q, kv, out, parts, logsums, tables, q_starts, q_lens, kv_lens, tile_rows, LOG2E / head_dim**0.5,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), tables.stride(0),
        num_splits, WINDOW=window or 0, SINKS=sinks if window else 0, SPLIT=split, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, BLOCK_D=block_d, BLOCK_M=tile.m, BLOCK_N=tile.n, PRECISION=precision_of(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if split:
        merge_kernel[(tiles, kv_heads, tile.m)](
            out, parts, logsums, q_starts, q_lens, tile_rows, out.stride(0), out.stride(1), num_splits,
            GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=tile.m, num_warps=1,
        )  # fmt: skip


def work(
    pairs: int, keys: int, tokens: int, heads: int, kv_heads: int, head_dim: int, element: int, dtype: str, num_splits: int = 1
) -> Work:
    """pairs: query-key pairs seen. keys: keys read, summed over rows, once each. Parts are float32, written and read once."""
    results = tokens * heads
    parts = 2 * num_splits * results * (head_dim + 1) * 4 if num_splits > 1 else 0
    return Work(
        flops={dtype: 4 * pairs * heads * head_dim},
        kv_read_bytes=2 * keys * kv_heads * head_dim * element,
        activation_bytes=2 * results * head_dim * element + parts,
        launches=1 + (num_splits > 1),
    )
