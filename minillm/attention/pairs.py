"""Many queries of one row, each with blocks of its own: the queries that chose a block are brought to it, and what they find in
different blocks is put together afterwards by its softmax weights (as in MoBA, Lu et al. 2025, arXiv 2502.13189)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.attention.indexer import Indexer, best_blocks
from minillm.attention.window import SparseView
from minillm.cache.summaries import SummarisedStore
from minillm.engine.batch import slots_at, to_device
from minillm.model.config import ModelConfig
from minillm.perf.work import Work

TOGETHER = 32
"""Queries that are computed against one block in one small matrix product."""
PAIRS = 16_384
"""Pairs of a query and a block in one group, at most: what they find is kept until all is there."""
SCORES = 2**20
"""Logits that are held at once."""


@dataclass(frozen=True)
class PairGroup:
    """Consecutive queries of one row. Pair i * width + j is query i's j-th block: first the chosen ones, then the local ones.

    blocks [1, candidates]: physical blocks that may be chosen; candidates [1, queries, candidates] bool. pairs [chunks,
    TOGETHER]: pairs with a local block, by block, padded with the number after the last; slots [chunks, block_size]: those of
    that block, the null slot behind the row's end; hidden [chunks, TOGETHER, block_size] bool. absent: pairs that there are not.
    num_local: those with a local block.
    """

    tokens: slice
    positions: np.ndarray
    width: int
    blocks: Tensor
    candidates: Tensor
    pairs: Tensor
    slots: Tensor
    hidden: Tensor
    absent: Tensor
    num_local: int

    @staticmethod
    def most_queries(view: SparseView) -> int:
        return max(1, PAIRS // (view.blocks + view.most_local))

    @classmethod
    def of(
        cls, view: SparseView, table: Sequence[int], kv_len: int, first_token: int, positions: np.ndarray,
        device: torch.device,
    ) -> PairGroup:  # fmt: skip
        """positions: those of the queries, ascending; first_token: where the first one stands among all tokens."""
        n, size, width = len(positions), view.block_size, view.blocks + view.most_local
        first = view.first_local(positions)
        block = first[:, None] + np.arange(view.most_local)  # of each local pair
        pair = np.arange(n)[:, None] * width + view.blocks + np.arange(view.most_local)
        there = block <= positions[:, None] // size
        pairs, of_chunk = in_chunks(torch.from_numpy(block[there]), torch.from_numpy(pair[there]), n * width)
        keys = of_chunk.numpy()[:, None] * size + np.arange(size)
        slots = np.where(keys < kv_len, slots_at(table, size, np.minimum(keys, kv_len - 1)), 0)
        query = positions[np.minimum(pairs.numpy() // width, n - 1)]
        blocks = np.asarray(table[: first.max()], dtype=np.int64)
        return cls(
            slice(first_token, first_token + n), positions, width, to_device(blocks[None], device),
            to_device((np.arange(len(blocks)) < first[:, None])[None], device), pairs.to(device), to_device(slots, device),
            to_device(keys[:, None, :] > query[:, :, None], device), to_device(pair[~there], device), int(there.sum()),
        )  # fmt: skip

    def choose(self, q: Tensor, layer: int, store: SummarisedStore, indexer: Indexer, k: int) -> Tensor:
        """q [queries, heads, head_dim] → [queries, k], numbers of blocks in the row's table."""
        scores = indexer.score(q.unsqueeze(0), store.summaries(layer, self.blocks))
        return best_blocks(scores, self.candidates, k).squeeze(0)

    def attend(self, q: Tensor, layer: int, store: SummarisedStore, chosen: Tensor) -> Tensor:
        """q [queries, heads, head_dim], chosen [queries, k] → [queries, heads, head_dim]."""
        (n, k), heads = chosen.shape, q.shape[1]
        numbers = torch.arange(n, device=q.device).unsqueeze(1) * self.width + torch.arange(k, device=q.device)
        pairs, of_chunk = in_chunks(chosen.flatten(), numbers.flatten(), n * self.width)
        slots = self.blocks[0, of_chunk].unsqueeze(1) * store.block_size + store.offsets
        exact = torch.promote_types(q.dtype, torch.float32)
        found = Found.empty(n * self.width + 1, heads, q.shape[2], exact, q.device)
        found.forget(self.absent)
        scaled = q.to(exact) / math.sqrt(q.shape[2])
        slab = max(1, SCORES // (TOGETHER * heads * store.block_size))
        for some, at, hidden in ((pairs, slots, None), (self.pairs, self.slots, self.hidden)):
            for i in range(0, len(some), slab):
                part = slice(i, i + slab)
                keys, values = store.read(layer, at[part])
                queries = scaled[(some[part] // self.width).clamp(max=n - 1)]
                mask = hidden[part] if hidden is not None else None
                found.put(some[part], *in_one_block(queries, keys.to(exact), values.to(exact), mask))
        return found.together(n).to(q.dtype)

    def work(self, view: SparseView, config: ModelConfig, element: int) -> Work:
        """But for FLOPs. Of keys, every block up to the last query's is counted, once: which of them are chosen by nobody is not
        known before."""
        num_pairs, size = len(self.positions) * view.blocks + self.num_local, view.block_size
        copies = 2 * (num_pairs // TOGETHER) * size * config.kv_size  # at least: K and V, for so many queries at a time
        found = num_pairs * config.q_size  # a query's copy is written and read; what it found written, moved and summed
        logits = num_pairs * config.num_heads * size
        return Work(
            kv_read_bytes=2 * int(self.positions[-1] + 1) * config.kv_size * element,
            activation_bytes=(2 * copies + 6 * found + 4 * logits) * max(element, 4),
            launches=40,
        )


@dataclass(frozen=True)
class Found:
    """What each pair found: the largest logit [pairs, heads], the sum of exp(logit - largest), and that of values so weighted
    [pairs, heads, head_dim]."""

    largest: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def empty(cls, pairs: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Found:
        numbers = (torch.empty(pairs, heads, *rest, dtype=dtype, device=device) for rest in ((), (), (head_dim,)))
        return cls(*numbers)

    def forget(self, pairs: Tensor) -> None:
        """These pairs weigh nothing."""
        self.largest[pairs], self.total[pairs], self.values[pairs] = -math.inf, 0.0, 0.0

    def put(self, pairs: Tensor, largest: Tensor, total: Tensor, values: Tensor) -> None:
        at = pairs.flatten()
        for kept, new in ((self.largest, largest), (self.total, total), (self.values, values)):
            kept[at] = new.flatten(0, 1)

    def together(self, queries: int) -> Tensor:
        """[queries, heads, head_dim]. The last pair is the one that padding writes to."""
        largest, total, values = (x[:-1].unflatten(0, (queries, -1)) for x in (self.largest, self.total, self.values))
        weight = (largest - largest.amax(1, keepdim=True)).exp_()
        return values.mul_(weight.unsqueeze(-1)).sum(1) / (weight * total).sum(1).unsqueeze(-1)


def in_one_block(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q [chunks, queries, heads, head_dim], scaled; k, v [chunks, block_size, kv_heads, head_dim]; hidden [chunks, queries,
    block_size]. Returns largest and total [chunks, queries, heads], values [chunks, queries, heads, head_dim], see Found."""
    (chunks, queries, _, dim), kv_heads = q.shape, k.shape[2]
    grouped = q.unflatten(2, (kv_heads, -1)).transpose(1, 2).reshape(chunks, kv_heads, -1, dim)
    logits = grouped @ k.permute(0, 2, 3, 1)  # [chunks, kv_heads, queries * group, block_size]
    if hidden is not None:
        logits.unflatten(2, (queries, -1)).masked_fill_(hidden[:, None, :, None], -math.inf)
    largest = logits.amax(-1)
    weights = logits.sub_(largest.unsqueeze(-1)).exp_()

    def by_query(x: Tensor) -> Tensor:
        return x.unflatten(2, (queries, -1)).transpose(1, 2).flatten(2, 3)

    return by_query(largest), by_query(weights.sum(-1)), by_query(weights @ v.transpose(1, 2))


def in_chunks(blocks: Tensor, pairs: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Pairs of the same block together, up to TOGETHER at a time. blocks, pairs [pairs] → pairs [chunks, TOGETHER], filled up
    with ``padding``, and the block of each chunk [chunks]."""
    order = blocks.argsort(stable=True)
    block, counts = torch.unique_consecutive(blocks[order], return_counts=True)
    chunks = (counts + TOGETHER - 1) // TOGETHER
    place = torch.arange(len(pairs), device=pairs.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    place += (chunks.cumsum(0) - chunks).repeat_interleave(counts) * TOGETHER
    out = torch.full((int(chunks.sum()) * TOGETHER,), padding, dtype=torch.int64, device=pairs.device)
    out[place] = pairs[order]
    return out.view(-1, TOGETHER), block.repeat_interleave(chunks)
