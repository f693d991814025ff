"""Sparse attention: each query reads the blocks around it and the few best of those before, as cheap summaries of them say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from minillm.attention.indexer import Indexer, best_blocks
from minillm.attention.pairs import PairGroup
from minillm.attention.torch_backend import RowGroup, TorchAttention, attend, precision_name
from minillm.attention.window import SparseView
from minillm.cache.kv_store import KVStore, recounted
from minillm.cache.summaries import SummarisedStore, summary_shape
from minillm.engine.batch import ForwardBatch, slots_at, to_device
from minillm.model.config import ModelConfig
from minillm.perf.work import Work

FEW = 16
"""A row of up to so many queries gathers each one's keys; a longer one brings the queries of a block to its keys."""


@dataclass(frozen=True)
class Few:
    """Queries that gather their keys, each for itself. tokens [queries]; blocks [queries, candidates] int64, padded with the null
    block; candidates [queries, 1, candidates] bool; local [queries, keys] slots of the local blocks, padded with the null slot;
    mask [queries, 1, 1, keys], 0 or -inf, chosen keys first."""

    tokens: Tensor
    blocks: Tensor
    candidates: Tensor
    local: Tensor
    mask: Tensor
    positions: np.ndarray

    def choose(self, q: Tensor, layer: int, store: SummarisedStore, indexer: Indexer, k: int) -> Tensor:
        """q [queries, heads, head_dim] → [queries, k], numbers of blocks in the row's table."""
        scores = indexer.score(q.unsqueeze(1), store.summaries(layer, self.blocks))
        return best_blocks(scores, self.candidates, k).squeeze(1)

    def attend(self, q: Tensor, layer: int, store: SummarisedStore, chosen: Tensor) -> Tensor:
        """q [queries, heads, head_dim], chosen [queries, k] → [queries, heads, head_dim]."""
        far = self.blocks.gather(1, chosen).unsqueeze(-1) * store.block_size + store.offsets  # [queries, k, block_size]
        slots = torch.cat((far.flatten(1), self.local), dim=1)
        return attend(q, layer, store, RowGroup(slice(0, None), 1, slots, self.mask))

    def work(self, view: SparseView, config: ModelConfig, element: int) -> Work:
        """But for FLOPs."""
        keys = int(view.count(self.positions).sum())
        copied = self.mask.numel()  # of keys, padding too: written and read again
        return Work(
            kv_read_bytes=2 * keys * config.kv_size * element,
            activation_bytes=(2 * 2 * copied * config.kv_size + 2 * len(self.positions) * config.q_size) * element,
            launches=6,
        )


@dataclass
class SparsePlan:
    """dense: the queries that see everything, and where they are among all (None: everywhere). sparse: groups of the others.
    chosen: each group's blocks, as the last layer that chose has left them for those that share its choice."""

    batch: ForwardBatch
    dense: list[RowGroup]
    dense_tokens: Tensor | None
    sparse: list[Few | PairGroup]
    chosen: list[Tensor] = field(default_factory=list)


