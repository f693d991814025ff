"""3.1 break: find the fault in a running softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from minillm.course.expect import expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_3_1.common import Largest, oracle


def _decode_oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k.double() @ q.double() / math.sqrt(len(q))).softmax(0).to(q.dtype) @ v


def _break_shape(fn: Any) -> None:
    expect_shape(fn(torch.randn(4), torch.randn(5, 4), torch.randn(5, 6), 2), [6], torch.float32, "one query, values of 6")


def _break_falling(fn: Any) -> None:
    """The first tile has the largest score: nothing is ever rescaled."""
    k = torch.tensor([3.0, 2.0, 1.0, 0.0]).view(4, 1)
    v = torch.eye(4)
    expect_equal(fn(torch.ones(1), k, v, 1), k.flatten().softmax(0), atol=1e-6, what="weights of scores 3, 2, 1, 0")


def _break_growing(fn: Any) -> None:
    k = torch.tensor([0.0, 1.0, 2.0, 3.0]).view(4, 1)
    expect_equal(fn(torch.ones(1), k, torch.eye(4), 1), k.flatten().softmax(0), atol=1e-6, what="weights of scores 0, 1, 2, 3")
    expect_equal(fn(torch.ones(1), k, torch.eye(4), 3), k.flatten().softmax(0), atol=1e-6, what="the same in tiles of 3")


def _break_random(fn: Any) -> None:
    for n, tile in ((1, 4), (4, 4), (5, 4), (31, 8), (64, 5)):
        q, k, v = torch.randn(8) * 3, torch.randn(n, 8), torch.randn(n, 5)
        expect_equal(fn(q, k, v, tile), _decode_oracle(q, k, v), atol=1e-5, what=f"{n} keys in tiles of {tile}")


def _break_large(fn: Any) -> None:
    q, k, v = torch.randn(8).double() * 300, torch.randn(20, 8).double() * 300, torch.randn(20, 5).double()
    expect_equal(fn(q, k, v, 3), _decode_oracle(q, k, v), atol=1e-6, what="scores of tens of thousands")


def _break_negative(fn: Any) -> None:
    q, k, v = torch.full((4,), 400.0), torch.full((9, 4), -125.0), torch.randn(9, 5)
    expect_equal(fn(q, k, v, 4), v.mean(0), atol=1e-5, what="nine scores of −100,000: the mean")


def _break_inputs(fn: Any) -> None:
    q, k, v = torch.randn(4), torch.randn(6, 4), torch.randn(6, 4)
    with unchanged(q=q, k=k, v=v):
        fn(q, k, v, 2)


def _break_budget(fn: Any) -> None:
    n, tile, dim = 256, 8, 4
    q, k, v = torch.randn(dim), torch.randn(n, dim), torch.randn(n, dim)
    with Largest() as made:
        fn(q, k, v, tile)
    expect_at_most(made.elements, tile * dim, f"elements of the largest tensor ({n} keys of {dim} numbers, tiles of {tile})")


BREAK = Task(
    "3.1 break",
    "A running softmax with a fault",
    (
        NamedCheck("shape", _break_shape),
        NamedCheck("exact: scores that fall", _break_falling, hint=1),
        NamedCheck("exact: scores that grow", _break_growing, hint=1),
        NamedCheck("random: against softmax", _break_random, hint=2),
        NamedCheck("edges: large scores", _break_large, hint=3),
        NamedCheck("edges: scores near -100,000", _break_negative, hint=3),
        NamedCheck("state: inputs unchanged", _break_inputs),
        NamedCheck("budget: a tile of keys at a time", _break_budget),
    ),
    (
        "Both sums were made with the largest score of their time. What has to happen to them when it changes?",
        "total is a number, acc has one number per value dimension; both are sums of the same weights.",
        "Keep the old largest until both sums are rescaled: new_top = maximum(top, scores.max()); shrink = exp(top - new_top); "
        "total * shrink + ..., acc * shrink + ...; then top = new_top. Before the first tile top is minus infinity itself, and "
        "exp(-inf) is 0.",
    ),
    references=(oracle,),
)
