"""3.3 stretch: keep keys in 4 bits, with a scale for each channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.course.expect import Mismatch, bytes_held, describe, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.labs.kv_quantisation import lopsided, symmetric
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_3_3.common import SLACK
from minillm.quant.grid import Codes, dequantise, pack_bits, quantise, unpack_bits


def _keys(cls: Any, k: Tensor, watched: bool = False) -> Tensor:
    packed = cls().pack(k if watched else k.clone())
    if not isinstance(packed, dict) or not all(isinstance(t, Tensor) for t in packed.values()):
        items = packed.items() if isinstance(packed, dict) else ()
        wrong = ", ".join(f"{describe(x)} under {key!r}" for key, x in items if not isinstance(x, Tensor))
        raise Mismatch(f"pack gives a dict of tensors, got {wrong or describe(packed)}")
    back: Tensor = cls().unpack(packed)  # another object: everything lies in what pack gave
    expect_shape(back, list(k.shape), torch.float32, "unpack(pack(k))")
    return back


def _keys_near(cls: Any, k: Tensor, what: str) -> None:
    back = _keys(cls, k)
    if not bool(torch.isfinite(back).all()):
        raise Mismatch(f"{what}: got {float(back[~torch.isfinite(back)][0])}, expected finite numbers")
    step = (k.double().amax(0) - k.double().amin(0)) / 15
    error = (back.double() - k.double()).abs().amax(0)
    bad = (error > step * SLACK / 2 + k.double().abs().amax(0) * 1e-3).nonzero()
    if len(bad):
        head, i = bad[0].tolist()
        got, most = float(error[head, i]), float(step[head, i]) / 2
        raise Mismatch(f"{what}: channel {i} of head {head} is off by {got:.4g}, expected at most half a step, {most:.4g}")


def _stretch_shape(cls: Any) -> None:
    for tokens, heads, dim in ((32, 2, 8), (7, 3, 16)):
        _keys(cls, torch.randn(tokens, heads, dim))


def _stretch_by_hand(cls: Any) -> None:
    """Sixteen tokens whose channels are sixteen equal steps, up or down, from anywhere."""
    steps = torch.arange(16.0)[:, None, None]
    k = torch.cat([steps, 0.5 * steps - 4, 20 - steps, steps.flip(0) * 0.25], dim=-1).repeat(1, 2, 1)
    expect_equal(_keys(cls, k), k, atol=1e-2, what="channels of sixteen equal steps")


def _stretch_random(cls: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _keys_near(cls, torch.randn(32, 2, 8).to(dtype), f"random keys, {dtype}")


def _stretch_outlier(cls: Any) -> None:
    k = torch.randn(32, 2, 8)
    k[:, 0, 3] *= 200
    _keys_near(cls, k, "keys with one channel two hundred times as large")


def _stretch_far(cls: Any) -> None:
    k = torch.rand(32, 2, 8)
    k[:, :, 2] += 5
    k[:, :, 5] -= 6
    _keys_near(cls, k, "channels in [5, 6] and [−6, −5]")


def _stretch_constant(cls: Any) -> None:
    k = torch.randn(32, 2, 8)
    k[:, 0, 0], k[:, 1, 1] = 0.0, -3.0
    _keys_near(cls, k, "channels of equal numbers, one of them 0")


def _stretch_one(cls: Any) -> None:
    _keys_near(cls, torch.randn(1, 2, 8), "a single token")


def _stretch_state(cls: Any) -> None:
    k = torch.randn(32, 2, 8)
    with unchanged(k=k):
        _keys(cls, k, watched=True)


def _stretch_bytes(cls: Any) -> None:
    tokens, heads, dim = 128, 2, 8
    held, budget = bytes_held(cls().pack(torch.randn(tokens, heads, dim))), tokens * heads * dim // 2 + heads * dim * 8
    expect_at_most(held, budget, f"bytes held by {tokens} tokens of {heads} heads of {dim}")


STRETCH = Task(
    "3.3 stretch",
    "Keys in 4 bits, a scale for each channel",
    (
        NamedCheck("shape: what pack and unpack give", _stretch_shape, hint=2),
        NamedCheck("exact: channels of sixteen equal steps", _stretch_by_hand, hint=1),
        NamedCheck("random: at most half a step off", _stretch_random, hint=3),
        NamedCheck("edges: one large channel", _stretch_outlier, hint=1),
        NamedCheck("edges: channels far from 0", _stretch_far, hint=1),
        NamedCheck("edges: constant channels", _stretch_constant, hint=3),
        NamedCheck("edges: one token", _stretch_one, hint=3),
        NamedCheck("state: inputs unchanged", _stretch_state),
        NamedCheck("budget: bytes held", _stretch_bytes, hint=2),
    ),
    (
        "A channel is one dimension of one head over all tokens of the block. Stretch its grid from its smallest value to its\n"
        "largest: code = round((k - low) / step), k ≈ low + code * step. Nothing says that 0 must be on it.",
        "k [tokens, kv_heads, head_dim] → low, step [1, kv_heads, head_dim]; codes uint8 of the shape of k, from 0 to 15.\n"
        "Two codes share a byte: [tokens, kv_heads, head_dim / 2].",
        "low = k.amin(0, keepdim=True); step = ((k.amax(0, keepdim=True) - low) / 15).clamp(min=1e-30);\n"
        "both = codes[..., ::2] | codes[..., 1::2] << 4; back: torch.stack([both & 15, both >> 4], -1).flatten(-2).",
    ),
    references=(lopsided, symmetric, quantise, dequantise, pack_bits, unpack_bits, Codes),
)
