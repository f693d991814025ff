"""y = x · W with 4-bit weights and 16-bit activations, in the layout of AutoAWQ (weights: Lin et al. 2023, arXiv 2306.00978; the
kernel's aims are MARLIN's, Frantar et al. 2024, arXiv 2408.11743).

A decoding step multiplies a few rows by every weight: its time is the bytes of the weights. Four bits instead of sixteen are a
quarter of them, if unpacking costs less than it saves. So: each 32-bit word is loaded once and spread over eight columns in
registers; the codes q − z, whole numbers up to 15, are exact in 16 bits and go into the matrix units as they are; and the scale
of a group multiplies the 16 × N sums once per group instead of each weight. A tile of K never crosses a group.

With a few rows there are only N / BLOCK_N programs, fewer than processors, so K is split as well; the parts are summed in
float32. Beyond MAX_ROWS rows the products are bound by arithmetic, unpacking in every tile of rows is wasted, and the weight is
unpacked once for torch's 16-bit product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from minillm.kernels.flash_prefill import precision_of
from minillm.perf.work import Work

MAX_ROWS = 64
PACK = 8  # 4-bit codes in a word


@triton.jit
def unpack_codes(words, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_K, BLOCK_N / 8] words → [BLOCK_K, BLOCK_N] codes 0 … 15. Column j of eight lies in nibble 0, 4, 1, 5, 2, 6, 3, 7."""
    words = tl.interleave(words, words)
    words = tl.interleave(words, words)
    words = tl.interleave(words, words)
    column = tl.arange(0, BLOCK_N) % 8
    shift = ((column % 2) * 4 + column // 2) * 4
    # the shift keeps the sign of a word whose top nibble is 8 or more: the mask comes after it
    return (words >> tl.broadcast_to(shift[None, :], (BLOCK_K, BLOCK_N))) & 15


@triton.jit
def w4a16_kernel(
    x_ptr, qweight_ptr, qzeros_ptr, scales_ptr, bias_ptr, out_ptr, rows, N, K, k_per_split, stride_x, stride_part,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    block_n, block_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    word = block_n * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    words_in_row = N // 8
    k = tl.arange(0, BLOCK_K)
    m_in, n_in, word_in = m < rows, n < N, word < words_in_row
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = split * k_per_split
    for k0 in range(first, tl.minimum(first + k_per_split, K), GROUP):
        group = k0 // GROUP
        zero_words = tl.load(qzeros_ptr + group * words_in_row + word, mask=word_in, other=0)
        zeros = unpack_codes(zero_words[None, :], 1, BLOCK_N)
        scale = tl.load(scales_ptr + group * N + n, mask=n_in, other=0.0).to(tl.float32)
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.static_range(0, GROUP, BLOCK_K):
            at = (k0 + step + k).to(tl.int64)
            words = tl.load(qweight_ptr + at[:, None] * words_in_row + word[None, :], mask=word_in[None, :], other=0)
            x = tl.load(x_ptr + m.to(tl.int64)[:, None] * stride_x + at[None, :], mask=m_in[:, None], other=0.0)
            codes = (unpack_codes(words, BLOCK_K, BLOCK_N) - zeros).to(x.dtype)
            part = tl.dot(x, codes, part, input_precision=PRECISION)
        acc += part * scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
    at = split.to(tl.int64) * stride_part + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=m_in[:, None] & n_in[None, :])


@triton.jit
def sum_parts_kernel(parts_ptr, bias_ptr, out_ptr, size, N, num_splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = Σ over splits, in order, plus the column's bias."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(0, num_splits):
        total += tl.load(parts_ptr + split * size + at, mask=there, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % N, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def dequantise_kernel(
    qweight_ptr, qzeros_ptr, scales_ptr, out_ptr, N, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The dense weight [K, N], one tile within a group per program."""
    k0, block_n = tl.program_id(0).to(tl.int64) * BLOCK_K, tl.program_id(1)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    word = block_n * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    words_in_row, group = N // 8, k0 // GROUP
    at = k0 + tl.arange(0, BLOCK_K)
    zero_words = tl.load(qzeros_ptr + group * words_in_row + word, mask=word < words_in_row, other=0)
    words = tl.load(qweight_ptr + at[:, None] * words_in_row + word[None, :], mask=word[None, :] < words_in_row, other=0)
    scale = tl.load(scales_ptr + group * N + n, mask=n < N, other=0.0)
    codes = unpack_codes(words, BLOCK_K, BLOCK_N) - unpack_codes(zero_words[None, :], 1, BLOCK_N)
    weight = codes.to(tl.float32) * scale.to(tl.float32)[None, :]
    tl.store(out_ptr + at[:, None] * N + n[None, :], weight.to(out_ptr.dtype.element_ty), mask=n[None, :] < N)


@dataclass(frozen=True)
class MatmulTile:
    m: int
    n: int
    k: int
    warps: int
    stages: int


def matmul_tile(rows: int, group: int) -> MatmulTile:
    """k: the largest power of two up to 64 that divides the group, and at least the 16 of a matrix unit."""
    k = min(group & -group, 64)
    if rows <= 16:
        return MatmulTile(16, 128, k, 8, 3)
    if rows <= 32:
        return MatmulTile(32, 64, k, 4, 2)
    return MatmulTile(64, 64, k, 8, 2)  # with 4 warps Triton 3.6 spills on sm_80


def choose_splits(rows: int, out_features: int, in_features: int, group: int, tile: MatmulTile, processors: int) -> int:
    """Parts of K: enough programs to fill the processors twice, each with at least 512 of K and whole groups."""
    programs = -(-rows // tile.m) * -(-out_features // tile.n)
    return max(1, min(-(-2 * processors // programs), in_features // max(group, 512), 16))


def parts_of(rows: int, out_features: int, in_features: int, group: int, device: torch.device) -> int:
    """Parts of K that a product of so many rows is cut into on a device: whole groups each, none of them empty."""
    if not 0 < rows <= MAX_ROWS:
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return whole_parts(
        in_features, choose_splits(rows, out_features, in_features, group, matmul_tile(rows, group), processors), group
    )[1]


def whole_parts(in_features: int, parts: int, group: int) -> tuple[int, int]:
    """(K of a part, parts) for at most so many parts of whole groups."""
    size = triton.cdiv(triton.cdiv(in_features, parts), group) * group
    return size, triton.cdiv(in_features, size)


def dequantise(qweight: Tensor, scales: Tensor, qzeros: Tensor, group: int, dtype: torch.dtype | None = None) -> Tensor:
    """The dense weight [in, out] in dtype, the scales' own unless said; see ``w4a16_matmul`` for the layout."""
    k, n, group = _check(qweight, scales, qzeros, group)
    out = torch.empty((k, n), dtype=dtype or scales.dtype, device=scales.device)
    block = min(group & -group, 64)
    grid = (k // block, triton.cdiv(n, 128))
    dequantise_kernel[grid](qweight, qzeros, scales, out, n, GROUP=group, BLOCK_K=block, BLOCK_N=128, num_warps=4)
    return out


def w4a16_matmul(
    x: Tensor, qweight: Tensor, scales: Tensor, qzeros: Tensor, group: int, bias: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """x [rows, in] → [rows, out] in x's dtype, with weight[k, n] = (code[k, n] − zero[k // group, n]) · scale[k // group, n].

    qweight [in, out / 8] int32: eight columns of a row in a word, column j of eight in nibble 0, 4, 1, 5, 2, 6, 3, 7 (AutoAWQ's
    order). qzeros [in / group, out / 8] int32, packed alike. scales [in / group, out]. bias [out]. group: −1 is all of ``in``.
    num_splits: parts that ``in`` is cut into; chosen from the shape when None. ValueError names a shape that does not fit.
    """
    k, n, group = _check(qweight, scales, qzeros, group)
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x must be [rows, {k}] for this weight, got {tuple(x.shape)}")
    rows = x.shape[0]
    if rows > MAX_ROWS:
        dense = dequantise(qweight, scales, qzeros, group, x.dtype)
        return F.linear(x, dense.T, bias)
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = matmul_tile(rows, group)
    k_per_split, num_splits = whole_parts(k, num_splits or parts_of(rows, n, k, group, x.device), group)
    split = num_splits > 1
    target = torch.empty((num_splits, rows, n), dtype=torch.float32, device=x.device) if split else out
    grid = (triton.cdiv(n, tile.n), triton.cdiv(rows, tile.m), num_splits)
    w4a16_kernel[grid](
        x, qweight, qzeros, scales, x if bias is None else bias, target, rows, n, k, k_per_split, x.stride(0), rows * n,
        GROUP=group, HAS_BIAS=bias is not None and not split, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        PRECISION=precision_of(x.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if split:
        sum_parts_kernel[(triton.cdiv(rows * n, 1024),)](
            target, x if bias is None else bias, out, rows * n, n, num_splits, HAS_BIAS=bias is not None, BLOCK=1024, num_warps=4
        )
    return out


def _check(qweight: Tensor, scales: Tensor, qzeros: Tensor, group: int) -> tuple[int, int, int]:
    """in, out and the group's length in full."""
    k, n = qweight.shape[0], qweight.shape[1] * PACK
    group = k if group == -1 else group
    if group < 16 or group % 16 or k % group:
        raise ValueError(f"group must be −1 or a multiple of 16 that divides the {k} inputs, got {group}")
    for name, tensor, shape in (("scales", scales, (k // group, n)), ("qzeros", qzeros, (k // group, n // PACK))):
        if tuple(tensor.shape) != shape:
            what = f"for qweight {tuple(qweight.shape)} and group {group}"
            raise ValueError(f"{name} must be {shape} {what}, got {tuple(tensor.shape)}")
    return k, n, group


def work(
    rows: int, in_features: int, out_features: int, group: int, element: int, dtype: str, num_splits: int = 1,
    scale_element: int = 2,
) -> Work:  # fmt: skip
    """Codes, zeros and scales are read once; multiplications are those of the 16-bit product. Beyond MAX_ROWS the dense weight is
    written and read too. element, scale_element: bytes of an activation and of a scale."""
    groups = 1 if group == -1 else in_features // group
    stored = in_features * out_features // 2 + groups * out_features // 2 + groups * out_features * scale_element
    moved = rows * (in_features + out_features) * element
    if rows > MAX_ROWS:
        moved += 2 * in_features * out_features * element
    elif num_splits > 1:
        moved += 2 * num_splits * rows * out_features * 4
    return Work(
        flops={dtype: 2 * rows * in_features * out_features},
        weight_bytes=stored if rows else 0,
        activation_bytes=moved,
        launches=0 if not rows else 2 if rows > MAX_ROWS or num_splits > 1 else 1,
    )
