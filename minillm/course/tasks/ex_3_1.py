"""Exercise 3.1: attention over tiles of keys, a running softmax with a fault in it, and the merge of split keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention, attend
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.rowwise import RowwiseAttention
from minillm.course.task import NamedCheck, Seam, Task
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=64,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [2, 7], [1, 6, 1, 8, 0])
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last len(q) of len(k) tokens, one query and head at a time, in float64: [new, heads, dim]."""
    new, heads, dim = q.shape
    group, out = heads // k.shape[1], torch.empty(q.shape, dtype=torch.float64)
    for i in range(new):
        seen = len(k) - new + i + 1
        for h in range(heads):
            keys, values = k[:seen, h // group].double(), v[:seen, h // group].double()
            out[i, h] = (keys @ q[i, h].double() / math.sqrt(dim)).softmax(0) @ values
    return out.to(q.dtype)


def _random(new: int, total: int, heads: int = 4, kv_heads: int = 2, dim: int = 8, scale: float = 1.0) -> list[Tensor]:
    return [scale * torch.randn(n, h, dim) for n, h in ((new, heads), (total, kv_heads), (total, kv_heads))]


class Largest(TorchDispatchMode):
    """Notes the most elements that any tensor made while it is active has, and counts operations; views of a given tensor are
    free."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        given = {t.untyped_storage().data_ptr() for a in args for t in (a if isinstance(a, (list, tuple)) else [a])
                 if isinstance(t, Tensor)}  # fmt: skip
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, made.numel())
        return result


# 3.1 core: attention over tiles -----------------------------------------------------------------------------------------------


def _tiles_shape(fn: Any) -> None:
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.to(dtype) for x in _random(3, 5))
        expect_shape(fn(q, k, v, 2), [3, 4, 8], dtype, "the result for q [3, 4, 8]")


def _tiles_by_hand(fn: Any) -> None:
    q = torch.zeros(1, 1, 2)
    v = torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]], [[2.0, 0.0]]])
    got, what = fn(q, torch.randn(3, 1, 2), v, 2), "one query of zeros over 3 values, tiles of 2: their mean"
    expect_equal(got, torch.tensor([[[1.0, 1.0]]]), atol=1e-6, what=what)


def _tiles_growing(fn: Any) -> None:
    """Scores 0, log 2 · 2, …: the largest so far grows in every tile."""
    k = torch.arange(4.0).view(4, 1, 1) * math.log(2)
    v = torch.tensor([8.0, 4.0, 2.0, 1.0]).view(4, 1, 1)
    weights = torch.tensor([1.0, 2.0, 4.0, 8.0]) / 15
    expected = (weights * v.flatten()).sum().view(1, 1, 1)
    for tile in (1, 2, 4):
        expect_equal(fn(torch.ones(1, 1, 1), k, v, tile), expected, atol=1e-6, what=f"scores that grow, tiles of {tile}")


def _tiles_random(fn: Any) -> None:
    for new, total, heads, kv_heads in ((7, 7, 4, 2), (3, 20, 6, 2), (1, 17, 3, 3), (12, 13, 5, 1)):
        q, k, v = _random(new, total, heads, kv_heads)
        for tile in (1, 4, 16, 64):
            what = f"{new} new of {total} tokens, {heads} heads over {kv_heads}, tiles of {tile}"
            expect_equal(fn(q, k, v, tile), oracle(q, k, v), atol=1e-5, rtol=1e-5, what=what)


def _tiles_one(fn: Any) -> None:
    q, k, v = _random(1, 1)
    expect_equal(fn(q, k, v, 16), v.repeat_interleave(2, 1), atol=1e-6, what="one token: its own value")


def _tiles_large(fn: Any) -> None:
    q, k, v = _random(6, 11, scale=150.0)
    q, k, v = q.double(), k.double(), v.double()
    what = "scores of tens of thousands, seen or not"
    expect_equal(fn(q, k, v, 4), oracle(q, k, v), atol=1e-6, rtol=1e-6, what=what)


def _tiles_negative(fn: Any) -> None:
    """All scores near −1e5: whatever stands for minus infinity must be smaller."""
    q, k = torch.full((5, 1, 4), 400.0).double(), torch.full((9, 1, 4), -125.0).double()
    v = torch.randn(9, 1, 4).double()
    expect_equal(fn(q, k, v, 4), oracle(q, k, v), atol=1e-6, what="scores of −100,000")


def _tiles_inputs(fn: Any) -> None:
    q, k, v = _random(4, 9)
    with unchanged(q=q, k=k, v=v):
        fn(q, k, v, 4)


def _tiles_engine(fn: Any) -> None:
    model = Transformer.random(TINY, dtype=torch.float64)
    answers = [
        [o.token_ids for o in LLM(model, attention_backend=backend, num_blocks=24, block_size=4).generate(list(PROMPTS), GREEDY)]
        for backend in ("torch", RowwiseAttention(lambda q, k, v: fn(q, k, v, 4)))
    ]
    expect_equal(answers[1], answers[0], what="greedy tokens of three prompts")


def _tiles_budget(fn: Any) -> None:
    new, total, heads, dim, tile = 64, 256, 2, 8, 16
    q, k, v = _random(new, total, heads, 1, dim)
    with Largest() as made:
        fn(q, k, v, tile)
    limit = max(new * heads * tile, total * heads * dim)
    expect_at_most(made.elements, limit, f"elements of the largest tensor ({new} new of {total} tokens, tiles of {tile})")
    if made.operations < total // tile:
        raise Mismatch(f"{made.operations} operations on tensors for {total // tile} tiles: compute in torch, tile by tile")


def _tiles_loop(fn: Any) -> None:
    counts = []
    for new in (4, 64):
        q, k, v = _random(new, 256, 2, 1, 8)
        with Largest() as made:
            fn(q, k, v, 16)
        counts.append(made.operations)
    if counts[1] > 2 * counts[0]:
        raise Mismatch(
            f"{counts[0]:,} tensor operations for 4 queries and {counts[1]:,} for 64, over the same 16 tiles: "
            "take all queries of a tile at once"
        )


CORE = Task(
    "3.1 core",
    "Attention over tiles of keys",
    (
        NamedCheck("shape", _tiles_shape, hint=2),
        NamedCheck("exact: a mean by hand", _tiles_by_hand, hint=1),
        NamedCheck("exact: scores that grow from tile to tile", _tiles_growing, hint=1),
        NamedCheck("random: against one query at a time", _tiles_random, hint=2),
        NamedCheck("edges: one token", _tiles_one, hint=3),
        NamedCheck("edges: large scores", _tiles_large, hint=1),
        NamedCheck("edges: scores near -100,000", _tiles_negative, hint=3),
        NamedCheck("state: inputs unchanged", _tiles_inputs, hint=3),
        NamedCheck("engine: the same tokens on your attention", _tiles_engine, hint=2),
        NamedCheck("budget: no matrix of all scores", _tiles_budget, hint=3),
        NamedCheck("budget: no loop over queries", _tiles_loop, hint=2),
    ),
    (
        "Keep three things a query and head: the largest score so far, the sum of exp(score - largest), and the sum of "
        "exp(score - largest) times value. When a tile brings a larger score, multiply both sums by exp(old - new) first. "
        "A key that the query does not see counts for none of the three.",
        "scores [heads, new, tile]; largest and total [heads, new, 1]; acc [heads, new, dim]. Query i of the new ones stands at "
        "position total - new + i and sees keys up to it. k[:, heads // group] is k.repeat_interleave(heads // kv_heads, dim=1).",
        "for start in range(0, len(k), tile): scores = q @ keys.transpose(1, 2) * scale, then masked_fill(~seen, -inf); "
        "new_top = maximum(top, scores.amax(-1, keepdim=True)); shift = where(new_top is -inf, 0, new_top); "
        "p = exp(scores - shift); shrink = exp(top - shift); acc = acc * shrink + p @ values; total likewise; top = new_top.",
    ),
    Seam("attention_backend", "attention", lambda fn: {"attention_backend": RowwiseAttention(lambda q, k, v: fn(q, k, v, 64))}),
    (attend, TorchAttention, oracle),
)


# 3.1 break: a running softmax -------------------------------------------------------------------------------------------------


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


# 3.1 stretch: merging the parts of split keys ---------------------------------------------------------------------------------


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

TASKS = (CORE, BREAK, STRETCH)
