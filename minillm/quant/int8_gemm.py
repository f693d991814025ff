"""Products of whole numbers of 8 bits: every GEMM that torch has for them, behind one interface, and which one is taken."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from minillm import kernels
from minillm.perf.processor import multiplies_signs

REACH = 127
"""Codes lie in -127 … 127: -128 has no positive counterpart, and some processors need the room."""
LONGEST = (2**31 - 1) // REACH**2
"""Codes of a row whose products can be summed in 32 bits, whatever the codes are: 133,144."""


class Gemm(Protocol):
    """y[m, n] = channel[n] · Σ_k x[m, k] · w[n, k] in whole numbers, exact up to the last multiplication."""

    name: str
    about: str

    @property
    def offset(self) -> int:
        """What the codes of x are moved up by for it: 0, or 128 and they are uint8."""
        ...

    def layout(self, codes: Tensor) -> Tensor:
        """Codes int8 [out, in] → what multiply reads."""
        ...

    def multiply(self, x: Tensor, weight: Tensor, channel: Tensor, dtype: torch.dtype) -> Tensor:
        """x [rows, in] contiguous, int8 or moved up by the offset; weight as layout made it; channel float32 [out] → [rows, out]
        in dtype."""
        ...


class OneDNN:
    """oneDNN's int8 linear: the weight in the blocks that the matrix unit wants, the channel's scale applied to the sums while
    they are still in registers. The operator that torch's own exported int8 models end in.

    An x86 processor without a matrix unit multiplies bytes without a sign by bytes with one (VNNI): there the codes of x are
    moved up by 128, and oneDNN takes 128 times the weight's sums off again. Codes with a sign end in its reference code there,
    several hundred times as slow."""

    name, about = "onednn", "oneDNN's int8 linear"

    @property
    def offset(self) -> int:
        return 0 if multiplies_signs() else 128

    def layout(self, codes: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(codes.contiguous(), None)

    def multiply(self, x: Tensor, weight: Tensor, channel: Tensor, dtype: torch.dtype) -> Tensor:
        no_zero = torch.zeros(1, dtype=torch.int64)
        return torch.ops.onednn.qlinear_pointwise(
            x, 1.0, self.offset, weight, channel, no_zero, None, 1.0, 0, dtype, "none", [], ""
        )  # fmt: skip


class IntMM:
    """torch._int_mm: the 32-bit sums are written to memory and scaled by a second operator. Exact in float64 too."""

    name, about, offset = "int_mm", "torch._int_mm", 0

    def layout(self, codes: Tensor) -> Tensor:
        return codes.contiguous()

    def multiply(self, x: Tensor, weight: Tensor, channel: Tensor, dtype: torch.dtype) -> Tensor:
        # with one column torch 2.13 takes the strides wrong and reads what is not there
        sums = torch._int_mm(x, weight.t()) if x.shape[1] > 1 else x.int() * weight.t().int()
        return _scaled(sums, channel, dtype)


class InFloat:
    """The same whole numbers multiplied as float32, in parts of the row whose sums stay below 2^24 and are therefore exact. For
    devices that have nothing better, and the reference of the others."""

    name, about, offset = "float", "float32 products of the codes", 0
    PART = 2**24 // REACH**2

    def layout(self, codes: Tensor) -> Tensor:
        return codes.contiguous()

    def multiply(self, x: Tensor, weight: Tensor, channel: Tensor, dtype: torch.dtype) -> Tensor:
        parts = zip(x.split(self.PART, dim=1), weight.split(self.PART, dim=1), strict=True)
        sums = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
        for some, others in parts:
            sums += (some.float() @ others.float().t()).to(torch.int32)
        return _scaled(sums, channel, dtype)


class Triton:
    """The kernel in ``minillm.kernels.int8_matmul``."""

    name, about, offset = "triton", "minillm's Triton int8 kernel", 0

    def layout(self, codes: Tensor) -> Tensor:
        return codes.contiguous()

    def multiply(self, x: Tensor, weight: Tensor, channel: Tensor, dtype: torch.dtype) -> Tensor:
        from minillm.kernels.int8_matmul import int8_matmul

        return int8_matmul(x, weight, channel, dtype)


def moved(codes: Tensor, offset: int) -> Tensor:
    """int8 codes as a GEMM of this offset takes them: adding 128 to a byte turns its first bit over."""
    return (codes ^ -128).view(torch.uint8) if offset else codes


def _scaled(sums: Tensor, channel: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (sums.to(wide) * channel.to(wide)).to(dtype)


GEMMS: dict[str, Gemm] = {g.name: g for g in (OneDNN(), IntMM(), InFloat(), Triton())}


def usable(name: str, device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether this GEMM runs on this device, gives this dtype, and was seen to be exact there."""
    kind = torch.device(device).type
    if name == "onednn":
        return kind == "cpu" and dtype != torch.float64 and _exact_on_cpu(name)
    if name == "int_mm":
        return kind == "cpu" and _exact_on_cpu(name)
    if name == "triton":
        runs = kind == "cuda" or (kind == "cpu" and kernels.interpreted())
        return runs and dtype != torch.float64 and kernels.missing() is None
    return name == "float"


ORDER = {"cpu": ("onednn", "int_mm", "float"), "cuda": ("triton", "float")}
"""The fastest first. On two cores with AMX oneDNN's is, at every number of rows from 1 to 2048: see ``minillm bench --study
w8a8``. One GEMM for all numbers of rows also means one copy of the weight."""


def choose(name: str, device: torch.device | str, dtype: torch.dtype) -> Gemm:
    """The GEMM of this name; "auto" is the fastest that can be used. ValueError where the one named cannot."""
    if name != "auto":
        if name not in GEMMS:
            raise ValueError(f"gemm must be 'auto' or one of {', '.join(map(repr, GEMMS))}, got {name!r:.60}")
        if not usable(name, device, dtype):
            raise ValueError(f"gemm {name!r} cannot be used on {device} for {str(dtype).removeprefix('torch.')}")
        return GEMMS[name]
    order = ORDER.get(torch.device(device).type, ("float",))
    return GEMMS[next(one for one in order if usable(one, device, dtype))]


@cache
def _exact_on_cpu(name: str) -> bool:
    """Whether the largest codes are summed without an error: processors that add pairs of products in 16 bits saturate."""
    gemm = GEMMS[name]
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [-1, -1, -1, -1]], dtype=torch.int8).repeat(1, 16)
    codes, expected = signs * REACH, (signs.float() @ signs.float().t()) * REACH**2
    try:
        return torch.equal(gemm.multiply(moved(codes, gemm.offset), gemm.layout(codes), torch.ones(3), torch.float32), expected)
    except (RuntimeError, AttributeError):  # this torch build has no such operator, or the processor no such instructions
        return False
