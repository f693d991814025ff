"""A tiny model with latents and its prompts, for the tasks of exercise 4.2."""

from __future__ import annotations

from minillm.model.config import ModelConfig
from minillm.model.mla_config import MLAConfig

TINY = ModelConfig(
    vocab_size=40, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=3, num_kv_heads=3, head_dim=10, max_position=64,
    mla=MLAConfig(kv_rank=12, q_rank=None, nope_dim=6, rope_dim=4, v_dim=5),
)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 6, 1, 8, 0, 3])
