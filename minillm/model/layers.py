"""The small parts of a transformer layer: norm, rotary positions, gated MLP."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.config import ModelConfig, RopeConfig
from minillm.perf.work import Work
from minillm.quant.linear import Linear


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, tuple(self.weight.shape), self.weight, self.eps)

    def work(self, rows: int) -> Work:
        """rows of the weight's width; the arithmetic of the reduction is not a matmul and is left out."""
        if rows == 0:
            return Work()
        width, element = self.weight.numel(), self.weight.dtype.itemsize
        return Work(weight_bytes=width * element, activation_bytes=2 * rows * width * element, launches=1)


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020, arXiv 2002.05202), gate and up as one product."""

    def __init__(self, gate_up: Linear, down: Linear):
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def work(self, rows: int, fused: bool = False) -> Work:
        width, element = self.down.in_features, self.down.dtype.itemsize
        # silu reads gate and writes, the product reads that and up and writes; fused, what silu writes stays in a register
        activation = Work(activation_bytes=(3 if fused else 5) * rows * width * element, launches=1 if fused else 2)
        return self.gate_up.work(rows) + activation + self.down.work(rows)


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Angles per position, float32 [head_dim / 2], and the factor that scales cos and sin."""
    rope, dim = config.rope, config.head_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    base = 1.0 / rope.theta**exponent
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope, config)
    return base, 1.0  # "dynamic" changes angles only beyond the trained length, which the engine does not enter


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are slowed down by the factor, short ones kept, those between are blended."""
    original = rope.original_max_position or 8192
    wavelength = 2 * math.pi / base
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(base: Tensor, rope: RopeConfig, config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): dimensions that turn less than beta_slow times within the trained length are
    interpolated, those that turn more than beta_fast times are kept, and a ramp lies between."""
    dim, original = config.head_dim, rope.original_max_position or config.max_position

    def dimension_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = base / rope.factor * ramp + base * (1 - ramp)

    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return frequencies, magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return frequencies, magnitude(1.0)


def rope_table(config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """cos and sin of every position: [max_position, 2, head_dim]. Each half of a head has the same angles; the first half's sine
    is negative, so that a rotation is x · cos + swap_halves(x) · sin."""
    frequencies, scale = rope_frequencies(config)
    angles = torch.outer(torch.arange(config.max_position, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim]; cos, sin [tokens, 1, head_dim]."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, x.roll(half, dims=-1), sin)
