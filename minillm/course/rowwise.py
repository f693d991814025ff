"""An attention backend made of one function over one row's keys: the way into the engine for attention written by hand."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import KVStore
from minillm.engine.batch import ForwardBatch, slots_of
from minillm.model.config import ModelConfig
from minillm.perf.work import Work

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RowwiseAttention:
    """attend(q [new, heads, dim], k, v [total, kv_heads, dim]) → [new, heads, dim], called for each row of the batch in turn.

    The row's new tokens are the last of its total: the mask is the function's own business. It counts as torch's attention does.
    """

    def __init__(self, attend: Attend):
        self.attend = attend
        self._counted = TorchAttention()

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> list[tuple[slice, Tensor]]:
        rows, at = [], 0
        for q_len, kv_len, table in zip(batch.q_lens, batch.kv_lens, batch.tables, strict=True):
            slots = torch.from_numpy(slots_of(table, batch.block_size, 0, kv_len)).to(batch.token_ids.device)
            rows.append((slice(at, at + q_len), slots))
            at += q_len
        return rows

    def forward(self, q: Tensor, layer: int, store: KVStore, plan: list[tuple[slice, Tensor]]) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for tokens, slots in plan:
            k, v = store.read(layer, slots[None])
            out[tokens] = self.attend(q[tokens], k[0], v[0])
        return out

    def work(self, batch: ForwardBatch, plan: Any, config: ModelConfig, dtype: torch.dtype) -> Work:
        return self._counted.work(batch, self._counted.plan(batch, dtype), config, dtype)
