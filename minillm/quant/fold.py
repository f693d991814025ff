"""Scale the input channels of a layer's products and take the scales back where the inputs are made: the same function, other
numbers to round. Both AWQ and SmoothQuant do it, and differ in how they choose the scales."""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.model.layers import MLP
from minillm.model.transformer import Layer
from minillm.quant.calibrate import LINEARS
from minillm.quant.linear import Linear


def fold_scales(config: ModelConfig, layer: Layer, scaled: Callable[[str], Tensor]) -> None:
    """For each product of a layer, ``scaled(name)`` multiplies its input channels and returns the scales [in]; what makes the
    input is divided by them: the norm before, the rows of V, or the rows of the up projection.

    The scales of "self_attn.o_proj" must be equal for query heads that share a value head (``shared_by_heads``).
    """
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, MLP)  # a mixture of experts is refused before
    # first the two whose scales go into rows of another layer, then the two whose scales go into a norm
    by_head = scaled("self_attn.o_proj").view(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1)
    _divide_last_rows(attention.qkv, by_head)
    _divide_last_rows(mlp.gate_up, scaled("mlp.down_proj"))
    for name, norm in (("self_attn.qkv_proj", layer.attention_norm), ("mlp.gate_up_proj", layer.mlp_norm)):
        norm.weight = norm.weight / scaled(name)


def multiply_inputs(layer: Layer, name: str, scales: Tensor) -> None:
    """Multiply the input channels of one product by scales [in]."""
    linear = LINEARS[name](layer)
    linear.replace(linear.weight * scales, linear.bias)


def shared_by_heads(values: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """Mean over the query heads that read the same value head: [heads * head_dim] → the same shape, equal within a group."""
    grouped = values.view(kv_heads, -1, head_dim)
    return grouped.mean(1, keepdim=True).expand_as(grouped).reshape(-1)


def _divide_last_rows(linear: Linear, scales: Tensor) -> None:
    rows = torch.ones(linear.out_features, dtype=scales.dtype, device=scales.device)
    rows[-len(scales) :] = scales
    linear.replace(linear.weight / rows[:, None], None if linear.bias is None else linear.bias / rows)
