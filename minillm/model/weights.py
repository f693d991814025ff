"""The tensors of a checkpoint: their names and shapes, and which of them are stacked because they read the same input."""

from __future__ import annotations

from typing import Mapping

import torch
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.model.mla import mla_shapes, rotation_in_halves
from minillm.model.moe_config import moe_parts, moe_shapes

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
KINDS = ("weight", "bias")
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint by its Hugging Face name."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {EMBED: (c.vocab_size, c.hidden_size), NORM: (c.hidden_size,)}
    if not c.tie_embeddings:
        shapes[HEAD] = (c.vocab_size, c.hidden_size)
    biased = {"self_attn.q_proj": c.qkv_bias, "self_attn.k_proj": c.qkv_bias, "self_attn.v_proj": c.qkv_bias,
              "self_attn.o_proj": c.attention_out_bias}  # fmt: skip
    sparse = dict.fromkeys(c.sparse_layers, c.moe) if c.moe else {}
    for i in range(c.num_layers):
        p = f"model.layers.{i}"
        linears = {} if c.mla else {
            "self_attn.q_proj": (c.q_size, c.hidden_size), "self_attn.k_proj": (c.kv_size, c.hidden_size),
            "self_attn.v_proj": (c.kv_size, c.hidden_size), "self_attn.o_proj": (c.hidden_size, c.q_size),
        }  # fmt: skip
        shapes.update({f"{p}.{name}": shape for name, shape in (mla_shapes(c) if c.mla else {}).items()})
        if i in sparse:
            shapes.update({f"{p}.{name}": shape for name, shape in moe_shapes(sparse[i], c.hidden_size, c.family).items()})
        else:
            inner = c.intermediate_size
            linears |= {"mlp.gate_proj": (inner, c.hidden_size), "mlp.up_proj": (inner, c.hidden_size)}
            linears |= {"mlp.down_proj": (c.hidden_size, inner)}
        for name, shape in linears.items():
            shapes[f"{p}.{name}.weight"] = shape
            if biased.get(name, c.mlp_bias):
                shapes[f"{p}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{p}.{name}.weight"] = (c.hidden_size,)
        if c.qk_norm:
            shapes[f"{p}.self_attn.q_norm.weight"] = shapes[f"{p}.self_attn.k_norm.weight"] = (c.head_dim,)
    return shapes


def fused_parts(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Products of one input: the fused name, and the names of what is stacked for it."""
    if config.mla is None:
        return FUSED
    queries = "self_attn.q_proj" if config.mla.q_rank is None else "self_attn.q_a_proj"
    return {
        "self_attn.qkv_a_proj": (queries, "self_attn.kv_a_proj_with_mqa"),
        "mlp.gate_up_proj": FUSED["mlp.gate_up_proj"],
    }


def fuse(config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    """Check every tensor, convert it, and stack those that read the same input: one product instead of two or three."""

    def take(name: str) -> Tensor:
        if name not in weights:
            raise ValueError(f"checkpoint of {config.name} lacks tensor {name}")
        tensor = weights[name]
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"tensor {name} of {config.name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        if config.mla is not None:
            tensor = rotation_in_halves(config, name, tensor)
        return tensor.to(device=device, dtype=held_in(name, dtype))

    shapes = expected_shapes(config)
    fused = fused_parts(config).items()
    stacked = {f"{name}.{kind}": tuple(f"{part}.{kind}" for part in parts) for name, parts in fused for kind in KINDS}
    if config.moe is not None:
        stacked |= moe_parts(config.moe, config.family)
    out: dict[str, Tensor] = {}
    used: set[str] = set()
    for i in range(config.num_layers):
        for name, parts in stacked.items():
            pieces = [f"model.layers.{i}.{part}" for part in parts]
            if pieces[0] in shapes:
                out[f"model.layers.{i}.{name}"] = torch.cat([take(piece) for piece in pieces]) if pieces[1:] else take(pieces[0])
                used.update(pieces)
    return out | {name: take(name) for name in shapes if name not in used}


def held_in(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor of a model of that dtype is held in: what decides between experts is not rounded to 16 bits."""
    return torch.promote_types(dtype, torch.float32) if name.endswith("e_score_correction_bias") else dtype