class SparseAttention:
    """Causal attention over local blocks and the best others; needs a SummarisedStore.

    A block is a block of the KV store, as in Quest (arXiv 2406.10774); local window and chosen blocks follow NSA (Yuan et al.
    2025, arXiv 2502.11089). One choice serves all heads of a layer, as in DeepSeek-V3.2's sparse attention, and with
    share_layers > 1 that many layers: the first of them chooses.
    """

    def __init__(self, config: ModelConfig, view: SparseView, indexer: Indexer, share_layers: int = 1):
        self.sees, self.indexer, self.share_layers = view, indexer, share_layers
        self.dense = TorchAttention()
        self.summary_numbers = math.prod(summary_shape(indexer, config, view.block_size, torch.float32))

    def summary_bytes_per_token(self, layers: int, dtype: torch.dtype) -> int:
        """What a token's share of summaries takes in so many layers, rounded up."""
        choosing = math.ceil(layers / self.share_layers)
        return math.ceil(choosing * self.summary_numbers * dtype.itemsize / self.sees.block_size)

    def summarised(
        self, store: KVStore, config: ModelConfig, dtype: torch.dtype, device: torch.device, shared: bool = False
    ) -> SummarisedStore:
        """The store that forward reads, over another one; shared: that is one layer deep."""
        return SummarisedStore(store, self.indexer, config, self.sees.block_size, dtype, device, self.share_layers, shared)

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> SparsePlan:
        view, device = self.sees, batch.token_ids.device
        q_lens, kv_lens = np.array(batch.q_lens), np.array(batch.kv_lens)
        firsts, starts = np.cumsum(q_lens) - q_lens, kv_lens - q_lens
        dense_lens = np.clip(view.first_sparse - starts, 0, q_lens)
        rows = np.flatnonzero(dense_lens)
        part = replace(
            batch, token_ids=batch.token_ids[: dense_lens.sum()], q_lens=tuple(dense_lens[rows].tolist()),
            kv_lens=tuple((starts + dense_lens)[rows].tolist()), tables=tuple(batch.tables[r] for r in rows),
        )  # fmt: skip
        groups = self.dense.plan(part, dtype) if len(rows) else []
        if (dense_lens == q_lens).all():
            return SparsePlan(part, groups, None, [])
        tokens = (
            np.concatenate([np.arange(firsts[r], firsts[r] + dense_lens[r]) for r in rows]) if len(rows) else np.empty(0, int)
        )
        few: list[tuple[int, int, int]] = []
        sparse: list[Few | PairGroup] = []
        for r in np.flatnonzero(dense_lens < q_lens):
            at = np.arange(dense_lens[r], q_lens[r])
            if len(at) <= FEW:
                few.extend((int(r), int(firsts[r] + i), int(starts[r] + i)) for i in at)
                continue
            size = PairGroup.most_queries(view)
            for i in range(0, len(at), size):
                positions = starts[r] + at[i : i + size]
                sparse.append(PairGroup.of(view, batch.tables[r], int(kv_lens[r]), int(firsts[r] + at[i]), positions, device))
        if few:
            sparse.insert(0, self._few(batch, np.array(few), dtype))
        return SparsePlan(part, groups, to_device(tokens.astype(np.int64), device), sparse)

    def _few(self, batch: ForwardBatch, queries: np.ndarray, dtype: torch.dtype) -> Few:
        """queries [n, 3]: each one's row, its place among all tokens, its position."""
        view, device = self.sees, batch.token_ids.device
        rows, tokens, at = queries.T
        first = view.first_local(at)
        lengths = at + 1 - first * view.block_size
        blocks = np.zeros((len(at), first.max()), dtype=np.int64)
        local = np.zeros((len(at), lengths.max()), dtype=np.int64)
        for i, r in enumerate(rows):
            blocks[i, : first[i]] = batch.tables[r][: first[i]]
            keys = np.arange(first[i] * view.block_size, at[i] + 1)
            local[i, : lengths[i]] = slots_at(batch.tables[r], view.block_size, keys)
        candidates = np.arange(blocks.shape[1]) < first[:, None]
        chosen = view.blocks * view.block_size
        padding = np.arange(chosen + local.shape[1]) >= chosen + lengths[:, None]
        mask = torch.zeros(padding.shape, dtype=dtype, device=device).masked_fill_(to_device(padding, device), float("-inf"))
        return Few(
            to_device(tokens.astype(np.int64), device), to_device(blocks, device), to_device(candidates[:, None], device),
            to_device(local, device), mask[:, None, None], at,
        )  # fmt: skip

    def forward(self, q: Tensor, layer: int, store: KVStore, plan: SparsePlan) -> Tensor:
        if plan.dense_tokens is None:
            return self.dense.forward(q, layer, store, plan.dense)
        if not isinstance(store, SummarisedStore):
            raise ValueError(f"SparseAttention reads summaries of blocks, which a {type(store).__name__} does not keep")
        out = torch.empty_like(q)
        if plan.dense:
            out[plan.dense_tokens] = self.dense.forward(q[plan.dense_tokens], layer, store, plan.dense)
        queries = [q[group.tokens] for group in plan.sparse]
        if layer % self.share_layers == 0:
            chosen = (g.choose(x, layer, store, self.indexer, self.sees.blocks) for g, x in zip(plan.sparse, queries))
            plan.chosen = list(chosen)
        for group, x, blocks in zip(plan.sparse, queries, plan.chosen, strict=True):
            out[group.tokens] = group.attend(x, layer, store, blocks)
        return out

    def work(self, batch: ForwardBatch, plan: SparsePlan, config: ModelConfig, dtype: torch.dtype) -> Work:
        """Attention alone; what choosing costs is in ``step_work``."""
        total = self.dense.work(plan.batch, plan.dense, config, dtype) if plan.dense else Work()
        for group in plan.sparse:
            pairs = int(self.sees.count(group.positions).sum())
            total += Work(flops={precision_name(dtype): 4 * pairs * config.q_size})
            total += group.work(self.sees, config, dtype.itemsize)
        return total

    def step_work(self, batch: ForwardBatch, plan: SparsePlan, config: ModelConfig, dtype: torch.dtype, store: KVStore) -> Work:
        """The indexer, in all layers that choose: summaries of the blocks that this step fills, and the scores of candidates. An
        indexer is counted as one product per query head and block, as wide as a KV head's summary."""
        size, element = self.sees.block_size, dtype.itemsize
        filled = sum(kv // size - (kv - q) // size for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True))
        keys, made = 2 * filled * size * config.kv_size * element, filled * self.summary_numbers * element
        # K and V are read together, as the store keeps them, and copied on the way; summaries are in the model's dtype
        read_back = Work(kv_read_bytes=keys, activation_bytes=2 * keys)
        total = Work(kv_write_bytes=made, activation_bytes=made, launches=8 if filled else 5) + recounted(store, read_back)
        for group in plan.sparse:
            scored = int(self.sees.first_local(group.positions).sum())
            read = group.blocks.numel() * self.summary_numbers * element
            total += Work(
                flops={precision_name(dtype): 2 * scored * self.summary_numbers * config.group_size},
                kv_read_bytes=read,
                # summaries are copied; logits are written, normalised, summed over heads; of what is left the best are found
                activation_bytes=2 * read + (5 * config.num_heads + 2) * scored * max(element, 4),
                launches=16,
            )
        layers = -(-config.num_layers // self.share_layers)
        return replace(total, index_flops=total.total_flops, index_bytes=total.total_bytes) * layers
