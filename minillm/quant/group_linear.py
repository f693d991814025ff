"""A linear layer whose weight is held as codes, and the ways to multiply by it."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.perf.processor import has_matrix_units
from minillm.quant import words
from minillm.quant.config import check_layer
from minillm.quant.grid import Codes, dequantise, pack_bits, quantise, unpack_bits
from minillm.quant.linear import Forms, LinearMethod, Packed, PlainLinear, PrepackedLinear, Traffic, default_method

DENSE_FROM = 6
"""Rows from which 16-bit products on a CPU beat the packed kernels, which take a few at a time (level between 4 and 8 rows on two
cores with AMX; on two cores without they take 0.9 of the time at 8 rows and 1.35 at 32)."""
COMPILED_DENSE_FROM = 3
"""The same for a compiled step on matrix units, whose 16-bit products lose less between them (8.5 ms in 4 bits against 11.0 at
one row, 10.0 against 11.1 at two, 13.6 against 12.3 at four)."""
TILE = 1 << 22
"""Weights that are dequantised at a time: the scratch memory of a product without a kernel."""
KERNEL_GROUPS = (256, 128, 64, 32)
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GroupLinear:
    """A LinearMethod for weights on a grid (``minillm.quant.grid``).

    What pack keeps shows how apply multiplies. "int4": torch's int4 kernel for CPUs. "int8": its kernel for symmetric channels of
    8 bits. "qweight": the Triton kernel for 4 bits, which unpacks the weight for torch's product where rows are many. "codes": a
    stream of bits, dequantised tile by tile at every product, whatever the bits, group, dtype and device. "dense_copy", beside
    one of these: the dequantised weight, for steps of many rows.

    kernel: "auto" is Triton's on a GPU and torch's on a CPU, where they can; "triton" is a ValueError where it cannot.
    codes: a weight that was quantised already, by AWQ or GPTQ; the first pack then takes it instead of rounding its argument.
    """

    def __init__(
        self, bits: int, group: int, symmetric: bool, dense_from: int | None | Literal["auto"] = "auto", *,
        kernel: Literal["auto", "torch", "triton"] = "auto", codes: Codes | None = None, name: str = "the weight",
    ):  # fmt: skip
        check_layer(bits, group, symmetric, dense_from, kernel)
        self.bits, self.group, self.symmetric, self.name = bits, group, symmetric, name
        self.kernel, self._dense_from, self._codes = kernel, dense_from, codes

    @property
    def threshold(self) -> int | None:
        """Rows from which the dense copy is multiplied by, where pack made one."""
        return DENSE_FROM if self._dense_from == "auto" else self._dense_from

    def pack(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
        codes, self._codes = self._codes, None  # handed over: two copies would stay in memory
        if codes is None:
            codes = quantise(weight, self.bits, self.group, self.symmetric, self.name)
        else:
            codes.check(weight, self.bits, self.group, self.name)
        packed = self._store(codes, weight.dtype, weight.device)
        auto = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and "codes" not in packed
        if auto if self._dense_from == "auto" else self._dense_from is not None:
            dense = codes.dequantise(weight.dtype).to(weight.device)
            packed["dense_copy"] = default_method(weight.dtype, weight.device).pack(dense, None)["weight"]
        # "like" holds nothing: its shape and dtype are those of a row of the weight
        return {**packed, "like": weight.new_empty(0, weight.shape[1]), "bias": bias}

    def _store(self, codes: Codes, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor | None]:
        if self.kernel == "triton" or (self.kernel == "auto" and device.type == "cuda"):
            reason = words.refused(codes, dtype, device)
            if reason is None:
                return words.to_words(codes, device)
            if self.kernel == "triton":
                raise ValueError(f"kernel='triton' of {self.name}: {reason}")
        out_features, in_features = codes.codes.shape
        # the kernels read beyond rows that are no multiple of their vectors, and keep scales in the model's dtype
        fits = out_features % 16 == 0 and in_features % 32 == 0
        if device.type == "cpu" and dtype in KERNEL_DTYPES and fits and _keeps_scales(codes, dtype):
            if codes.bits == 4 and codes.group % 32 == 0:
                return _to_int4(codes, dtype)
            if codes.bits == 8 and codes.scales.shape[1] == 1 and bool((codes.zeros == 128).all()):
                signed = (codes.codes.to(torch.int16) - 128).to(torch.int8)
                return {"int8": signed, "scales": codes.scales.flatten().to(dtype)}
        half = codes.scales.bfloat16()  # a grid of ours loses nothing by it
        return {
            "codes": pack_bits(codes.codes, codes.bits).to(device), "zeros": codes.zeros.to(device),
            "scales": (half if torch.equal(half.float(), codes.scales) else codes.scales).to(device),
        }  # fmt: skip

    def apply(self, packed: Packed, x: Tensor) -> Tensor:
        bias = packed["bias"]
        if self._reads_copy(packed, x.shape[0]):
            dense = packed["dense_copy"]
            assert dense is not None
            method = PrepackedLinear() if dense.is_mkldnn else PlainLinear()
            return method.apply({"weight": dense, "bias": bias}, x)
        if "qweight" in packed:
            return words.multiply(packed, x)
        if "int4" in packed:
            pairs = packed["scales_and_offsets"]
            assert pairs is not None
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed["int4"], x.shape[1] // pairs.shape[0], pairs)
        elif "int8" in packed:
            y = torch._weight_int8pack_mm(x.contiguous(), packed["int8"], packed["scales"])  # type: ignore[arg-type]
        else:
            y = self._by_tile(packed, x)
        return y if bias is None else y + bias

    def about(self, packed: Packed) -> str:
        """How it multiplies, in a phrase."""
        if "qweight" in packed:
            return words.about()
        if "int4" in packed or "int8" in packed:
            return f"torch's {'int4' if 'int4' in packed else 'int8'} kernel"
        return "dequantised tile by tile"

    def _reads_copy(self, packed: Packed, rows: int) -> bool:
        threshold = self.threshold
        return "dense_copy" in packed and threshold is not None and rows >= threshold

    def _by_tile(self, packed: Packed, x: Tensor) -> Tensor:
        stream, scales, zeros = packed["codes"], packed["scales"], packed["zeros"]
        assert stream is not None and scales is not None and zeros is not None
        width = x.shape[1]
        height = max(1, TILE // width)
        tiles = []
        for start in range(0, stream.shape[0], height):
            part = slice(start, start + height)
            codes = unpack_bits(stream[part], self.bits, width)
            tiles.append(F.linear(x, dequantise(codes, scales[part].float(), zeros[part]).to(x.dtype)))
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-1)

    def traced(self, packed: Packed) -> Forms:
        """The codes for few rows; from the threshold on the dense copy, if there is one, as torch's compiler packs it."""
        forms: dict[int, tuple[LinearMethod, Packed]] = {}
        if "int4" in packed or "int8" in packed:
            forms[1] = self, {name: tensor for name, tensor in packed.items() if name != "dense_copy"}
        if "dense_copy" in packed:
            auto = COMPILED_DENSE_FROM if has_matrix_units() else DENSE_FROM
            threshold = auto if self._dense_from == "auto" else self._dense_from
            assert threshold is not None
            copied: Packed = {"weight": packed["dense_copy"], "bias": packed["bias"]}
            forms[threshold] = PlainLinear().traced(copied)[1]
        if 1 not in forms:
            raise ValueError(
                f"{self.name} is {self.about(packed)}; torch's compiler multiplies by 4 bits in groups that are multiples of 32 "
                "and by 8 bits on a symmetric grid per channel, on a CPU, in 16 or 32 bits that have room for the scales"
            )
        return forms

    def unpack(self, packed: Packed) -> Tensor:
        like = packed["like"]
        assert like is not None
        return self.codes(packed).dequantise(like.dtype)

    def codes(self, packed: Packed) -> Codes:
        """The quantised weight that pack was given or made."""
        scales, like = packed.get("scales"), packed["like"]
        assert like is not None
        if "int4" in packed:
            return _from_int4(packed, self.group)
        assert scales is not None
        if "qweight" in packed:
            return words.from_words(packed, like.shape[1] if self.group == -1 else self.group)
        if "int8" in packed:
            signed = packed["int8"]
            assert signed is not None
            zeros = torch.full((len(scales), 1), 128, dtype=torch.uint8)
            return Codes((signed.to(torch.int16) + 128).to(torch.uint8), scales.float().unsqueeze(1), zeros, 8)
        stream, integers = packed["codes"], packed["zeros"]
        assert stream is not None and integers is not None
        return Codes(unpack_bits(stream, self.bits, like.shape[1]), scales.float(), integers, self.bits)

    def traffic(self, packed: Packed, rows: int) -> Traffic:
        """What a product of so many rows really reads: the copy or the packed weight; a dequantised tile is scratch."""
        kept = {name: t.nbytes for name, t in packed.items() if t is not None}
        copy, bias = kept.pop("dense_copy", 0), kept.get("bias", 0)
        if self._reads_copy(packed, rows):
            return Traffic(copy + bias)
        if "qweight" in packed:
            return words.traffic(packed, rows)
        scales, like = packed.get("scales"), packed["like"]
        assert like is not None
        dense = len(scales) * like.shape[1] * like.dtype.itemsize if "codes" in packed and scales is not None else 0
        return Traffic(sum(kept.values()), scratch_bytes=2 * dense)


