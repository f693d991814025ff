"""Attention over strips: a row's keys lie side by side and are read where they are. The baseline that paging is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.torch_backend import precision_name
from minillm.cache.kv_store import KVStore, PlainKVStore
from minillm.engine.batch import ForwardBatch, slots_of
from minillm.model.config import ModelConfig
from minillm.perf.work import Work, visible_pairs


@dataclass(frozen=True)
class Strip:
    """One row: its queries, where its keys begin, how many there are. mask: [queries, keys], None where all is visible."""

    tokens: slice
    first: int
    length: int
    mask: Tensor | None


class StripAttention:
    """Needs kv_cache="contiguous" (or an allocation of strips) and the plain store; a scattered row is a ValueError.

    No key is copied, and no two rows are computed together: strips of different lengths have no common shape."""

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> list[Strip]:
        strips, start = [], 0
        for q_len, kv_len, table in zip(batch.q_lens, batch.kv_lens, batch.tables, strict=True):
            slots = slots_of(table, batch.block_size, 0, kv_len)
            if slots[-1] - slots[0] != kv_len - 1 or any(b - a != 1 for a, b in zip(table, table[1:])):
                raise ValueError(f"block table {list(table)[:8]} is no strip; StripAttention needs kv_cache='contiguous'")
            mask = None
            if q_len > 1:  # bottom-right causal
                mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=batch.token_ids.device).tril(kv_len - q_len)
            strips.append(Strip(slice(start, start + q_len), int(slots[0]), kv_len, mask))
            start += q_len
        return strips

    def forward(self, q: Tensor, layer: int, store: KVStore, plan: list[Strip]) -> Tensor:
        if not isinstance(store, PlainKVStore):
            raise ValueError(f"StripAttention reads the plain store, got {type(store).__name__}")
        out = torch.empty_like(q)
        for row in plan:
            k, v = store.layers[layer][row.first : row.first + row.length].unbind(1)
            k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))  # [1, kv_heads, keys, head_dim]
            heads = q[row.tokens].transpose(0, 1).unsqueeze(0)
            grouped = k.shape[1] != heads.shape[1]
            out[row.tokens] = F.scaled_dot_product_attention(heads, k, v, row.mask, enable_gqa=grouped)[0].transpose(0, 1)
        return out

    def work(self, batch: ForwardBatch, plan: list[Strip], config: ModelConfig, dtype: torch.dtype) -> Work:
        element = dtype.itemsize
        lengths = list(zip(batch.q_lens, batch.kv_lens, strict=True))
        return Work(
            flops={precision_name(dtype): 4 * sum(visible_pairs(q, kv) for q, kv in lengths) * config.q_size},
            kv_read_bytes=2 * sum(batch.kv_lens) * config.kv_size * element,
            activation_bytes=2 * batch.num_tokens * config.q_size * element,
            launches=2 * len(plan),
        )
