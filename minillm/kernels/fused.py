"""Small operators of a layer, each in one pass over memory: residual sum and norm, rotation and KV write, gated activation.

None of them does enough arithmetic to matter: their time is bytes moved plus one launch each. Apart, the sum writes what the norm
reads back, SiLU writes what the product reads back, rotation writes what the store reads back. In one kernel those values stay in
registers. Arithmetic is float32, whatever the tensors are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minillm.cache.kv_store import KVStore, PlainKVStore
from minillm.model.config import ModelConfig
from minillm.model.layers import Operators
from minillm.perf.work import Work


@triton.jit
def rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, stride_x, stride_delta, eps, width,
    HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program: h = x + delta, out = h / rms(h) · weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(x_ptr + row * stride_x + at, mask=there, other=0.0)
    if HAS_DELTA:
        # rounded to the tensors' dtype before the norm, as two operators would
        x = (x.to(tl.float32) + tl.load(delta_ptr + row * stride_delta + at, mask=there, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + at, x, mask=there)
    h = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, (h * scale * weight).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def rope_store_kernel(
    qk_ptr, v_ptr, cos_ptr, sin_ptr, slots_ptr, q_out_ptr, kv_ptr,
    stride_qk_token, stride_qk_head, stride_v_token, stride_v_head, stride_cos, stride_sin, stride_slot, stride_kv,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token and head of q, k or v: rotate q and k; q goes to q_out, k and v to the token's slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK)
    there = d < half
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if head < HEADS + KV_HEADS:
        x_at = qk_ptr + token * stride_qk_token + head * stride_qk_head + d
        a = tl.load(x_at, mask=there, other=0.0).to(tl.float32)
        b = tl.load(x_at + half, mask=there, other=0.0).to(tl.float32)
        cos_at, sin_at = cos_ptr + token * stride_cos + d, sin_ptr + token * stride_sin + d
        # the first half's sine is stored negative
        first = a * tl.load(cos_at, mask=there, other=0.0) + b * tl.load(sin_at, mask=there, other=0.0)
        second = b * tl.load(cos_at + half, mask=there, other=0.0) + a * tl.load(sin_at + half, mask=there, other=0.0)
        if head < HEADS:
            to = q_out_ptr + (token * HEADS + head) * HEAD_DIM + d
            tl.store(to, first.to(q_out_ptr.dtype.element_ty), mask=there)
            tl.store(to + half, second.to(q_out_ptr.dtype.element_ty), mask=there)
        else:
            to = kv_ptr + slot * stride_slot + (head - HEADS) * HEAD_DIM + d
            tl.store(to, first.to(kv_ptr.dtype.element_ty), mask=there & (slot >= 0))
            tl.store(to + half, second.to(kv_ptr.dtype.element_ty), mask=there & (slot >= 0))
    else:
        kv_head = head - HEADS - KV_HEADS
        v_at = v_ptr + token * stride_v_token + kv_head * stride_v_head + d
        to = kv_ptr + slot * stride_slot + stride_kv + kv_head * HEAD_DIM + d
        tl.store(to, tl.load(v_at, mask=there, other=0.0), mask=there & (slot >= 0))
        tl.store(to + half, tl.load(v_at + half, mask=there, other=0.0), mask=there & (slot >= 0))


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    """silu(gate) · up for BLOCK columns of one row; gate and up lie side by side."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    gate = tl.load(gate_up_ptr + row * stride + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + at, mask=there, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + at, out.to(out_ptr.dtype.element_ty), mask=there)


SWIGLU_BLOCK = 1024


def norm_block(width: int) -> tuple[int, int]:
    """Columns of a program, a power of two that holds a whole row, and its warps."""
    block = triton.next_power_of_2(width)
    return block, min(16, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x, delta [..., width] → (x + delta, its norm times weight [width]); without delta the first is x itself."""
    width = x.shape[-1]
    rows, more = _rows(x), None if delta is None else _rows(delta)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(out)
    if rows.shape[0]:
        block, warps = norm_block(width)
        other = rows if more is None else more
        rms_norm_kernel[(rows.shape[0],)](
            rows, other, weight, total, out, rows.stride(0), other.stride(0), eps, width,
            HAS_DELTA=more is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return total, out


def rope_store(q_and_k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: Tensor) -> Tensor:
    """Rotate, and write the KV cache.

    q_and_k [tokens, heads + kv_heads, head_dim], v [tokens, kv_heads, head_dim], last dimensions dense; cos, sin
    [tokens, 1, head_dim]; slots [tokens], a negative one writes nothing; kv [slots, 2, kv_heads, head_dim]. Returns the rotated
    queries [tokens, heads, head_dim].
    """
    tokens, kv_heads, head_dim = v.shape
    heads = q_and_k.shape[1] - kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=q_and_k.dtype, device=q_and_k.device)
    if tokens:
        rope_store_kernel[(tokens, heads + 2 * kv_heads)](
            q_and_k, v, cos, sin, slots, q, kv, q_and_k.stride(0), q_and_k.stride(1), v.stride(0), v.stride(1),
            cos.stride(0), sin.stride(0), kv.stride(0), kv.stride(1),
            HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK=triton.next_power_of_2(head_dim // 2), num_warps=1,
        )  # fmt: skip
    return q


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [rows, 2 · width] → silu(gate) · up, [rows, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        swiglu_kernel[(rows, triton.cdiv(width, SWIGLU_BLOCK))](
            gate_up, out, gate_up.stride(0), width, BLOCK=SWIGLU_BLOCK, num_warps=4
        )
    return out


def _rows(x: Tensor) -> Tensor:
    """[..., width] → [rows, width] with a dense last dimension; a copy only where the strides allow no view."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


class FusedOperators(Operators):
    """The operators of ``minillm.model.layers`` on these kernels, with what they move counted."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)[1]

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, eps, delta)

    def rotate_and_store(
        self, q_and_k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: KVStore, layer: int
    ) -> Tensor:
        if type(store) is not PlainKVStore:  # another layout has its own way in
            return super().rotate_and_store(q_and_k, v, cos, sin, slots, store, layer)
        return rope_store(q_and_k, v, cos, sin, slots, store.layers[layer % len(store.layers)])

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def add_norm_work(self, rows: int, width: int, element: int) -> Work:
        """x, delta in; sum and norm out."""
        return Work(weight_bytes=width * element, activation_bytes=4 * rows * width * element, launches=1) if rows else Work()

    def rotate_and_store_work(self, tokens: int, config: ModelConfig, element: int) -> Work:
        """q, k, v in; q out, k and v into the store."""
        read = tokens * (config.q_size + 2 * config.kv_size)
        return Work(
            kv_write_bytes=2 * tokens * config.kv_size * element,
            activation_bytes=(read + tokens * config.q_size) * element,
            launches=1,
        )

    def swiglu_work(self, rows: int, width: int, element: int) -> Work:
        return Work(activation_bytes=3 * rows * width * element, launches=1)
