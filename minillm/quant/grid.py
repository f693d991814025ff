"""Grids of few levels: choose one for each group of weights, round to it, and come back.

A weight is code, a whole number of so many bits: w ≈ (code - zero) · scale, with one scale and zero per group of neighbours in a
row. Zero points are codes themselves, so that the weight 0 is always on the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-24
"""float16's smallest number: a scale never vanishes, whatever format it is stored in."""


@dataclass(frozen=True)
class Codes:
    """A quantised weight [out, in]. codes: uint8 [out, in]. scales: float32 [out, groups], each exact in bfloat16.
    zeros: uint8 [out, groups]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def check(self, weight: Tensor, bits: int, group: int, name: str = "the weight") -> None:
        """ValueError where these are not the codes of such a weight [out, in] on such a grid."""
        expected = tuple(weight.shape), bits, group_size(weight.shape[1], group, name)
        if (tuple(self.codes.shape), self.bits, self.group) != expected:
            want, got = (f"{list(shape)} in {b} bits and groups of {g}" for shape, b, g in
                         (expected, (self.codes.shape, self.bits, self.group)))  # fmt: skip
            raise ValueError(f"the codes of {name} must be {want}, got {got}")

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in]: exact in float32, then rounded to dtype."""
        return dequantise(self.codes, self.scales, self.zeros).to(dtype)


def group_size(in_features: int, group: int, name: str = "the weight") -> int:
    """Weights per group; ValueError where the row is no multiple of it."""
    size = in_features if group == -1 else group
    if size < 1 or in_features % size:
        raise ValueError(f"in_features {in_features} of {name} is not a multiple of group {group}")
    return size


def check_finite(weight: Tensor, name: str = "the weight") -> None:
    """ValueError for a number that is not finite, or that no scale, which has 32 bits, can reach."""
    # the extremes are NaN where any number is; asking each number takes ten times as long
    if weight.numel() and not torch.isfinite(torch.stack(weight.float().aminmax())).all():
        what = "beyond float32" if torch.isfinite(weight).all() else "that is not finite"
        raise ValueError(f"{name} holds a number {what} and cannot be quantised")


def choose_grid(weight: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale float32 and zero uint8 [..., 1] for each group weight [..., group].

    The grid always covers 0, also where all weights lie on one side of it: a zero point outside the codes would have to be cut
    off, and with it the group. Scales are rounded up to bfloat16, so that the largest weight stays within reach.
    """
    if symmetric:
        reach, middle = weight.abs().amax(-1, keepdim=True), 2 ** (bits - 1)
        scale = _storable(reach / (middle - 1))
        return scale, torch.full_like(scale, middle, dtype=torch.uint8)
    low, high = weight.amin(-1, keepdim=True).clamp(max=0), weight.amax(-1, keepdim=True).clamp(min=0)
    top = 2**bits - 1
    scale = _storable(high / top - low / top)  # not (high - low) / top, which can overflow
    return scale, (-low / scale).round().clamp(0, top).to(torch.uint8)


def _storable(scale: Tensor) -> Tensor:
    """Rounded up to bfloat16 and never 0, as float32."""
    scale = scale.float().clamp(min=SMALLEST_SCALE, max=torch.finfo(torch.bfloat16).max)
    return ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).clamp(max=torch.finfo(torch.bfloat16).max)


def to_codes(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The nearest codes, uint8, of weights under scales and zeros that broadcast."""
    return (weight / scale).add_(zero).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def quantise(weight: Tensor, bits: int, group: int, symmetric: bool, name: str = "the weight") -> Codes:
    """Round weight [out, in] to nearest. An error is at most half a scale."""
    size = group_size(weight.shape[1], group, name)
    grouped = (
        weight.double().unflatten(1, (-1, size)) if weight.dtype == torch.float64 else weight.float().unflatten(1, (-1, size))
    )
    check_finite(grouped, name)
    scale, zero = choose_grid(grouped, bits, symmetric)
    codes = to_codes(grouped, scale, zero, bits)
    return Codes(codes.flatten(1), scale.squeeze(-1), zero.squeeze(-1), bits)


def round_trip(weight: Tensor, bits: int, size: int, symmetric: bool) -> Tensor:
    """What quantise and dequantise make of a finite weight [out, in] in groups of size, without the codes: for searches."""
    grouped = (weight if weight.dtype == torch.float64 else weight.float()).unflatten(1, (-1, size))
    scale, zero = choose_grid(grouped, bits, symmetric)
    codes = (grouped / scale).add_(zero).round_().clamp_(0, 2**bits - 1)
    return codes.float().sub_(zero).mul_(scale).flatten(1).to(weight.dtype)


def dequantise(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """codes [out, in], scales and zeros [out, groups] → float32 [out, in]."""
    grouped = codes.unflatten(1, (scales.shape[1], -1)).to(torch.float32, copy=True)
    return grouped.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1)).flatten(1)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 [out, in] → uint8 [out, ceil(in * bits / 8)]: each row one stream of bits, lowest first."""
    shifts = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = ((codes.unsqueeze(-1) >> shifts) & 1).flatten(1)
    padded = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 8)).unflatten(1, (-1, 8))
    return (padded << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, bits: int, in_features: int) -> Tensor:
    """The codes uint8 [out, in] that pack_bits packed."""
    if 8 % bits == 0:  # codes do not cross bytes
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        return ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(1)[:, :in_features]
    single = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    stream = single.flatten(1)[:, : in_features * bits].unflatten(1, (-1, bits))
    return (stream << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(-1, dtype=torch.uint8)
