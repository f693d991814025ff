"""The small parts of a transformer layer: norm, rotary positions, gated MLP."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.cache.kv_store import KVStore
from minillm.model.config import ModelConfig, RopeConfig
from minillm.perf.work import Work
from minillm.quant.linear import Linear


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.eps = eps

    def forward(self, x: Tensor, operators: "Operators | None" = None) -> Tensor:
        return (operators or PLAIN).norm(x, self.weight, self.eps)

    def after(self, x: Tensor, delta: Tensor, operators: "Operators") -> tuple[Tensor, Tensor]:
        """x + delta, and its norm."""
        return operators.add_norm(x, delta, self.weight, self.eps)

    def work(self, rows: int) -> Work:
        """rows of the weight's width; the arithmetic of the reduction is not a matmul and is left out."""
        return PLAIN.norm_work(rows, self.weight.numel(), self.weight.dtype.itemsize)


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020, arXiv 2002.05202), gate and up as one product."""

    def __init__(self, gate_up: Linear, down: Linear):
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: Tensor, operators: "Operators | None" = None) -> Tensor:
        return self.down((operators or PLAIN).swiglu(self.gate_up(x)))

    def linears(self) -> dict[str, Linear]:
        """Its linear layers by their names within the layer."""
        return {"mlp.gate_up_proj": self.gate_up, "mlp.down_proj": self.down}

    def dense_weights(self) -> dict[str, Tensor]:
        """The tensors that it was built from, by their names within the layer."""
        out: dict[str, Tensor] = {}
        for name, linear in self.linears().items():
            out[f"{name}.weight"], bias = linear.dense()
            if bias is not None:
                out[f"{name}.bias"] = bias
        return out

    def work(self, rows: int, operators: "Operators | None" = None) -> Work:
        activation = (operators or PLAIN).swiglu_work(rows, self.down.in_features, self.down.dtype.itemsize)
        return self.gate_up.work(rows) + activation + self.down.work(rows)


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Angles per position, float32 [rope_dim / 2], and the factor that scales cos and sin."""
    rope, dim = config.rope, config.rope_dim
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
    dim, original = config.rope_dim, rope.original_max_position or config.max_position

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
    """cos and sin of every position: [max_position, 2, rope_dim]. Each half of a head has the same angles; the first half's sine
    is negative, so that a rotation is x · cos + swap_halves(x) · sin."""
    frequencies, scale = rope_frequencies(config)
    angles = torch.outer(torch.arange(config.max_position, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim]; cos, sin [tokens, 1, head_dim]."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, x.roll(half, dims=-1), sin)


class Operators:
    """The small operators between a layer's products, each a torch operator or two, and what they move.

    A seam: an attention backend may carry its own as ``operators``, which the model then uses; what it does not override is this.
    rows are tokens, width is the elements of one, element the bytes of an element.
    """

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., width] / rms · weight [width]."""
        return F.rms_norm(x, tuple(weight.shape), weight, eps)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        x = x + delta
        return x, self.norm(x, weight, eps)

    def rotate_and_store(
        self, q_and_k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: KVStore, layer: int
    ) -> Tensor:
        """q_and_k [tokens, heads + kv_heads, head_dim], v [tokens, kv_heads, head_dim], cos and sin [tokens, 1, head_dim], slots
        [tokens] → rotated q [tokens, heads, head_dim]; rotated k, and v, are in the store."""
        kv_heads = v.shape[1]
        q_and_k = apply_rope(q_and_k, cos, sin)
        store.write(layer, slots, q_and_k[:, -kv_heads:], v)
        return q_and_k[:, :-kv_heads]

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of [rows, 2 · width] → [rows, width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def norm_work(self, rows: int, width: int, element: int) -> Work:
        if rows == 0:
            return Work()
        return Work(weight_bytes=width * element, activation_bytes=2 * rows * width * element, launches=1)

    def add_work(self, rows: int, width: int, element: int) -> Work:
        """A residual sum reads two and writes one."""
        return Work(activation_bytes=3 * rows * width * element, launches=1)

    def add_norm_work(self, rows: int, width: int, element: int) -> Work:
        return self.add_work(rows, width, element) + self.norm_work(rows, width, element)

    def rotate_and_store_work(self, tokens: int, config: ModelConfig, element: int) -> Work:
        rotated, new_kv = tokens * (config.q_size + config.kv_size), 2 * tokens * config.kv_size
        # rotate: x·cos is read and written, the roll too, and the sum reads both and writes
        rotation = Work(activation_bytes=7 * rotated * element, launches=3)
        # K and V are stacked (read and written), then read once more on their way into the store
        return rotation + Work(kv_write_bytes=new_kv * element, activation_bytes=3 * new_kv * element, launches=2)

    def swiglu_work(self, rows: int, width: int, element: int) -> Work:
        """silu reads gate and writes, the product reads that and up and writes."""
        return Work(activation_bytes=5 * rows * width * element, launches=2)


class CompiledOperators(Operators):
    """The same operators, counted as the compiled step runs them: fused into one, or riding on what reads their input anyway."""

    def add_work(self, rows: int, width: int, element: int) -> Work:
        return Work(activation_bytes=2 * rows * width * element)

    def rotate_and_store_work(self, tokens: int, config: ModelConfig, element: int) -> Work:
        """One operator rotates on the way to where q and k are wanted."""
        rotated, new_kv = tokens * (config.q_size + config.kv_size), 2 * tokens * config.kv_size
        moved = (rotated + tokens * config.q_size + new_kv) * element
        return Work(kv_write_bytes=new_kv * element, activation_bytes=moved, launches=1)

    def swiglu_work(self, rows: int, width: int, element: int) -> Work:
        """What silu writes stays in a register."""
        return Work(activation_bytes=3 * rows * width * element, launches=1)


PLAIN = Operators()
COMPILED = CompiledOperators()
