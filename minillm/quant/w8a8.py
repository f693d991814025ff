"""W8A8: weights and activations in 8 bits, multiplied as whole numbers (SmoothQuant: Xiao et al. 2022, arXiv 2211.10438).

Weight-only formats move fewer bytes and compute in 16 bits as before. Here the arithmetic itself is cheaper: a matrix unit does
twice as many products of bytes as of 16-bit numbers. That pays where a step is bound by arithmetic, with many rows. What it
costs are the activations: each token is rounded to 255 levels under one scale of its own, at every product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm import kernels
from minillm.quant.grid import Codes, quantise
from minillm.quant.int8_gemm import LONGEST, REACH, Gemm, choose
from minillm.quant.linear import Packed, Traffic

SMALLEST = 2.0**-100
"""A token's scale never vanishes: tokens of zeros become codes of zero."""
TILE = 1 << 17
"""Activations that are rounded at a time, so that what is between two operators stays in the processor's cache."""


def quantise_rows(x: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Round each token to a scale of its own. x [rows, in] → codes int8 [rows, in] contiguous, scales bfloat16 [rows, 1].

    offset: 128 gives codes uint8, moved up by that (see ``Gemm.offset``).

    |x - code · scale| is at most half a scale. A scale is the token's largest number over 126.5, rounded to bfloat16: never so
    small that a code would pass 127. A token with a number that is not finite gets a scale that is not finite; others do not.
    """
    if not offset and x.is_cuda and kernels.missing() is None and x.dtype != torch.float64:
        from minillm.kernels.int8_matmul import round_rows

        return round_rows(x, SMALLEST)
    codes = torch.empty(x.shape, dtype=torch.uint8 if offset else torch.int8, device=x.device)
    scales = token_scales(x, REACH - 0.5)
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    inverse = 1 / scales.to(wide)
    height = max(1, TILE // max(1, x.shape[1]))
    for start in range(0, x.shape[0], height):
        part = slice(start, start + height)
        rounded = x[part].to(wide, copy=True).mul_(inverse[part]).round_()
        codes[part].copy_(rounded.add_(offset) if offset else rounded)
    return codes, scales


def token_scales(x: Tensor, reach: float) -> Tensor:
    """bfloat16 [rows, 1]: the largest |x| of each row over ``reach``."""
    return (peaks(x) / reach).to(torch.bfloat16).clamp_(min=SMALLEST)


def peaks(x: Tensor) -> Tensor:
    """The largest |x| of each row, [rows, 1]; NaN in a row with NaN.

    16-bit numbers without their sign are ordered like the whole numbers that their bits spell, and torch's maximum of whole
    numbers is eight times as fast as that of bfloat16."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return (x.view(torch.int16) & 0x7FFF).amax(1, keepdim=True).view(x.dtype).float()
    return x.abs().amax(1, keepdim=True)


class W8A8Linear:
    """A LinearMethod: one scale per output channel, one per token, products of whole numbers.

    What pack keeps: "codes" as the GEMM wants them, "scales" float32 [out]. Sums of whole numbers are exact in any order, so a
    token's result does not depend on the rows beside it, to the last bit.

    codes: a weight that was quantised already; the first pack then takes it instead of rounding its argument. gemm: a name from
    ``minillm.quant.int8_gemm``; "auto" is the fastest that this device has.
    """

    def __init__(self, gemm: str = "auto", *, codes: Codes | None = None, name: str = "the weight"):
        self._asked, self._codes, self.name = gemm, codes, name
        self.gemm: Gemm | None = None

    def pack(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
        width = weight.shape[1]
        if not 1 <= width <= LONGEST:
            raise ValueError(f"in_features {width} of {self.name} must be 1 to {LONGEST}: longer sums could pass 32 bits")
        codes, self._codes = self._codes, None
        if codes is None:
            codes = quantise(weight, 8, -1, True, self.name)
        else:
            codes.check(weight, 8, -1, self.name)
            if not (codes.zeros == 128).all():
                raise ValueError(f"the codes of {self.name} must be on a symmetric grid, with every zero at 128")
        self.gemm = choose(self._asked, weight.device, weight.dtype)
        signed = (codes.codes.to(torch.int16) - 128).clamp_(min=-REACH).to(torch.int8).to(weight.device)
        scales = codes.scales.flatten().to(weight.device)
        # "like" holds nothing: its shape and dtype are those of a row of the weight
        return {"codes": self.gemm.layout(signed), "scales": scales, "like": weight.new_empty(0, width), "bias": bias}

    def apply(self, packed: Packed, x: Tensor) -> Tensor:
        weight, channel, bias = packed["codes"], packed["scales"], packed["bias"]
        assert weight is not None and channel is not None and self.gemm is not None
        codes, scales = quantise_rows(x, self.gemm.offset)
        # float16 has no room for a sum that its token's scale has not shrunk yet
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype
        y = self.gemm.multiply(codes, weight, channel, wide).mul_(scales.to(wide)).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def unpack(self, packed: Packed) -> Tensor:
        codes, channel, like = packed["codes"], packed["scales"], packed["like"]
        assert codes is not None and channel is not None and like is not None
        plain = codes.to_dense().t() if codes.is_mkldnn else codes  # oneDNN holds it as [in, out]
        return (plain.to(torch.float32) * channel[:, None]).to(like.dtype)

    def traffic(self, packed: Packed, rows: int) -> Traffic:
        """The codes of the activations are written and read again; the arithmetic is in 8 bits."""
        like = packed["like"]
        assert like is not None
        held = sum(t.nbytes for t in packed.values() if t is not None)
        return Traffic(held, scratch_bytes=2 * rows * (like.shape[1] + 2), precision="int8")
