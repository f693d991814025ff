"""FP8: weights and activations as e4m3 numbers of 8 bits (Micikevicius et al. 2022, arXiv 2209.05433), one scale per channel
and per token.

A float has the same relative error everywhere: what is small beside a token's largest number keeps its three bits of mantissa,
so that outliers cost less than with whole numbers, and what is large gets fewer. Only processors with such matrix units gain
time (NVIDIA from compute capability 8.9). Elsewhere the same numbers are multiplied in the model's dtype, and it says "emulated".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.quant.grid import SMALLEST_SCALE, check_finite
from minillm.quant.linear import Packed, Traffic
from minillm.quant.w8a8 import peaks, token_scales

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest e4m3 number."""


def native(device: torch.device | str, in_features: int, out_features: int) -> bool:
    """Whether a product of this shape runs on matrix units for e4m3 numbers with a scale per row."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(torch, "_scaled_mm"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0) and in_features % 16 == 0 and out_features % 16 == 0


def to_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in] → e4m3 [rows, in], scales bfloat16 [rows, 1]. The relative error of a number is at most 1/16, or, where it is
    below the scale / 64, at most scale / 1024."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    scales = token_scales(x, LARGEST)
    return (x.to(wide) / scales.to(wide)).clamp(-LARGEST, LARGEST).to(E4M3), scales


class FP8Linear:
    """A LinearMethod with e4m3 weights and activations. emulate: multiply in the model's dtype also where the hardware could."""

    def __init__(self, *, emulate: bool = False, name: str = "the weight"):
        self.emulate, self.name = emulate, name

    def pack(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
        check_finite(weight, self.name)
        scales = (peaks(weight) / LARGEST).clamp(min=SMALLEST_SCALE).float()
        e4m3 = (weight.float() / scales).clamp(-LARGEST, LARGEST).to(E4M3)
        return {"e4m3": e4m3, "scales": scales.flatten(), "like": weight.new_empty(0, weight.shape[1]), "bias": bias}

    def apply(self, packed: Packed, x: Tensor) -> Tensor:
        weight, channel, bias = packed["e4m3"], packed["scales"], packed["bias"]
        assert weight is not None and channel is not None
        codes, scales = to_e4m3(x)
        if self._is_native(weight):
            out = torch.bfloat16 if x.dtype != torch.float32 else torch.float32
            y = torch._scaled_mm(codes, weight.t(), scale_a=scales.float(), scale_b=channel[None], out_dtype=out).to(x.dtype)
        else:
            # e4m3 numbers are exact in every dtype here; float16 has no room for their sums
            wide = torch.float32 if x.dtype == torch.float16 else x.dtype
            y = F.linear(codes.to(wide), weight.to(wide)).mul_(channel.to(wide)).mul_(scales.to(wide)).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def unpack(self, packed: Packed) -> Tensor:
        weight, channel, like = packed["e4m3"], packed["scales"], packed["like"]
        assert weight is not None and channel is not None and like is not None
        return (weight.float() * channel[:, None]).to(like.dtype)

    def _is_native(self, weight: Tensor) -> bool:
        return not self.emulate and native(weight.device, weight.shape[1], weight.shape[0])

    def traffic(self, packed: Packed, rows: int) -> Traffic:
        """Emulated, the weight and the activations are written and read in the model's dtype as well, and multiplied in it."""
        weight, like = packed["e4m3"], packed["like"]
        assert weight is not None and like is not None
        held = sum(t.nbytes for t in packed.values() if t is not None)
        codes = 2 * rows * (like.shape[1] + 2)
        if self._is_native(weight):
            return Traffic(held, scratch_bytes=codes, precision="float8_e4m3fn")
        return Traffic(held, scratch_bytes=codes + 2 * (weight.numel() + rows * like.shape[1]) * like.dtype.itemsize)

    def about(self, weight: Tensor) -> str:
        """How it is multiplied, for a description."""
        return "on e4m3 matrix units" if self._is_native(weight) else "emulated: multiplied in the model's dtype"
