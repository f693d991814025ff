"""The tiny model and drawn numbers, for the tasks of exercise 5.1."""

from __future__ import annotations

import torch

from minillm.model.config import ModelConfig

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=96,
    name="a tiny random model",
)  # fmt: skip


def draw(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def several(n: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(low, high) for _ in range(n))
