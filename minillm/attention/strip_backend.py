"""Attention over strips: a row's keys lie side by side and are read where they are. The baseline that paging is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minillm.attention.torch_backend import attend, precision_name
from minillm.cache.kv_store import KVStore, PlainKVStore
from minillm.engine.batch import ForwardBatch, slots_of
from minillm.model.config import ModelConfig
from minillm.perf.work import Work, visible_pairs


@dataclass(frozen=True)
class Span:
    """Slots of ``rows`` strips: ``length`` of each, the first at ``first``, the next ``step`` slots on."""

    first: int
    length: int
    rows: int = 1
    step: int = 0


@dataclass(frozen=True)
class Strips:
    """Rows that are computed together: their queries, q_len of each, and where their keys lie. mask: [queries, keys], None where
    all is visible."""

    tokens: slice
    q_len: int
    slots: Span
    mask: Tensor | None


@dataclass(frozen=True)
class InPlace:
    """A plain store that gives a view where others gather: slots are a span of strips."""

    store: PlainKVStore

    def read(self, layer: int, slots: Span) -> tuple[Tensor, Tensor]:
        """k, v, each [rows, length, kv_heads, head_dim]."""
        kv = self.store.layers[layer]  # [slots, 2, kv_heads, head_dim]
        shape, along = (slots.rows, slots.length, *kv.shape[1:]), (slots.step * kv.stride(0), *kv.stride())
        k, v = kv.as_strided(shape, along, kv.storage_offset() + slots.first * kv.stride(0)).unbind(2)
        return k, v


class StripAttention:
    """Needs kv_cache="contiguous" (or an allocation of strips) and the plain store; a scattered row is a ValueError.

    No key is copied. Neighbours that decode over equally many keys, in strips at equal distances, are computed together; other
    rows have no common shape, and each is a call of its own."""

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> list[Strips]:
        strips: list[Strips] = []
        start = 0
        for q_len, kv_len, table in zip(batch.q_lens, batch.kv_lens, batch.tables, strict=True):
            slots = slots_of(table, batch.block_size, 0, kv_len)
            if slots[-1] - slots[0] != kv_len - 1 or any(b - a != 1 for a, b in zip(table, table[1:])):
                raise ValueError(f"block table {list(table)[:8]} is no strip; StripAttention needs kv_cache='contiguous'")
            mask = None
            if q_len > 1:  # bottom-right causal
                mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=batch.token_ids.device).tril(kv_len - q_len)
            row = Strips(slice(start, start + q_len), q_len, Span(int(slots[0]), kv_len), mask)
            joined = join(strips[-1], row) if strips else None
            strips[-1:] = [joined] if joined else [*strips[-1:], row]
            start += q_len
        return strips

    def forward(self, q: Tensor, layer: int, store: KVStore, plan: list[Strips]) -> Tensor:
        if not isinstance(store, PlainKVStore):
            raise ValueError(f"StripAttention reads the plain store, got {type(store).__name__}")
        read: Any = InPlace(store)
        if len(plan) == 1:
            group: Any = plan[0]
            return attend(q, layer, read, group)
        out = torch.empty_like(q)
        for group in plan:
            out[group.tokens] = attend(q[group.tokens], layer, read, group)
        return out

    def work(self, batch: ForwardBatch, plan: list[Strips], config: ModelConfig, dtype: torch.dtype) -> Work:
        element = dtype.itemsize
        lengths = list(zip(batch.q_lens, batch.kv_lens, strict=True))
        return Work(
            flops={precision_name(dtype): 4 * sum(visible_pairs(q, kv) for q, kv in lengths) * config.q_size},
            kv_read_bytes=2 * sum(batch.kv_lens) * config.kv_size * element,
            activation_bytes=2 * batch.num_tokens * config.q_size * element,
            launches=2 * len(plan),
        )


def join(before: Strips, row: Strips) -> Strips | None:
    """Both in one, if both decode and the row continues the regular sequence of strips before it."""
    span, step = before.slots, row.slots.first - before.slots.first - (before.slots.rows - 1) * before.slots.step
    regular = step > 0 if span.rows == 1 else step == span.step
    if before.q_len != 1 or row.q_len != 1 or span.length != row.slots.length or not regular:
        return None
    return replace(before, tokens=slice(before.tokens.start, row.tokens.stop), slots=replace(span, rows=span.rows + 1, step=step))
