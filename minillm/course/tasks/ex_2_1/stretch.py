"""2.1 stretch: round to e4m3 numbers without the dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.course.expect import Mismatch, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.quant.fp8 import FP8Linear, to_e4m3


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _same(f: Any, x: Tensor, what: str) -> None:
    expect_equal(f(x), _e4m3(x), what=what)


def _stretch_shape(f: Any) -> None:
    expect_shape(f(torch.randn(3, 5)), [3, 5], torch.float32, "a matrix")


def _stretch_grid(f: Any) -> None:
    """Every finite e4m3 number is one already."""
    bits = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)
    _same(f, bits.view(torch.float8_e4m3fn).float(), "the 254 finite numbers of the format")


def _stretch_ties(f: Any) -> None:
    x = torch.tensor([1.0625, 1.1875, 1.3125, 17.0, 19.0, 272.0, -1.0625, 3.0625])
    _same(f, x, "halfway between two numbers: the one whose last bit is 0")


def _stretch_random(f: Any) -> None:
    for size in (1.0, 0.01, 100.0):
        _same(f, torch.randn(400) * size, f"random numbers of size {size:g}")


def _stretch_small(f: Any) -> None:
    step = 2.0**-9
    x = torch.tensor([0.0, 1.0, 0.4, 0.5, 1.5, 7.0, 7.6, 8.0]) * step
    _same(f, torch.cat([x, torch.tensor([1e-30])]), "numbers below 2^-6")


def _stretch_large(f: Any) -> None:
    _same(f, torch.tensor([448.0, 440.0, 463.0, 500.0, 1e9, -1e9, float("inf")]), "numbers beyond 448 become 448")


def _stretch_nan(f: Any) -> None:
    got = f(torch.tensor([1.0, float("nan"), 2.0]))
    if not bool(torch.isnan(got[1])) or got[[0, 2]].tolist() != [1.0, 2.0]:
        raise Mismatch(f"[1, NaN, 2] gives {got.tolist()}, expected [1, NaN, 2]")


def _stretch_state(f: Any) -> None:
    x = torch.randn(10)
    with unchanged(x=x):
        f(x)


STRETCH = Task(
    "2.1 stretch",
    "Round to e4m3 numbers without the dtype",
    (
        NamedCheck("shape: as it came", _stretch_shape),
        NamedCheck("exact: the numbers of the format", _stretch_grid, hint=1),
        NamedCheck("exact: halfway cases", _stretch_ties, hint=3),
        NamedCheck("random: many sizes", _stretch_random, hint=2),
        NamedCheck("edges: below the smallest normal number", _stretch_small, hint=1),
        NamedCheck("edges: beyond the largest", _stretch_large, hint=3),
        NamedCheck("edges: NaN", _stretch_nan, hint=3),
        NamedCheck("state: inputs unchanged", _stretch_state),
    ),
    (
        "A number of magnitude 2^e … 2^(e+1) lies on a grid of step 2^(e − 3): three bits of mantissa. The exponent goes down\n"
        "to −6; below, the step stays that of −6.",
        "exponent = floor(log2 |x|), at least −6: torch.frexp gives it exactly. step = 2 ** (exponent − 3), of x's shape.",
        "x = x.clamp(-448, 448); exponent = (torch.frexp(x)[1] - 1).clamp(min=-6);\n"
        "step = torch.ldexp(torch.ones_like(x), exponent - 3); (x / step).round() * step: ties go to even, NaN stays.",
    ),
    references=(to_e4m3, FP8Linear),
)
