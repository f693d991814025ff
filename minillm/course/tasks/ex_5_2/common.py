"""The tiny model and a fair share of the budget, for the tasks of exercise 5.2."""

from __future__ import annotations

from typing import Sequence

from minillm.model.config import ModelConfig

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=128,
    name="a tiny random model",
)  # fmt: skip


def fair(running: Sequence[int], waiting: Sequence[int], budget: int, limit: int) -> list[int]:
    """The answer: token by token, decodes, then prompts that run, then who starts."""
    grants = [0] * len(running)
    for i, n in enumerate(running):
        if n == 1 and budget:
            grants[i], budget = 1, budget - 1
    for i, n in enumerate(running):
        while n > 1 and grants[i] < n and budget:
            grants[i], budget = grants[i] + 1, budget - 1
    for n in waiting:
        if len(grants) == limit or not budget:
            break
        grants.append(0)
        while grants[-1] < n and budget:
            grants[-1], budget = grants[-1] + 1, budget - 1
    return grants
