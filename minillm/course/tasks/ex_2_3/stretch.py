"""2.3 stretch: spread the load over the experts with a bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.course.expect import expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.labs.experts import balance, imbalance, skewed_logits
from minillm.course.task import NamedCheck, Task
from minillm.model.moe import route
from minillm.model.moe_config import MoEConfig

SHAPE = MoEConfig(16, 2, 1, scoring="sigmoid", selection_bias=True)


def _new(f: Any, bias: Tensor, chosen: list[list[int]], rate: float) -> Tensor:
    new = f(bias, torch.tensor(chosen, dtype=torch.int64).view(len(chosen), -1), rate)
    expect_shape(new, list(bias.shape), torch.float32, "the new bias")
    return new


def _stretch_shape(f: Any) -> None:
    _new(f, torch.zeros(4), [[0, 1], [2, 3]], 0.1)


def _stretch_by_hand(f: Any) -> None:
    """Loads 3, 2, 1, 2 of a mean of 2."""
    expected = torch.tensor([-0.1, 0.5, 0.1, 0.0])
    got = _new(f, torch.tensor([0.0, 0.5, 0.0, 0.0]), [[0, 1], [0, 1], [0, 3], [2, 3]], 0.1)
    expect_equal(got, expected, atol=1e-6, what="loads 3, 2, 1, 2")


def _stretch_random(f: Any) -> None:
    for tokens in (40, 41, 43, 5, 40):  # the mean need not be a whole number
        bias, chosen = torch.randn(12), torch.randint(0, 12, (tokens, 3))
        expected = bias + 0.05 * torch.sign(tokens * 3 / 12 - torch.bincount(chosen.flatten(), minlength=12))
        expect_equal(f(bias, chosen, 0.05), expected, atol=1e-6, what="random choices")


def _stretch_unchosen(f: Any) -> None:
    got = _new(f, torch.zeros(6), [[0, 1], [0, 1]], 0.5)
    expect_equal(got, torch.tensor([-0.5, -0.5, 0.5, 0.5, 0.5, 0.5]), atol=1e-6, what="four of six experts never chosen")


def _stretch_no_tokens(f: Any) -> None:
    bias = torch.randn(4)
    expect_equal(f(bias, torch.zeros(0, 2, dtype=torch.int64), 0.1), bias, what="a step without tokens")


def _stretch_state(f: Any) -> None:
    bias, chosen = torch.randn(4), torch.tensor([[0, 1], [0, 2]])
    with unchanged(bias=bias, chosen=chosen):
        f(bias, chosen, 0.1)


def _stretch_router(f: Any) -> None:
    """Sixty steps of a router that likes some experts better."""
    bias, seen = torch.zeros(SHAPE.num_experts), []
    for step in range(60):
        experts, _ = route(skewed_logits(128, SHAPE.num_experts, 1.0, step), SHAPE, bias)
        seen.append(imbalance(torch.bincount(experts.flatten(), minlength=SHAPE.num_experts).tolist()))
        bias = f(bias, experts, 0.02)
    ours = balance(SHAPE, 1.0, 60, 0.02, tokens=128)[0]
    last, right = sum(seen[-10:]) / 10, sum(ours[-10:]) / 10
    expect_at_most(round(last, 2), round(1.05 * right, 2), f"busiest expert by the mean after 60 steps, from {seen[0]:.1f}")


STRETCH = Task(
    "2.3 stretch",
    "Spread the load with a bias",
    (
        NamedCheck("shape", _stretch_shape),
        NamedCheck("exact: four experts by hand", _stretch_by_hand, hint=1),
        NamedCheck("random: against the rule", _stretch_random, hint=2),
        NamedCheck("edges: experts that nobody chose", _stretch_unchosen, hint=3),
        NamedCheck("edges: no tokens", _stretch_no_tokens, hint=2),
        NamedCheck("state: inputs unchanged", _stretch_state, hint=3),
        NamedCheck("engine: a router that likes some experts better", _stretch_router, hint=1),
    ),
    (
        "Who has more than the mean becomes a little less attractive, who has less a little more. By how much more or less\n"
        "does not matter.",
        "chosen [tokens, top_k] → counts [experts], also of those that nobody chose; their mean is tokens · top_k / experts.",
        "counts = torch.bincount(chosen.flatten(), minlength=len(bias));\n"
        "bias + rate * torch.sign(counts.float().mean() - counts)",
    ),
    references=(balance,),
)  # fmt: skip
