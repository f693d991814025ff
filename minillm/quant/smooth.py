"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): let the weights carry a part of what makes activations hard to round.

A few channels of the activations are far larger than the others, in every token. With one scale per token they take the levels
away from all others; a scale per channel cannot be taken out of a sum over channels. But y = (x / s)(W · diag(s))ᵀ is the same
product, and weights have levels to spare: s = max|x|^α / max|W|^(1 − α) per channel moves the difficulty there, the more the
larger the migration strength α is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Callable, Mapping

import torch
from torch import Tensor

from minillm.model.transformer import Layer, Transformer
from minillm.quant.calibrate import LINEARS, Seen
from minillm.quant.fold import fold_scales, multiply_inputs, shared_by_heads
from minillm.quant.grid import Codes, quantise
from minillm.quant.w8a8 import quantise_rows

STRENGTHS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SMALLEST = 1e-5
"""Channels that never fire, and columns of zeros, count as this large."""

Share = Callable[[Tensor], Tensor]


def rounded_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] Wᵀ with both in 8 bits, as the engine computes it: [rows, out]."""
    codes, scales = quantise_rows(x)
    rounded = quantise(weight, 8, -1, True).dequantise(x.dtype)
    return codes.to(x.dtype) @ rounded.t() * scales.to(x.dtype)


def product_loss(weight: Tensor, x: Tensor, scales: Tensor | None = None) -> float:
    """Mean over rows of the squared distance between x Wᵀ and its product in 8 bits, inputs divided by scales [in]."""
    rounded = rounded_product(x, weight) if scales is None else rounded_product(x / scales, weight * scales)
    return float((rounded - x @ weight.t()).square().sum(1).mean())


def migration(weight: Tensor, peak: Tensor, strength: float, share: Share = lambda values: values) -> Tensor:
    """The scales [in] of one strength. weight [out, in]; peak [in]: the largest |x| of each channel. share: makes values of
    channels equal that must have one scale."""
    activations, weights = share(peak.clamp(min=SMALLEST)), share(weight.abs().amax(0).clamp(min=SMALLEST))
    scales = activations**strength / weights ** (1 - strength)
    return scales / (scales.max() * scales.min()).sqrt()


def search_migration(
    weight: Tensor, seen: Seen, strength: float | str | None = "search", share: Share = lambda values: values
) -> tuple[Tensor, float | None]:
    """Scales [in] and their strength: the one with the least loss on the inputs seen, or the one asked for.

    No migration at all (None) is among the candidates of a search, so that it is never worse than that."""
    if strength is None:
        return torch.ones_like(seen.peak), None
    if strength != "search":
        return migration(weight, seen.peak, float(strength), share), float(strength)
    best: tuple[Tensor, float | None] = torch.ones_like(seen.peak), None
    least = product_loss(weight, seen.sample)
    for candidate in STRENGTHS:
        scales = migration(weight, seen.peak, candidate, share)
        loss = product_loss(weight, seen.sample, scales)
        if loss < least:
            best, least = (scales, candidate), loss
    return best


def smooth_layer(
    work: Transformer, strength: float | str | None, keep: Callable[[str, Codes, float, float, float | None], None],
    prefix: str, layer: Layer, seen: Mapping[str, Seen],
) -> None:  # fmt: skip
    """Migrate and round the products of one layer. keep(name, codes, loss of rounding as it was, loss now, strength)."""
    c, now = work.config, dict(seen)
    before: dict[str, Tensor] = {}
    found: dict[str, float | None] = {}

    def scaled(name: str) -> Tensor:
        linear = LINEARS[name](layer)
        before[name] = linear.weight
        by_head = partial(shared_by_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim)
        share: Share = by_head if name == "self_attn.o_proj" else lambda values: values
        scales, found[name] = search_migration(linear.weight, seen[name], strength, share)
        multiply_inputs(layer, name, scales)
        now[name] = replace(seen[name], sample=seen[name].sample / scales)
        return scales

    fold_scales(c, layer, scaled)
    for name, find in LINEARS.items():
        linear, full = find(layer), f"{prefix}.{name}"
        codes = quantise(linear.weight, 8, -1, True, full)
        plain = product_loss(before[name], seen[name].sample)
        keep(full, codes, plain, product_loss(linear.weight, now[name].sample), found[name])
        linear.replace(codes.dequantise(linear.weight.dtype), linear.bias)
