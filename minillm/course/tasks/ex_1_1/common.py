"""The tiny model, which exercises 1.2, 4.1 and 6.2 use too, and an oracle for attention, one query at a time."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.engine.batch import ForwardBatch, slots_of
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, max_position=64,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 6, 1, 8, 0])
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
TOLERANCE = 1e-5


def config_of(layers: int = 1, heads: int = 1, kv_heads: int = 1, dim: int = 2) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        max_position=64,
    )  # fmt: skip


def generated(**options: Any) -> list[tuple[int, ...]]:
    """Greedy tokens of three prompts of different lengths on the tiny model."""
    llm = LLM(Transformer.random(TINY), dtype="float32", block_size=4, **{"num_blocks": 24, **options})
    return [output.token_ids for output in llm.generate(list(PROMPTS), GREEDY)]


def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query [heads, dim] over keys and values [length, kv_heads, dim], in float64 → [heads, dim]."""
    group = q.shape[0] // k.shape[1]
    out = []
    for head in range(q.shape[0]):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        weights = (keys @ q[head].double() / q.shape[1] ** 0.5).softmax(0)
        out.append(weights @ values)
    return torch.stack(out).to(q.dtype)


def causal(q: Tensor, k: Tensor, v: Tensor, past: int) -> Tensor:
    """Queries at positions past, past + 1, … over all keys [past + new, kv_heads, dim]."""
    return torch.stack([oracle(q[i], k[: past + i + 1], v[: past + i + 1]) for i in range(len(q))])


class Through(TorchAttention):
    """The engine's attention with the arithmetic handed to ``answer(q, store, layer, batch)``."""

    def __init__(self, answer: Callable[[Tensor, Any, int, ForwardBatch], Tensor]):
        super().__init__()
        self.answer = answer

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> Any:
        return super().plan(batch, dtype), batch

    def forward(self, q: Tensor, layer: int, store: Any, plan: Any) -> Tensor:
        return self.answer(q, store, layer, plan[1])

    def work(self, batch: ForwardBatch, plan: Any, config: ModelConfig, dtype: torch.dtype) -> Any:
        return super().work(batch, plan[0], config, dtype)


def row_slots(batch: ForwardBatch) -> list[Tensor]:
    """The slots of each row's visible tokens."""
    lens = zip(batch.tables, batch.kv_lens, strict=True)
    return [torch.from_numpy(slots_of(table, batch.block_size, 0, n)) for table, n in lens]
