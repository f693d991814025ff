"""The model in a GGUF file: its shape from the metadata, its weights under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import gguf
import torch
from torch import Tensor

from minillm.model.config import ModelConfig, RopeConfig
from minillm.model.files import check_depth, check_tensors
from minillm.model.gguf_file import GGUFFile
from minillm.model.gguf_tokenizer import eos_ids
from minillm.model.layers import rope_frequencies
from minillm.model.weights import expected_shapes

_FAMILIES = {  # a Mistral model is stored as a "llama"
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_ROPE_FREQS = "rope_freqs.weight"


class GGUFWeights(Mapping[str, Tensor]):
    """The weights of a GGUF file under Hugging Face names, read and dequantised anew each time one is asked for."""

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self._file, self._config = file, config
        self._names = _stored_names(config)
        # The file holds the rows of Q and K of a "llama" so that rotary pairs are neighbours; Qwen's as they were trained.
        self._paired = file.metadata["general.architecture"] == "llama"

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._file.read(self._names[name])
        if self._paired and ".self_attn.q_proj." in name:
            return split_pairs(tensor, self._config.num_heads)
        if self._paired and ".self_attn.k_proj." in name:
            return split_pairs(tensor, self._config.num_kv_heads)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Metadata:
    """Typed access: a key that is absent without a default, or of the wrong type, is a ValueError naming it."""

    def __init__(self, file: GGUFFile):
        self.file = file

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, default, str))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, default, (int, float)))

    def count(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, default, int))

    def _get(self, key: str, default: Any, kind: type | tuple[type, ...]) -> Any:
        value = self.file.metadata.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:  # one number per layer, all the same
            value = value[0]
        if value is None:
            raise ValueError(f"{self.file.path} lacks the metadata key {key}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{key} of {self.file.path} is {value!r}, which is not usable")
        return value


def split_pairs(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads * head_dim, ...] from (x0, y0, x1, y1, ...) per head to (x0, x1, ..., y0, y1, ...)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def gguf_config(file: GGUFFile, name: str) -> ModelConfig:
    """The model's shape from the metadata and the tensors' presence.

    An architecture or option that minillm lacks, a missing key, and a missing, surplus or misshapen tensor are ValueErrors.
    """
    meta = _Metadata(file)
    arch = meta.text("general.architecture")
    if arch not in _FAMILIES:
        raise ValueError(f"unknown architecture {arch!r} in {file.path}; minillm reads GGUF files of {', '.join(_FAMILIES)}")
    if meta.count("split.count", 1) > 1:
        raise ValueError(f"{file.path} is one part of a split model; join the parts with llama.cpp's gguf-split first")
    if meta.count(f"{arch}.expert_count", 0):
        raise ValueError(f"{file.path} is a mixture of experts ({arch}.expert_count), which minillm cannot load from GGUF")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} lacks tensor token_embd.weight")
    hidden, heads = meta.count(f"{arch}.embedding_length"), meta.count(f"{arch}.attention.head_count")
    head_dim = meta.count(f"{arch}.attention.key_length", hidden // max(heads, 1))
    for key in (f"{arch}.rope.dimension_count", f"{arch}.attention.value_length"):
        if meta.count(key, head_dim) != head_dim:
            raise ValueError(f"{key} of {file.path} is {meta.count(key)}; minillm needs the {head_dim} of the heads' width")
    present = file.tensors.__contains__
    config = ModelConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0], hidden_size=hidden,
        intermediate_size=meta.count(f"{arch}.feed_forward_length"), num_layers=meta.count(f"{arch}.block_count"),
        num_heads=heads, num_kv_heads=meta.count(f"{arch}.attention.head_count_kv", heads), head_dim=head_dim,
        max_position=meta.count(f"{arch}.context_length"), norm_eps=meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=_rope(meta, arch), tie_embeddings=not present("output.weight"),
        qkv_bias=present("blk.0.attn_q.bias"), attention_out_bias=present("blk.0.attn_output.bias"),
        mlp_bias=present("blk.0.ffn_up.bias"), qk_norm=arch == "qwen3",
        sliding_window=meta.count(f"{arch}.attention.sliding_window", 0) or None,
        eos_token_ids=eos_ids(file.metadata, name), bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        family=arch, name=name,
    )
    check_depth(config.num_layers, len(file.tensors), file.path)
    names, shapes = _stored_names(config), expected_shapes(config)
    found = {n: t.shape for n, t in file.tensors.items() if n != _ROPE_FREQS}
    check_tensors({names[n]: shape for n, shape in shapes.items()}, found, file.path)
    return replace(config, rope=_llama3_rope(file, config)) if present(_ROPE_FREQS) else config


def storage_note(file: GGUFFile) -> str:
    """How the file stores its weights, for example "Q4_1 linear weights, Q8_0 embedding"."""
    linear = {t.kind.name for n, t in file.tensors.items() if n.startswith("blk.") and len(t.shape) == 2}
    return f"{'/'.join(sorted(linear))} linear weights, {file.tensors['token_embd.weight'].kind.name} embedding"


def _stored_names(config: ModelConfig) -> dict[str, str]:
    """Each tensor's name in the file by its Hugging Face name."""
    table = gguf.get_tensor_name_map(_FAMILIES[config.family], config.num_layers)
    names = {}
    for name in expected_shapes(config):
        base, kind = name.rsplit(".", 1)
        names[name] = f"{table.get_name(base)}.{kind}"
    return names


def _rope(meta: _Metadata, arch: str) -> RopeConfig:
    theta, context = meta.number(f"{arch}.rope.freq_base", 10_000.0), meta.count(f"{arch}.context_length")
    scaling = f"{arch}.rope.scaling"
    factor = meta.number(f"{scaling}.factor", meta.number(f"{arch}.rope.scale_linear", 1.0)) or 1.0
    kind = meta.text(f"{scaling}.type", "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta, original_max_position=context)
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{scaling}.type of {meta.file.path} is {kind!r}; minillm reads none, linear and yarn from GGUF")
    for key in (f"{scaling}.attn_factor", f"{scaling}.yarn_attn_factor", f"{scaling}.yarn_ext_factor"):
        if meta.number(key, 1.0) != 1.0:
            raise ValueError(f"{key} of {meta.file.path} is {meta.number(key)}; minillm supports only 1")
    return RopeConfig(
        theta=theta, kind=kind, factor=factor, original_max_position=meta.count(f"{scaling}.original_context_length", context),
        beta_fast=meta.number(f"{scaling}.yarn_beta_fast", 32.0), beta_slow=meta.number(f"{scaling}.yarn_beta_slow", 1.0),
    )


def _llama3_rope(file: GGUFFile, config: ModelConfig) -> RopeConfig:
    """Llama 3's scaling is stored as one divisor per frequency. Find the constants that give these divisors, or refuse them."""
    divisors = file.read(_ROPE_FREQS)
    if config.rope.kind != "default" or divisors.shape != (config.head_dim // 2,):
        raise ValueError(f"{_ROPE_FREQS} of {file.path} does not fit the rest of its rotary settings")
    if torch.all(divisors == 1):
        return config.rope
    published = replace(  # the constants of every Llama 3 release; the factor is 8 or 32
        config.rope, kind="llama3", factor=float(divisors.max()), low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position=8192,
    )
    plain, scaled = rope_frequencies(config)[0], rope_frequencies(replace(config, rope=published))[0]
    if not torch.allclose(plain / scaled, divisors, rtol=1e-3):
        raise ValueError(f"{_ROPE_FREQS} of {file.path} scales the frequencies in a way that minillm does not know")
    return published
