"""A model written as a folder reads back as the same model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from minillm.bench.export import export, hf_config, write_folder
from minillm.model.config import ModelConfig, RopeConfig
from minillm.model.loader import load_checkpoint

BASE = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_position=64,
    eos_token_ids=(2, 3), bos_token_id=1,
)  # fmt: skip
LLAMA3 = RopeConfig(kind="llama3", theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_embeddings": True},
        {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True},
        {"rope": LLAMA3},
        {"family": "mistral", "sliding_window": 16},
        {"family": "qwen2", "qkv_bias": True},
        {"family": "qwen3", "qk_norm": True, "tie_embeddings": True},
    ],
)
def test_config_survives_the_round_trip(changes):
    config = ModelConfig(**BASE, **changes)
    raw = json.loads(json.dumps(hf_config(config)))
    read = ModelConfig.from_hf(raw, config.name)
    plain = dataclasses.replace(config.rope, original_max_position=read.rope.original_max_position)
    assert read == dataclasses.replace(config, rope=plain)
    if config.rope.kind != "default":
        assert read.rope == config.rope


def test_a_folder_is_its_own_export(tmp_path):
    assert export(tmp_path) == tmp_path


def test_a_hub_id_is_refused():
    with pytest.raises(ValueError, match="org/name"):
        export("org/name")


@pytest.mark.slow
@pytest.mark.model
def test_default_model_is_written_once_with_equal_weights_and_tokenizer(tmp_path, monkeypatch):
    source = load_checkpoint("smollm2-135m")  # before the cache moves away
    write_folder(source, tmp_path)
    read = load_checkpoint(tmp_path)
    assert dataclasses.replace(read.config, name=source.config.name) == source.config
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.29.mlp.down_proj.weight"):
        assert torch.equal(read.weights[name], source.weights[name].float())
    chat = [{"role": "user", "content": "Is it raining?"}]
    assert read.tokenizer.apply_chat_template(chat) == source.tokenizer.apply_chat_template(chat)


def test_a_gguf_file_is_exported_once_and_no_half_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(ValueError):
        export(file)
    left = [p for p in (tmp_path / "cache" / "exports").iterdir() if not p.name.endswith(".lock")]
    assert left == []

    written: list[Path] = []

    def fake_write(checkpoint, folder):
        written.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("minillm.bench.export.load_checkpoint", lambda path: None)
    monkeypatch.setattr("minillm.bench.export.write_folder", fake_write)
    first = export(file)
    assert export(str(file)) == first and (first / "config.json").is_file() and len(written) == 1
