"""Multi-head latent attention, the attention of DeepSeek-V2 and V3, as one kind of attention that a layer may have."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from minillm.attention.backend import AttentionBackend
from minillm.cache.kv_store import KVStore
from minillm.engine.batch import ForwardBatch
from minillm.model.config import ModelConfig
from minillm.model.layers import Operators, RMSNorm
from minillm.model.mla_config import MLAConfig
from minillm.perf.work import Work
from minillm.quant.linear import Linear

NORM_EPS = 1e-6
"""Of the norms on the latents; the published models do not take it from their config."""


class LatentAttentionLayer(nn.Module):
    """Keys and values of all heads are made from one latent per token, which is all that is cached beside one rotated key
    (DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434; V3, arXiv 2412.19437).

    down: hidden → query latent (or the queries themselves), KV latent and rotated key, one product. q_up: query latent → queries.
    kv_up: KV latent → keys and values of all heads; the attention backend applies it, to whichever side costs less.
    """

    def __init__(
        self, config: ModelConfig, down: Linear, kv_norm: RMSNorm, kv_up: Linear, out: Linear, q_norm: RMSNorm | None = None,
        q_up: Linear | None = None,
    ):  # fmt: skip
        super().__init__()
        assert config.mla is not None
        self.config, self.shape = config, config.mla
        self.down, self.kv_norm, self.kv_up, self.out, self.q_norm, self.q_up = down, kv_norm, kv_up, out, q_norm, q_up
        self.scale = softmax_scale(config)

    def forward(
        self, x: Tensor, operators: Operators, layer: int, cos: Tensor, sin: Tensor, slots: Tensor, store: KVStore,
        backend: AttentionBackend, plan: Any,
    ) -> Tensor:  # fmt: skip
        c, shape = self.config, self.shape
        q, latent, key = self.down(x).split(split_sizes(shape, c.num_heads), dim=-1)
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q, operators))
        q_nope, q_rope = q.unflatten(-1, (c.num_heads, shape.head_dim)).split([shape.nope_dim, shape.rope_dim], dim=-1)
        q_and_k = torch.cat((q_rope, key.unsqueeze(1)), dim=1)
        latent = self.kv_norm(latent, operators).unsqueeze(1)
        q_rope = operators.rotate_and_store(q_and_k, latent, cos, sin, slots, store, layer)
        up = self.kv_up.weight.unflatten(0, (c.num_heads, -1))
        # a backend of a model with latents has this method: assembly sees to it
        attended: Tensor = backend.latent(q_nope, q_rope, up, self.scale, shape, layer, store, plan)  # type: ignore[attr-defined]
        return self.out(attended.flatten(1))

    def work(self, batch: ForwardBatch, operators: Operators, backend: AttentionBackend, plan: Any) -> Work:
        c, shape, tokens, element = self.config, self.shape, batch.num_tokens, self.down.dtype.itemsize
        total = self.down.work(tokens) + backend.work(batch, plan, c, self.down.dtype) + self.out.work(tokens)
        if self.q_up is not None and shape.q_rank is not None:
            total += operators.norm_work(tokens, shape.q_rank, element) + self.q_up.work(tokens)
        total += operators.norm_work(tokens, shape.kv_rank, element)
        rotated, new = tokens * (c.num_heads + 1) * shape.rope_dim, tokens * shape.cache_width
        # what is rotated is joined first; then as in ``Operators.rotate_and_store_work``
        moved = (2 + 7) * rotated + 3 * new
        return total + Work(kv_write_bytes=new * element, activation_bytes=moved * element, launches=1 + 3 + 2)

    def linears(self) -> dict[str, Linear]:
        """By the names that a checkpoint gives them, those that read the same input fused."""
        found = {"qkv_a_proj": self.down, "q_b_proj": self.q_up, "kv_b_proj": self.kv_up, "o_proj": self.out}
        return {f"self_attn.{name}": linear for name, linear in found.items() if linear is not None}

    def norms(self) -> dict[str, RMSNorm | None]:
        return {"self_attn.q_a_layernorm": self.q_norm, "self_attn.kv_a_layernorm": self.kv_norm}


def split_sizes(shape: MLAConfig, heads: int) -> list[int]:
    """What the first product gives: queries or their latent, the KV latent, the key to rotate."""
    return [heads * shape.head_dim if shape.q_rank is None else shape.q_rank, shape.kv_rank, shape.rope_dim]


def softmax_scale(config: ModelConfig) -> float:
    """1 / √(width of a query), and where YaRN stretches the model, the square of its magnitude: that of queries and of keys,
    rotated or not."""
    assert config.mla is not None
    rope = config.rope
    scale = config.mla.head_dim**-0.5
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def mla_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's attention by their Hugging Face names."""
    shape, hidden, heads = config.mla, config.hidden_size, config.num_heads
    assert shape is not None
    queries = heads * shape.head_dim
    q: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, hidden)}
    if shape.q_rank is not None:
        q = {
            "q_a_proj.weight": (shape.q_rank, hidden), "q_a_layernorm.weight": (shape.q_rank,),
            "q_b_proj.weight": (queries, shape.q_rank),
        }  # fmt: skip
    names = {
        **q, "kv_a_proj_with_mqa.weight": (shape.cache_width, hidden), "kv_a_layernorm.weight": (shape.kv_rank,),
        "kv_b_proj.weight": (heads * (shape.nope_dim + shape.v_dim), shape.kv_rank),
        "o_proj.weight": (hidden, heads * shape.v_dim),
    }  # fmt: skip
    return {f"self_attn.{name}": size for name, size in names.items()}


def rotation_in_halves(config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Rows that make rotated dimensions, from pairs (x0, y0, x1, y1, …) to halves (x0, x1, …, y0, y1, …), as the rotation here
    wants them. It is one order for queries and keys, so that no score changes."""
    shape = config.mla
    assert shape is not None
    if not shape.interleaved:
        return tensor
    if name.endswith("kv_a_proj_with_mqa.weight"):
        latent, key = tensor.split([shape.kv_rank, shape.rope_dim])
        return torch.cat((latent, _halves(key.unsqueeze(0)).squeeze(0)))
    if name.endswith(("q_proj.weight", "q_b_proj.weight")):
        nope, rotated = tensor.unflatten(0, (config.num_heads, -1)).split([shape.nope_dim, shape.rope_dim], dim=1)
        return torch.cat((nope, _halves(rotated)), dim=1).flatten(0, 1)
    return tensor


def _halves(rows: Tensor) -> Tensor:
    """[heads, rope_dim, in], the rows of each head reordered."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)
