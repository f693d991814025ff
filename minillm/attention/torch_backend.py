"""Plain torch attention over the paged store: gather each row's keys and values, then scaled_dot_product_attention."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.window import Window
from minillm.cache.kv_store import KVStore
from minillm.engine.batch import ForwardBatch, slots_at, to_device
from minillm.model.config import ModelConfig
from minillm.perf.work import Work, visible_pairs

MAX_PADDING = 1.3
"""Rows share one gather while padding them to the longest costs at most this factor."""


@dataclass(frozen=True)
class RowGroup:
    """Rows with equally many queries, padded to the longest row's keys and computed in one call.

    tokens: flat indices of the queries [rows * q_len], a slice where the rows stand together.
    slots: [rows, keys] int64, padded with the null slot. mask: [rows, 1, q_len, keys], 0 or -inf, None when all is visible.
    """

    tokens: Tensor | slice
    q_len: int
    slots: Tensor
    mask: Tensor | None


class TorchAttention:
    """Reference backend. It copies the keys and values it reads, which is the price of paging without a kernel of our own.

    view: what a query sees; keys that no query of a row sees are not read, and the engine takes their blocks back.
    """

    def __init__(self, window: int | None = None, sinks: int = 0):
        self.view = Window(window, sinks)

    @property
    def window(self) -> int | None:
        return self.view.size

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> list[RowGroup]:
        starts = np.concatenate([[0], np.cumsum(batch.q_lens)])
        by_q_len: dict[int, list[int]] = defaultdict(list)
        for row, q_len in enumerate(batch.q_lens):
            by_q_len[q_len].append(row)
        reads = [self.view.count(q, kv) for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True)]
        groups = []
        for q_len, rows in by_q_len.items():
            for part in split_by_length(rows, reads):
                groups.append(self._group(batch, part, q_len, starts, dtype))
        return groups

    def single_group(self, batch: ForwardBatch, dtype: torch.dtype) -> RowGroup:
        """All rows of a decoding batch in one group, with a mask always and at least two keys: one shape for compiled code."""
        return self._group(batch, list(range(batch.num_rows)), 1, np.arange(batch.num_rows + 1), dtype, fixed_form=True)

    def _group(
        self, batch: ForwardBatch, rows: list[int], q_len: int, starts: np.ndarray, dtype: torch.dtype, fixed_form: bool = False
    ) -> RowGroup:
        device = batch.token_ids.device
        kv_lens = np.array([batch.kv_lens[r] for r in rows])
        seen = [self.view.positions(q_len, int(kv)) for kv in kv_lens]  # what is out of every query's sight is not read
        fewest, longest = min(map(len, seen)), max(max(map(len, seen)), 2 if fixed_form else 1)
        slots = np.zeros((len(rows), longest), dtype=np.int64)
        for i, r in enumerate(rows):
            slots[i, : len(seen[i])] = slots_at(batch.tables[r], batch.block_size, seen[i])
        mask = None
        if fixed_form or q_len > 1 or fewest < longest:
            key = np.full((len(rows), longest), kv_lens.max())  # padding lies beyond every query
            for i, positions in enumerate(seen):
                key[i, : len(positions)] = positions
            # bottom-right causal: the last query of a row sees the row's last key
            query = kv_lens[:, None] - q_len + np.arange(q_len)
            visible = self.view.sees(query[:, :, None], key[:, None, :])  # [rows, q_len, keys]
            blocked = to_device(~visible, device)
            mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(blocked, float("-inf")).unsqueeze(1)
        tokens: Tensor | slice = slice(int(starts[rows[0]]), int(starts[rows[-1] + 1]))
        if rows != list(range(rows[0], rows[0] + len(rows))):
            tokens = to_device((starts[rows][:, None] + np.arange(q_len)).ravel(), device)
        return RowGroup(tokens, q_len, to_device(slots, device), mask)

    def forward(self, q: Tensor, layer: int, store: KVStore, plan: list[RowGroup]) -> Tensor:
        if len(plan) == 1:
            return attend(q, layer, store, plan[0])
        out = torch.empty_like(q)
        for group in plan:
            out[group.tokens] = attend(q[group.tokens], layer, store, group)
        return out

    def work(self, batch: ForwardBatch, plan: list[RowGroup], config: ModelConfig, dtype: torch.dtype) -> Work:
        element = dtype.itemsize
        lengths = list(zip(batch.q_lens, batch.kv_lens, strict=True))
        pairs = sum(visible_pairs(q, kv, self.view.size, self.view.sinks) for q, kv in lengths)
        read = sum(self.view.count(q, kv) for q, kv in lengths)
        gathered = sum(g.slots.numel() for g in plan)
        queries = batch.num_tokens * config.q_size
        return Work(
            flops={precision_name(dtype): 4 * pairs * config.q_size},  # QKᵀ and PV, a multiply and an add each
            kv_read_bytes=2 * read * config.kv_size * element,
            # the gathered copy is written and read again; queries in, result out. SDPA is tiled: scores never reach memory.
            activation_bytes=(2 * 2 * gathered * config.kv_size + 2 * queries) * element,
            launches=2 if len(plan) == 1 else 4 * len(plan),
        )


def attend(q: Tensor, layer: int, store: KVStore, group: RowGroup) -> Tensor:
    """One group. q [rows * q_len, heads, head_dim] → the same shape."""
    k, v = store.read(layer, group.slots)  # [rows, keys, kv_heads, head_dim]
    kv_heads, (heads, dim) = k.shape[2], q.shape[1:]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if group.q_len == 1:
        # the query heads that share a KV head become the rows of one small matrix product
        out = F.scaled_dot_product_attention(q.view(-1, kv_heads, heads // kv_heads, dim), k, v, group.mask)
        return out.reshape(-1, heads, dim)
    out = F.scaled_dot_product_attention(
        q.unflatten(0, (-1, group.q_len)).transpose(1, 2), k, v, group.mask, enable_gqa=kv_heads != heads
    )
    return out.transpose(1, 2).reshape(-1, heads, dim)


def split_by_length(rows: list[int], kv_lens: Sequence[int]) -> list[list[int]]:
    """Cut rows into runs of similar length, so that short rows are not padded to the longest one.

    Keeps the order where one run is enough."""
    longest = max(kv_lens[r] for r in rows)
    if longest * len(rows) <= MAX_PADDING * sum(kv_lens[r] for r in rows):
        return [rows]
    parts: list[list[int]] = []
    for r in sorted(rows, key=lambda r: kv_lens[r]):
        if parts and kv_lens[r] <= 1.5 * kv_lens[parts[-1][0]]:
            parts[-1].append(r)
        else:
            parts.append([r])
    # batch order within a part: queries are taken in that order
    return [sorted(part) for part in parts]


def precision_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
