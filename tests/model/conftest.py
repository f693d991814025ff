"""Tiny random models of each family as `transformers` saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minillm.model.loader import Checkpoint

SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, eos_token_id=2, bos_token_id=1, pad_token_id=0,
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 50_000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": ROPE}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def save_model(family: str, folder: Path, dtype: torch.dtype = torch.float32, **save: Any) -> Any:
    kind, options = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    for tensor in model.parameters():  # biases start at 0 and norms at 1: a swap would not show
        torch.nn.init.normal_(tensor)
    model.save_pretrained(folder, **save)
    return model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """One tiny random model per family: its folder, and the transformers model."""
    folders = {family: tmp_path_factory.mktemp("saved") for family in FAMILIES}
    return {family: (folder, save_model(family, folder)) for family, folder in folders.items()}


@pytest.fixture(scope="session")
def save() -> Callable[..., Any]:
    return save_model


@pytest.fixture(scope="session")
def same_weights() -> Callable[[Checkpoint, Any], None]:
    """Names, dtypes and values of a checkpoint against a transformers model."""
    return assert_same_weights


def assert_same_weights(checkpoint: Checkpoint, model: Any) -> None:
    state = model.state_dict()
    if checkpoint.config.tie_embeddings:
        state.pop("lm_head.weight")
    assert set(checkpoint.weights) == set(state) and len(checkpoint.weights) == len(state)
    for name, tensor in state.items():
        found = checkpoint.weights[name]
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
