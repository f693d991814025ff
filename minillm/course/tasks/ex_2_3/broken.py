"""2.3 break: find the fault in a router, whose bias is in the wrong place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.course.expect import Mismatch, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.model.moe import route
from minillm.model.moe_config import MoEConfig


def _reference_route(logits: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return route(logits, MoEConfig(logits.shape[1], top_k, 1, scoring="sigmoid", selection_bias=True), bias)


def _routed(f: Any, logits: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    got = f(logits, bias, top_k)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Mismatch(f"route gives (experts, weights), got {got!r:.60}")
    return got


def _break_compare(f: Any, logits: Tensor, bias: Tensor, top_k: int, what: str) -> None:
    right, shares = _reference_route(logits, bias, top_k)
    experts, weights = _routed(f, logits.clone(), bias.clone(), top_k)
    expect_equal(experts.sort(-1).values, right.sort(-1).values, what=f"{what}: the chosen experts, in order of number")
    by_number, expected = (w.gather(1, e.argsort(1)) for w, e in ((weights, experts), (shares, right)))
    expect_equal(by_number, expected, atol=1e-5, what=f"{what}: their weights")


def _break_shape(f: Any) -> None:
    experts, weights = _routed(f, torch.randn(7, 6), torch.zeros(6), 2)
    expect_shape(experts, [7, 2], torch.int64, "experts")
    expect_shape(weights, [7, 2], torch.float32, "weights")


def _break_no_bias(f: Any) -> None:
    _break_compare(f, torch.tensor([[0.0, 2.0, 1.0]]), torch.zeros(3), 2, "no bias")


def _break_chooses(f: Any) -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 9.0])
    experts, _ = _routed(f, logits, bias, 2)
    expect_equal(sorted(experts[0].tolist()), [0, 3], what="a bias of 9 on the last of four experts: who is chosen")


def _break_equal_bias(f: Any) -> None:
    logits = torch.randn(5, 6)
    for size in (0.5, -0.5):
        _break_compare(f, logits, torch.full((6,), size), 3, f"a bias of {size} on every expert, which should change nothing")


def _break_random(f: Any) -> None:
    for top_k in (1, 2, 4):
        _break_compare(f, torch.randn(20, 8), torch.randn(8) * 0.3, top_k, f"random logits and bias, top {top_k}")


def _break_negative(f: Any) -> None:
    experts, weights = _routed(f, torch.randn(4, 3), torch.full((3,), -2.0), 2)
    if not bool(((weights > 0) & (weights < 1)).all()):
        raise Mismatch(f"a bias of -2 everywhere: weights are shares between 0 and 1, got {weights[0].tolist()}")


def _break_state(f: Any) -> None:
    logits, bias = torch.randn(4, 5), torch.randn(5)
    with unchanged(logits=logits, bias=bias):
        f(logits, bias, 2)


def _break_one_row(f: Any) -> None:
    logits, bias = torch.randn(30, 6), torch.randn(6)
    _, weights = _routed(f, logits.clone(), bias, 2)
    alone = _routed(f, logits[11:12].clone(), bias, 2)[1]
    expect_equal(alone, weights[11:12], atol=1e-6, what="token 11 alone, against among 30")


BREAK = Task(
    "2.3 break",
    "Find the fault in a router",
    (
        NamedCheck("shape", _break_shape),
        NamedCheck("exact: without a bias", _break_no_bias),
        NamedCheck("exact: the bias chooses", _break_chooses, hint=1),
        NamedCheck("exact: an equal bias changes nothing", _break_equal_bias, hint=2),
        NamedCheck("random: experts and weights", _break_random, hint=3),
        NamedCheck("edges: a negative bias", _break_negative, hint=3),
        NamedCheck("edges: a token alone", _break_one_row, hint=2),
        NamedCheck("state: inputs unchanged", _break_state),
    ),
    (
        "The bias is there to spread the load. What should a token's output be if the same experts are chosen with another bias?",
        "choice [tokens, experts] decides; scores [tokens, experts] weigh. Which of the two is renormalised?",
        "weights = scores.gather(1, experts): the scores before the bias.",
    ),
    references=(route,),
)
