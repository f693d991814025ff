"""3.1 core: write attention over tiles of keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention, attend
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.rowwise import RowwiseAttention
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_3_1.common import Largest, oracle
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=64,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [2, 7], [1, 6, 1, 8, 0])
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def _random(new: int, total: int, heads: int = 4, kv_heads: int = 2, dim: int = 8, scale: float = 1.0) -> list[Tensor]:
    return [scale * torch.randn(n, h, dim) for n, h in ((new, heads), (total, kv_heads), (total, kv_heads))]


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
