"""The seam for attention: plan once per step, then run once per layer."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from minillm.cache.kv_store import KVStore
from minillm.engine.batch import ForwardBatch
from minillm.model.config import ModelConfig
from minillm.perf.work import Work


class AttentionBackend(Protocol):
    """Causal attention of this step's queries over everything their rows have in the KV store.

    A backend may also have ``operators``, a ``minillm.model.layers.Operators``: the model then uses these for its norms,
    rotation, KV write and gated activation. One whose layers do not all do the same may have ``step_work(batch, plan, config,
    dtype, store)``: what a step does beside ``work`` in every layer, with KV as the store counts it (its ``recount``)."""

    def plan(self, batch: ForwardBatch, dtype: Any) -> Any:
        """Whatever all layers share for this batch: index tensors, masks. Called once per step."""
        ...

    def forward(self, q: Tensor, layer: int, store: KVStore, plan: Any) -> Tensor:
        """q [tokens, heads, head_dim] → [tokens, heads, head_dim]. This step's K and V are in the store already."""
        ...

    def work(self, batch: ForwardBatch, plan: Any, config: ModelConfig, dtype: Any) -> Work:
        """What one layer's forward does for this batch."""
        ...
