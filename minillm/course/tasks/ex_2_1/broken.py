"""2.1 break: find the scale that couples the tokens of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.course.expect import expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_2_1.common import whole_numbers
from minillm.quant.smooth import rounded_product
from minillm.quant.w8a8 import W8A8Linear, quantise_rows


def _layer() -> tuple[Tensor, Tensor, Tensor]:
    """Codes int8 [out, in] and channel scales [out] of a layer, and the weight that they stand for."""
    codes, channel = torch.randint(-127, 128, (12, 32), dtype=torch.int8), torch.rand(12) * 0.01 + 0.001
    return codes, channel, codes.float() * channel[:, None]


def _near(got: Any, x: Tensor, weight: Tensor, what: str) -> None:
    exact = x @ weight.t()
    expect_shape(got, list(exact.shape), torch.float32, what)
    for row in range(len(x)):
        size = exact[row].square().mean().clamp(min=1e-12)
        expect_at_most(float((got[row] - exact[row]).square().mean() / size), 2e-4, f"{what}: relative error of token {row}")


def _break_one(f: Any) -> None:
    codes, channel, weight = _layer()
    x = torch.randn(1, 32)
    _near(f(x.clone(), codes, channel), x, weight, "one token")


def _break_exact(f: Any) -> None:
    codes, channel, weight = _layer()
    x = whole_numbers(3, 32)
    expect_equal(f(x.clone(), codes, channel), x @ weight.t(), atol=0.5, what="tokens of whole numbers whose largest is 127")


def _break_equal(f: Any) -> None:
    codes, channel, weight = _layer()
    x = torch.rand(6, 32) * 2 - 1
    x[:, 0] = 1
    _near(f(x.clone(), codes, channel), x, weight, "six tokens of one size")


def _break_mixed(f: Any) -> None:
    codes, channel, weight = _layer()
    x = torch.randn(6, 32) * torch.tensor([0.01, 100.0, 1.0, 0.1, 1000.0, 10.0])[:, None]
    _near(f(x.clone(), codes, channel), x, weight, "tokens from 0.01 to 1000")


def _break_mates(f: Any) -> None:
    codes, channel, _ = _layer()
    x = torch.randn(4, 32)
    alone = f(x[2:3].clone(), codes, channel)
    x[0] *= 500
    expect_equal(f(x.clone(), codes, channel)[2:3], alone, what="a token's product, alone and beside a larger one")


def _break_zero(f: Any) -> None:
    codes, channel, _ = _layer()
    x = torch.randn(3, 32)
    x[1] = 0
    expect_equal(f(x, codes, channel)[1], torch.zeros(12), what="a token of zeros")


def _break_state(f: Any) -> None:
    codes, channel, _ = _layer()
    x = torch.randn(3, 32)
    with unchanged(x=x, codes=codes, channel=channel):
        f(x, codes, channel)


BREAK = Task(
    "2.1 break",
    "Find what couples the tokens of a batch",
    (
        NamedCheck("shape: one token", _break_one, hint=2),
        NamedCheck("exact: whole numbers", _break_exact, hint=2),
        NamedCheck("random: tokens of one size", _break_equal, hint=2),
        NamedCheck("random: tokens of all sizes", _break_mixed, hint=1),
        NamedCheck("edges: a large batch mate", _break_mates, hint=1),
        NamedCheck("edges: a token of zeros", _break_zero, hint=3),
        NamedCheck("state: inputs unchanged", _break_state),
    ),
    (
        "Run the same token alone and beside one that is a hundred times as large. Which number in the function is different?",
        "x [rows, in], codes int8 [out, in], channel [out] → [rows, out]. A token's scale is [rows, 1]: a maximum over one\n"
        "dimension.",
        "x.abs().amax(dim=1, keepdim=True): dimension 1 runs along a token, and keepdim lets it divide the rows.",
    ),
    references=(quantise_rows, W8A8Linear, rounded_product),
)
