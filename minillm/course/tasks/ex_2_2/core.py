"""2.2 core: write an indexer that bounds the scores of a block by the extremes of its keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.attention.indexer import BoundsIndexer, MeanIndexer, grouped_products
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=96,
    name="a tiny random model",
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def _random(blocks: int = 5, size: int = 4, heads: int = 6, kv_heads: int = 2, dim: int = 8) -> tuple[Tensor, Tensor]:
    """q [2, 3, heads, dim], keys [blocks, size, kv_heads, dim]."""
    return torch.randn(2, 3, heads, dim), torch.randn(blocks, size, kv_heads, dim)


def _scores(cls: Any, q: Tensor, keys: Tensor) -> Tensor:
    """Both rows of q over the same blocks."""
    indexer = cls()
    scores: Tensor = indexer.score(q, indexer.summarise(keys).expand(len(q), -1, -1, -1))
    return scores


def bound_oracle(q: Tensor, keys: Tensor) -> Tensor:
    """The bound of every query head and block, number by number in float64: [rows, queries, heads, blocks]."""
    (rows, queries, heads, dim), (blocks, _, kv_heads, _) = q.shape, keys.shape
    out = torch.zeros(rows, queries, heads, blocks, dtype=torch.float64)
    for h in range(heads):
        of_head = keys[:, :, h // (heads // kv_heads)].double()
        for b in range(blocks):
            low, high = of_head[b].amin(0), of_head[b].amax(0)
            x = q[:, :, h].double()
            out[:, :, h, b] = torch.maximum(x * low, x * high).sum(-1) / math.sqrt(dim)
    return out.to(q.dtype)


def _core_shape(cls: Any) -> None:
    q, keys = _random()
    summaries = cls().summarise(keys)
    if summaries.dim() != 3:
        raise Mismatch(f"summaries of 5 blocks and 2 KV heads are [5, 2, numbers], got {list(summaries.shape)}")
    expect_equal(list(summaries.shape[:2]), [5, 2], what="blocks and KV heads of the summaries")
    expect_shape(_scores(cls, q, keys), [2, 3, 6, 5], torch.float32, "scores of 2 rows, 3 queries, 6 heads, 5 blocks")


def _core_by_hand(cls: Any) -> None:
    """Keys (1, 5) and (3, −2): with (1, −1) the bound takes 3 and −2, which no key has together."""
    keys = torch.tensor([[1.0, 5.0], [3.0, -2.0]]).view(1, 2, 1, 2)
    q = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]]).view(1, 3, 1, 2)
    want = torch.tensor([5.0, 8.0, 1.0]).view(1, 3, 1, 1) / math.sqrt(2)
    expect_equal(_scores(cls, q, keys), want, atol=1e-5, what="bounds of keys (1, 5) and (3, -2) for (1, -1), (1, 1), (-1, -1)")


def _core_random(cls: Any) -> None:
    for blocks, size, heads, kv_heads in ((5, 4, 6, 2), (3, 16, 4, 4), (7, 3, 5, 1)):
        q, keys = _random(blocks, size, heads, kv_heads)
        what = f"{blocks} blocks of {size}, {heads} heads over {kv_heads}"
        expect_equal(_scores(cls, q, keys), bound_oracle(q, keys), atol=1e-5, rtol=1e-5, what=what)
    q, keys = _random(8)
    indexer, rows = cls(), (keys[:4], keys[4:])
    got = indexer.score(q, torch.stack([indexer.summarise(of_row) for of_row in rows]))
    want = torch.cat([bound_oracle(q[i : i + 1], of_row) for i, of_row in enumerate(rows)])
    expect_equal(got, want, atol=1e-5, rtol=1e-5, what="2 rows, each with 4 blocks of its own")


def _core_holds(cls: Any) -> None:
    q, keys = _random(6, 8)
    logits = torch.stack([grouped_products(q, k.expand(2, -1, -1, -1)).amax(-1) for k in keys], -1) / math.sqrt(8)
    worst = float((logits - _scores(cls, q, keys)).max())
    if worst > 1e-4:
        raise Mismatch(f"a key has a logit {worst:.4g} above the score of its block: no bound")


def _core_one_key(cls: Any) -> None:
    q, keys = _random(4, 1)
    want = grouped_products(q, keys[:, 0].expand(2, -1, -1, -1)) / math.sqrt(8)
    expect_equal(_scores(cls, q, keys), want, atol=1e-5, what="blocks of one key: its own logit")


def _core_one_sided(cls: Any) -> None:
    """All keys in [5, 6]: a zero that slipped into an extreme shows."""
    q, keys = torch.randn(2, 3, 6, 8), 5 + torch.rand(4, 4, 2, 8)
    expect_equal(_scores(cls, q, keys), bound_oracle(q, keys), atol=1e-4, what="keys that are all positive")
    expect_equal(_scores(cls, q, -keys), bound_oracle(q, -keys), atol=1e-4, what="keys that are all negative")


def _core_inputs(cls: Any) -> None:
    q, keys = _random()
    with unchanged(q=q, keys=keys):
        _scores(cls, q, keys)


def _core_engine(cls: Any) -> None:
    model = Transformer.random(TINY, seed=3, dtype=torch.float64)
    prompts = [[(7 * i + i * i) % 59 + 1 for i in range(n)] for n in (50, 23)]
    same: dict[str, Any] = dict(num_blocks=48, block_size=4, sparse_blocks=3, sparse_window=5)
    answers = [
        [out.token_ids for out in LLM(model, sparse_indexer=indexer, **same).generate(prompts, GREEDY)]
        for indexer in ("bounds", cls())
    ]
    expect_equal(answers[1], answers[0], what="greedy tokens of two prompts, 3 blocks of 4 each")


def _core_budget(cls: Any) -> None:
    keys = torch.randn(3, 32, 2, 8)
    expect_at_most(cls().summarise(keys).numel(), 2 * 3 * 2 * 8, "numbers kept of 3 blocks, 2 KV heads of 8 dimensions")


CORE = Task(
    "2.2 core",
    "An indexer of bounds",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: two keys by hand", _core_by_hand, hint=1),
        NamedCheck("random: against the definition", _core_random, hint=2),
        NamedCheck("random: no logit above its block's score", _core_holds, hint=1),
        NamedCheck("edges: blocks of one key", _core_one_key, hint=2),
        NamedCheck("edges: keys all of one sign", _core_one_sided, hint=3),
        NamedCheck("state: inputs unchanged", _core_inputs, hint=3),
        NamedCheck("engine: your blocks are read", _core_engine, hint=2),
        NamedCheck("budget: two numbers per dimension", _core_budget, hint=1),
    ),
    (
        "Keep the smallest and the largest value of each dimension. A positive number of the query takes the largest, a negative "
        "one the smallest, whichever gives more; the sum is what no key of the block can exceed.",
        "summarise: cat of amin and amax over dim 1, [blocks, kv_heads, 2 * head_dim]. score: low and high "
        "[rows, blocks, kv_heads, head_dim]; head h reads KV head h // (heads // kv_heads): repeat_interleave on dim 2.",
        "low, high = summaries.chunk(2, -1), both repeated to the query's heads; x = q.unsqueeze(2), [rows, queries, 1, heads, "
        "dim]; "
        "maximum(x * low.unsqueeze(1), x * high.unsqueeze(1)).sum(-1) / sqrt(dim), then move the heads before the blocks.",
    ),
    Seam("sparse_indexer", "indexer of sparse attention", lambda cls: {"sparse_indexer": cls()}),
    (BoundsIndexer, MeanIndexer, grouped_products, bound_oracle),
)
