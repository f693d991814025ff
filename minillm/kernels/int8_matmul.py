"""y = s ⊙ (x · Wᵀ): whole numbers of 8 bits on a GPU's matrix units, summed in 32 bits, scaled before they are written.

Bytes go through the matrix units twice as fast as 16-bit numbers, and the tile of the sums stays in registers until the scale
of its column, and of its row where one is given, has been multiplied in: nothing of 32 bits is written. A second kernel rounds
the activations, one program a token: it reads them twice, once for their largest number, and writes a byte for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.perf.work import Work


@triton.jit
def int8_kernel(
    x_ptr, w_ptr, channel_ptr, out_ptr, rows, N, K, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # programs that run at the same time share rows and columns: GROUP tiles of rows for each tile of columns
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = pid % (GROUP * tiles_n)
    m = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_in, n_in = m < rows, n < N
    x_at = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for k0 in range(0, K, BLOCK_K):
        there = k0 + k < K
        x = tl.load(x_at + k0, mask=m_in[:, None] & there[None, :], other=0)
        w = tl.load(w_at + k0, mask=n_in[None, :] & there[:, None], other=0)
        sums = tl.dot(x, w, sums, out_dtype=tl.int32)
    y = sums.to(tl.float32) * tl.load(channel_ptr + n, mask=n_in, other=0.0)[None, :]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=m_in[:, None] & n_in[None, :])


@triton.jit
def round_rows_kernel(x_ptr, codes_ptr, scales_ptr, K, stride_x, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    """codes[row] = round(x[row] / scale), scale = max |x[row]| / 126.5 in bfloat16: see ``minillm.quant.w8a8.quantise_rows``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, K, BLOCK):
        x = tl.abs(tl.load(x_ptr + row * stride_x + start + at, mask=start + at < K, other=0.0).to(tl.float32))
        bad = bad | (x != x).to(tl.int32)  # maxima pass NaN over
        top = tl.maximum(top, x)
    scale = tl.maximum(tl.max(top, 0) / 126.5, SMALLEST)
    # to the nearest bfloat16, ties to even, on the bits
    bits = scale.to(tl.int32, bitcast=True)
    scale = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    scale = tl.where(tl.max(bad, 0) > 0, float("nan"), scale)
    tl.store(scales_ptr + row, scale)
    inverse = 1.0 / scale
    for start in range(0, K, BLOCK):
        there = start + at < K
        scaled = tl.load(x_ptr + row * stride_x + start + at, mask=there, other=0.0).to(tl.float32) * inverse
        scaled = tl.where(scaled == scaled, scaled, 0.0)
        # below 2^22 in magnitude, adding 1.5 · 2^23 rounds to the nearest whole number, ties to even, on every target
        code = (tl.minimum(tl.maximum(scaled, -127.0), 127.0) + 12582912.0) - 12582912.0
        tl.store(codes_ptr + row * K + start + at, code.to(tl.int8), mask=there)


@dataclass(frozen=True)
class Int8Tile:
    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8


def int8_tile(rows: int) -> Int8Tile:
    """Tall tiles where there are rows for them. A matrix unit takes 16 rows at least, and 32 bytes of K."""
    if rows <= 16:
        return Int8Tile(16, 64, 128, 4, 4)
    if rows <= 64:
        return Int8Tile(64, 64, 128, 4, 3)
    return Int8Tile(128, 128, 64, 8, 3)


def int8_matmul(x: Tensor, weight: Tensor, channel: Tensor, dtype: torch.dtype) -> Tensor:
    """x int8 [rows, in], weight int8 [out, in], channel float32 [out] → channel · (x · weightᵀ) [rows, out] in dtype.

    ValueError names a shape or a dtype that does not fit. in_features beyond 133,144 could pass 32 bits and are refused.
    """
    rows, k = x.shape
    n = weight.shape[0]
    if weight.shape[1] != k or channel.shape != (n,):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and channel {tuple(channel.shape)} do not fit")
    if x.dtype != torch.int8 or weight.dtype != torch.int8:
        raise ValueError(f"x and weight must be int8, got {x.dtype} and {weight.dtype}")
    if k > (2**31 - 1) // 127**2:
        raise ValueError(f"in_features must be at most {(2**31 - 1) // 127**2} for sums in 32 bits, got {k}")
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = int8_tile(rows)
    grid = (triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n),)
    int8_kernel[grid](
        x, weight.contiguous(), channel, out, rows, n, k, x.stride(0), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
        GROUP=tile.group, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def round_rows(x: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """x [rows, in] → codes int8 [rows, in], scales bfloat16 [rows, 1], as ``minillm.quant.w8a8.quantise_rows`` makes them.

    smallest: a token's scale is at least this."""
    rows, k = x.shape
    codes = torch.empty((rows, k), dtype=torch.int8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        x = x if x.stride(1) == 1 else x.contiguous()
        block = min(1024, triton.next_power_of_2(max(k, 16)))
        round_rows_kernel[(rows,)](x, codes, scales, k, x.stride(0), SMALLEST=smallest, BLOCK=block, num_warps=4)
    return codes, scales.to(torch.bfloat16)


def work(rows: int, in_features: int, out_features: int, element: int) -> Work:
    """Rounding reads a token twice and writes its codes; the product reads codes once and writes its result once."""
    if rows == 0:
        return Work()
    rounding = rows * (2 * in_features * element + in_features + 4)
    product = rows * (in_features + out_features * element)
    return Work(
        flops={"int8": 2 * rows * in_features * out_features}, weight_bytes=out_features * (in_features + 4),
        activation_bytes=rounding + product, launches=2,
    )  # fmt: skip
