"""An engine over a pool of four blocks, and its prompts, for the tasks of exercise 1.3."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, max_position=64,
    name="a tiny random model",
)  # fmt: skip
BLOCK = 4
FIRST, SECOND = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def make_llm(model: Transformer | None = None, **options: Any) -> LLM:
    """A pool of four blocks, which one of the prompts and its answer fill."""
    options = {"prefix_cache": "radix", "tier_policy": "always", "num_blocks": 4, "max_num_seqs": 1, **options}
    return LLM(model or Transformer.random(TINY), dtype="float32", block_size=BLOCK, **options)


def generated(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [llm.generate([list(p)], GREEDY)[0].token_ids for p in prompts]


def cold(prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return generated(make_llm(prefix_cache="none"), prompts)


def data_of(i: int, size: int = 10) -> Tensor:
    return torch.full((size,), i, dtype=torch.uint8)


NOBODY: frozenset[bytes] = frozenset()
