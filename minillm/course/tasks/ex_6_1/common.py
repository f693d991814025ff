"""The tiny model, distributions and the accept rule itself, for the tasks of exercise 6.1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.model.config import ModelConfig

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, max_position=128,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 2, 7], [1, 6, 1, 8, 0])
OPTIONS: dict[str, Any] = {"dtype": "float64", "block_size": 4, "num_blocks": 60}


def dist(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def true_rule(p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
    if u * float(q[token]) < float(p[token]):
        return token, True
    left = [max(0.0, a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    left = left if sum(left) > 0 else p.tolist()
    total, wanted = 0.0, w * sum(left)
    for i, x in enumerate(left):
        total += x
        if wanted < total:
            return i, False
    return max(i for i, x in enumerate(left) if x > 0), False
