"""4-bit weights in AutoAWQ's words, multiplied by the Triton kernel: what a 4-bit layer is on a GPU.

A linear layer [out, in] with groups of g is three tensors. qweight, int32 [in, out / 8]: eight neighbouring output channels of
one input channel share a word, and its nibbles, from the lowest, hold channels 0, 2, 4, 6, 1, 3, 5, 7. qzeros, int32
[in / g, out / 8]: zero points in the same order. scales [in / g, out]. A word whose top nibble is 8 or more is a negative int32,
and shifting it down brings ones from the left: each nibble is masked after its shift.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm import kernels
from minillm.quant.grid import Codes
from minillm.quant.linear import Packed, Traffic

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LONGEST = 256
"""Inputs of a group that the kernel unrolls: a longer one is cut into equal parts with one scale."""


def pack_words(codes: Tensor) -> Tensor:
    """uint8 [rows, out] of 4 bits → int32 [rows, out / 8]; ValueError where out is no multiple of 8."""
    if codes.shape[1] % 8:
        raise ValueError(f"the layout packs 8 output channels to a word; {codes.shape[1]} is not a multiple of 8")
    eight = codes.to(torch.int64).unflatten(1, (-1, 8))[:, :, list(ORDER)]
    words = (eight << torch.arange(0, 32, 4, device=codes.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_words(words: Tensor) -> Tensor:
    """What pack_words packed, uint8 [rows, out]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    nibbles = (words.unsqueeze(-1) >> shifts) & 15  # the sign comes down with the shift
    return nibbles[:, :, torch.tensor(ORDER, device=words.device).argsort()].flatten(1).to(torch.uint8)


def refused(codes: Codes, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel cannot multiply by these codes here; None when it can."""
    out_features = codes.codes.shape[0]
    if (reason := kernels.missing()) is not None:
        return reason
    if codes.bits != 4 or out_features % 8 or codes.group % 16:
        return (
            "the kernel multiplies by 4 bits in groups that are multiples of 16, with out_features that are a multiple of 8; got "
            f"{codes.bits} bits, groups of {codes.group}, {out_features} out_features"
        )
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernel computes in float32, float16 and bfloat16, got {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda":
        return None
    if not kernels.interpreted():
        return f"the kernel needs a GPU, or TRITON_INTERPRET=1 for tiny models; this model is on {device}"
    return "Triton's interpreter computes bfloat16 wrongly; use dtype='float32'" if dtype == torch.bfloat16 else None


def to_words(codes: Codes, device: torch.device) -> dict[str, Tensor | None]:
    """The three tensors. Scales have 16 bits where that loses nothing."""
    parts = 1 if codes.group <= LONGEST else next(codes.group // g for g in (256, 128, 64, 32, 16) if codes.group % g == 0)
    scales = codes.scales.repeat_interleave(parts, 1).T.contiguous()
    half = scales.half()
    return {
        "qweight": pack_words(codes.codes.T.contiguous()).to(device),
        "qzeros": pack_words(codes.zeros.repeat_interleave(parts, 1).T.contiguous()).to(device),
        "scales": (half if torch.equal(half.float(), scales) else scales).to(device),
    }


def from_words(packed: Packed, group: int) -> Codes:
    """What to_words was given; group as the layer has it."""
    words, zeros, scales = (packed[name] for name in ("qweight", "qzeros", "scales"))
    assert words is not None and zeros is not None and scales is not None
    step = group * len(scales) // len(words)  # parts of a group
    codes, kept = unpack_words(words).T.contiguous(), scales.float().T[:, ::step].contiguous()
    return Codes(codes, kept, unpack_words(zeros).T[:, ::step].contiguous(), 4)


def multiply(packed: Packed, x: Tensor) -> Tensor:
    """x [rows, in] times the weight, plus the bias."""
    from minillm.kernels.matmul import w4a16_matmul

    words, zeros, scales = (packed[name] for name in ("qweight", "qzeros", "scales"))
    assert words is not None and zeros is not None and scales is not None
    return w4a16_matmul(x, words, scales, zeros, len(words) // len(scales), packed["bias"])


def about() -> str:
    from minillm.kernels.matmul import MAX_ROWS

    return f"Triton's 4-bit kernel, from {MAX_ROWS + 1} rows dequantised for torch's product"


def traffic(packed: Packed, rows: int) -> Traffic:
    """As the kernel counts itself: its partial sums, or the dense weight of many rows, are scratch."""
    from minillm.kernels import matmul

    words, scales, like, bias = (packed[name] for name in ("qweight", "scales", "like", "bias"))
    assert words is not None and scales is not None and like is not None
    (k, n), group, element = (len(words), scales.shape[1]), len(words) // len(scales), like.dtype.itemsize
    splits = matmul.parts_of(rows, n, k, group, words.device)
    counted = matmul.work(rows, k, n, group, element, "", splits, scales.dtype.itemsize)
    return Traffic(
        counted.weight_bytes + (0 if bias is None else bias.nbytes),
        counted.activation_bytes - rows * (k + n) * element,
        launches=counted.launches,
    )
