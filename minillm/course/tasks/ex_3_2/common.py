"""The tiny model and its prompts, for the tasks of exercises 3.2 and 2.1."""

from __future__ import annotations

from minillm.model.config import ModelConfig

TINY = ModelConfig(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position=64,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 6, 1, 8, 0])
