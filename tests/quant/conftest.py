"""A small random model with inputs worth calibrating on."""

from __future__ import annotations

import pytest
import torch

from minillm import ModelConfig, Transformer

from ..strategies import one_thread  # noqa: F401


def small_config(**changes) -> ModelConfig:
    sizes = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        max_position=64,
    )
    return ModelConfig(**(sizes | dict(name="small") | changes))


@pytest.fixture(scope="session")
def small() -> Transformer:
    """Biases everywhere, three query heads to a KV head, one input channel far larger than the others."""
    config = small_config(qkv_bias=True, attention_out_bias=True, mlp_bias=True)
    model = Transformer.random(config, seed=1, dtype=torch.float64)
    for layer in model.layers:
        layer.attention_norm.weight[5] *= 30
        layer.mlp_norm.weight[11] *= 30
    return model


@pytest.fixture(scope="session")
def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 64, (n,), generator=generator).tolist() for n in (60, 60, 7, 60, 1, 60)]