def _keeps_scales(codes: Codes, dtype: torch.dtype) -> bool:
    """Whether rounding the scales to dtype moves no weight by more than half a step more: float16 has few bits for small ones."""
    lost = (codes.scales.to(dtype).float() - codes.scales).abs()
    return bool((lost * 2**codes.bits <= codes.scales.abs() / 2).all())


def _to_int4(codes: Codes, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """torch's kernel computes (code - 8) · scale + offset, with groups of 32 to 256: a larger one is cut into equal parts."""
    kernel_group = next(g for g in KERNEL_GROUPS if codes.group % g == 0)
    scales = codes.scales.repeat_interleave(codes.group // kernel_group, dim=1)
    zeros = codes.zeros.repeat_interleave(codes.group // kernel_group, dim=1)
    pairs = torch.stack([scales, (8 - zeros.float()) * scales], dim=-1).transpose(0, 1).contiguous()  # [groups, out, 2]
    return {
        "int4": torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.codes.to(torch.int32), 1),
        "scales_and_offsets": pairs.to(dtype),
    }  # fmt: skip


def _from_int4(packed: Packed, group: int) -> Codes:
    pairs, like, kept = packed["scales_and_offsets"], packed["like"], packed["int4"]
    assert pairs is not None and like is not None and kept is not None
    width = like.shape[1]
    scales, offsets = pairs.float().transpose(0, 1).unbind(-1)
    zeros = (8 - offsets / scales).round().to(torch.uint8)
    codes = torch.empty(scales.shape[0] * width, dtype=torch.uint8)
    codes[_places(scales.shape[0], width)] = _nibbles(kept)
    repeats = (width if group == -1 else group) * pairs.shape[0] // width
    return Codes(codes.unflatten(0, (-1, width)), scales[:, ::repeats].contiguous(), zeros[:, ::repeats].contiguous(), 4)


def _places(out_features: int, in_features: int) -> Tensor:
    """Where in a weight each nibble of the kernel's layout belongs. The layout is the CPU's affair, so the packing is asked: fed
    with the digits of each weight's own place, it returns them where it puts that weight's code."""
    own = torch.arange(out_features * in_features).view(out_features, in_features)
    places = torch.zeros(own.numel(), dtype=torch.int64)
    for shift in range(0, own.numel().bit_length(), 4):
        digit = (own >> shift & 15).to(torch.int32)
        places += _nibbles(torch.ops.aten._convert_weight_to_int4pack_for_cpu(digit, 1)).long() << shift
    return places


def _nibbles(packed: Tensor) -> Tensor:
    """The lower halves of all bytes, then the upper ones."""
    return torch.cat([packed.flatten() & 15, packed.flatten() >> 4])
