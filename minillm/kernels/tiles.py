"""What the two attention kernels share: reading keys and values through a block table, and one step of online softmax.

A tile holds BLOCK_M *packed rows*: the query heads that share a KV head, for consecutive tokens. Packed row r is head r % GROUP
of token r // GROUP, so any group size fills a tile, and a key is read once for all heads that want it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_queries(q_ptr, token, head, valid, stride_token, stride_head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_M, BLOCK_D] queries of packed rows; rows that are not there, and dimensions beyond the head's, are zero."""
    d = tl.arange(0, BLOCK_D)
    at = token.to(tl.int64) * stride_token + head * stride_head
    return tl.load(q_ptr + at[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < HEAD_DIM), other=0.0)


@triton.jit
def attend(
    q, acc, top, total,  # [BLOCK_M, BLOCK_D], the same, [BLOCK_M], [BLOCK_M]
    start, stop, query, first,  # keys start … stop - 1; positions of the queries and of the first key that each sees
    kv_ptr, table_ptr, scale_log2, stride_slot, stride_v,
    MASKED: tl.constexpr, SINKS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys start … stop - 1 into the running softmax, BLOCK_N at a time.

    acc = Σ 2^(s − top) v, total = Σ 2^(s − top), top = the largest score so far: when it grows, both are rescaled (Milakov and
    Gimelshein 2018, arXiv 1805.02867). MASKED: some query may not see some key; without it all see all, and stop − start is a
    multiple of BLOCK_N. Keys that no query of the tile sees must lie outside start … stop: they are not read.
    """
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    for at in range(start, stop, BLOCK_N):
        key = at + n
        if MASKED:
            there = key < stop
            block = tl.load(table_ptr + key // BLOCK_SIZE, mask=there, other=0)
        else:
            block = tl.load(table_ptr + key // BLOCK_SIZE)
        # int64 before the multiplication: slots times a token's bytes passes 2^31 in any large pool
        base = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * stride_slot
        k_at = kv_ptr + base[None, :] + d[:, None]
        v_at = kv_ptr + base[:, None] + stride_v + d[None, :]
        if MASKED:
            # what is not seen may hold anything, NaN too, and 0 · NaN is NaN: it is not loaded
            k = tl.load(k_at, mask=there[None, :] & (d[:, None] < HEAD_DIM), other=0.0)
            v = tl.load(v_at, mask=there[:, None] & (d[None, :] < HEAD_DIM), other=0.0)
        elif BLOCK_D != HEAD_DIM:
            k = tl.load(k_at, mask=d[:, None] < HEAD_DIM, other=0.0)
            v = tl.load(v_at, mask=d[None, :] < HEAD_DIM, other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        s = tl.dot(q, k, input_precision=PRECISION) * scale_log2
        if MASKED:
            seen = (key[None, :] <= query[:, None]) & (key[None, :] >= first[:, None])
            if SINKS > 0:
                seen = seen | ((key[None, :] < SINKS) & (key[None, :] <= query[:, None]))
            s = tl.where(seen & there[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        # a row that has seen nothing yet stays at −inf: subtract 0 there, for −inf − (−inf) is NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total
