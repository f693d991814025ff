"""3.1 stretch: merge the parts of split keys into attention over all of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from minillm.course.expect import Mismatch, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_3_1.common import oracle


def _parts(q: Tensor, k: Tensor, v: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """q [rows, heads, dim] over k, v [total, heads, dim], keys cut at ``cuts``: results [parts, rows, heads, dim] and logsums."""
    edges, outs, sums = [0, *cuts, len(k)], [], []
    for a, b in zip(edges, edges[1:], strict=False):
        scores = torch.einsum("rhd,khd->rhk", q, k[a:b]) / math.sqrt(q.shape[2])
        outs.append(torch.einsum("rhk,khd->rhd", scores.softmax(-1), v[a:b]) if b > a else torch.full_like(q, math.nan))
        sums.append(scores.logsumexp(-1) if b > a else torch.full(q.shape[:2], -math.inf, dtype=q.dtype))
    return torch.stack(outs), torch.stack(sums)


def _whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _parts(q, k, v, [])[0][0]


def _merge_shape(fn: Any) -> None:
    expect_shape(fn(torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4)), [2, 4, 8], torch.float32, "three parts of [2, 4, 8]")


def _merge_by_hand(fn: Any) -> None:
    outs = torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    logsums = torch.tensor([math.log(1.0), math.log(3.0)]).view(2, 1, 1)
    expect_equal(fn(outs, logsums), torch.full((1, 1, 1), 4.0), atol=1e-6, what="parts that weigh 1 and 3")


def _merge_random(fn: Any) -> None:
    for cuts in ([], [8], [1, 2, 3], [16], [5, 6, 20]):
        q, k, v = torch.randn(3, 4, 8) * 2, torch.randn(24, 4, 8), torch.randn(24, 4, 8)
        expect_equal(fn(*_parts(q, k, v, cuts)), _whole(q, k, v), atol=1e-5, what=f"24 keys cut at {cuts}")


def _merge_empty(fn: Any) -> None:
    q, k, v = torch.randn(2, 1, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 4)
    expect_equal(fn(*_parts(q, k, v, [0, 4, 4])), _whole(q, k, v), atol=1e-5, what="parts without keys, whose result is NaN")


def _merge_nothing(fn: Any) -> None:
    outs, logsums = torch.full((2, 1, 1, 3), math.nan), torch.full((2, 1, 1), -math.inf)
    expect_equal(fn(outs, logsums), torch.zeros(1, 1, 3), what="a row of no keys at all")


def _merge_large(fn: Any) -> None:
    for rows in ([1e5], [-1e5], [1e5, -1e5]):
        outs = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, len(rows), 1, 1).clone()
        logsums = torch.tensor(rows).view(1, -1, 1).expand(2, -1, 1).clone()
        what = f"two parts that weigh the same; logsums of {' in one row and of '.join(f'{x:,.0f}' for x in rows)}"
        what += " in the other" if len(rows) > 1 else ""
        expect_equal(fn(outs, logsums), torch.full((len(rows), 1, 1), 2.0), atol=1e-6, what=what)


def _merge_inputs(fn: Any) -> None:
    outs, logsums = torch.randn(3, 2, 1, 4), torch.randn(3, 2, 1)
    outs[1, 0], logsums[1, 0] = math.nan, -math.inf  # a part without keys
    with unchanged(outs=outs, logsums=logsums):
        fn(outs, logsums)


def _merge_orders(fn: Any) -> None:
    """Merging merged parts is merging all: what lets a kernel fold them in as they come."""
    outs, logsums = torch.randn(4, 2, 3, 5), torch.randn(4, 2, 3) * 4
    pairs = [(fn(outs[i : i + 2], logsums[i : i + 2]), logsums[i : i + 2].logsumexp(0)) for i in (0, 2)]
    got = fn(torch.stack([o for o, _ in pairs]), torch.stack([s for _, s in pairs]))
    expect_equal(got, fn(outs, logsums), atol=1e-5, what="two pairs merged, then the two results")
    if not bool(torch.isfinite(got).all()):
        raise Mismatch("merging finite parts gave a number that is not finite")


STRETCH = Task(
    "3.1 stretch",
    "Merge the parts of split keys",
    (
        NamedCheck("shape", _merge_shape, hint=2),
        NamedCheck("exact: parts that weigh 1 and 3", _merge_by_hand, hint=1),
        NamedCheck("random: any cut gives the whole", _merge_random, hint=2),
        NamedCheck("edges: parts without keys", _merge_empty, hint=3),
        NamedCheck("edges: a row without keys", _merge_nothing, hint=3),
        NamedCheck("edges: logsums of 100,000 and -100,000", _merge_large, hint=1),
        NamedCheck("state: inputs unchanged", _merge_inputs, hint=3),
        NamedCheck("state: parts of parts", _merge_orders, hint=1),
    ),
    (
        "A part's result is a mean over its keys, and exp(logsum) is what those keys weigh together: the whole is the mean of "
        "the parts by that weight. Subtract the largest logsum first, as in any softmax.",
        "weights = exp(logsums - largest over parts) [parts, rows, heads]; the sum over parts is dim 0.",
        "A row whose logsums are all minus infinity: subtract 0 instead, and divide by 1. A part of weight 0 may hold NaN, and "
        "0 * NaN is NaN: replace what it holds (torch.where) before the product.",
    ),
    references=(oracle,),
)
