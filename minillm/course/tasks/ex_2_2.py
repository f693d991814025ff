"""Exercise 2.2: an indexer of bounds, the keys that a query reads with a fault in it, and layers that share a choice."""

from __future__ import annotations

import math
import random
from typing import Any, Sequence

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.attention.indexer import BoundsIndexer, MeanIndexer, grouped_products
from minillm.attention.window import SparseView
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=96,
    name="a tiny random model",
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


# 2.2 core: the indexer ---------------------------------------------------------------------------------------------------------


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


# 2.2 break: the keys that a query reads ----------------------------------------------------------------------------------------


def keys_oracle(query: int, chosen: Sequence[int], window: int, size: int) -> list[int]:
    """Key by key, from the definition."""
    near = max(0, query - window + 1) // size
    return [key for key in range(query + 1) if key // size >= near or key // size in set(chosen)]


def _break_shape(fn: Any) -> None:
    got = fn(11, [0], 4, 4)
    if not isinstance(got, list) or not all(type(key) is int for key in got):
        raise Mismatch(f"a list of positions is wanted, got {got!r:.80}")


def _break_whole(fn: Any) -> None:
    """The query is the last of its block."""
    expect_equal(fn(15, [0], 4, 4), [0, 1, 2, 3, 12, 13, 14, 15], what="query 15, block 0 chosen, window 4, blocks of 4")


def _break_middle(fn: Any) -> None:
    expect_equal(fn(17, [1], 4, 4), [4, 5, 6, 7, 12, 13, 14, 15, 16, 17], what="query 17, block 1 chosen, window 4, blocks of 4")
    expect_equal(fn(16, [1], 1, 4), [4, 5, 6, 7, 16], what="query 16, the first of its block, window 1")


def _break_random(fn: Any) -> None:
    rng = random.Random(0)
    for _ in range(60):
        size, window, query = rng.randint(1, 7), rng.randint(1, 9), rng.randint(0, 50)
        near = max(0, query - window + 1) // size
        chosen = sorted(rng.sample(range(near), min(near, rng.randint(0, 3))))
        what = f"query {query}, blocks {chosen} chosen, window {window}, blocks of {size}"
        expect_equal(fn(query, chosen, window, size), keys_oracle(query, chosen, window, size), what=what)
    what = "query 17, blocks 3, 0 and 1 chosen, window 6, blocks of 4: block 3 is local too, and read once"
    expect_equal(fn(17, [3, 0, 1], 6, 4), keys_oracle(17, [3, 0, 1], 6, 4), what=what)


def _break_start(fn: Any) -> None:
    expect_equal(fn(0, [], 64, 16), [0], what="the first token sees itself")
    expect_equal(fn(2, [], 64, 16), [0, 1, 2], what="a window beyond the beginning")


def _break_inputs(fn: Any) -> None:
    chosen = [2, 0]
    with unchanged(chosen=chosen):
        fn(30, chosen, 5, 4)


BREAK = Task(
    "2.2 break",
    "The keys that a query reads, with a fault",
    (
        NamedCheck("shape", _break_shape),
        NamedCheck("exact: a query at the end of its block", _break_whole, hint=1),
        NamedCheck("exact: a query within its block", _break_middle, hint=1),
        NamedCheck("random: key by key", _break_random, hint=2),
        NamedCheck("edges: the beginning", _break_start, hint=2),
        NamedCheck("state: inputs unchanged", _break_inputs),
    ),
    (
        "Which block holds the query's own key, and is it in the loop when it is not full yet?",
        "Blocks are numbered from 0: the query stands in block query // size, the window's first key in block "
        "max(0, query - window + 1) // size. Both are local, and so are all between them.",
        "range(first, query // size + 1): (query + 1) // size counts full blocks only. And no key after the query: "
        "min(end, query + 1).",
    ),
    references=(keys_oracle, SparseView),
)


# 2.2 stretch: layers that share a choice ---------------------------------------------------------------------------------------


def share_oracle(choices: Sequence[Sequence[int]], least: float) -> list[int]:
    leaders: list[int] = []
    for layer, own in enumerate(choices):
        if layer and len(set(own) & set(choices[leaders[-1]])) >= least * len(set(own)):
            leaders.append(leaders[-1])
        else:
            leaders.append(layer)
    return leaders


def _share_shape(fn: Any) -> None:
    got = fn([[0, 1], [0, 1], [5, 6]], 0.5)
    if len(got) != 3:
        raise Mismatch(f"one number per layer is wanted, 3, got {got!r:.80}")


def _share_by_hand(fn: Any) -> None:
    choices = [[0, 3, 7, 9], [0, 3, 7, 8], [0, 3, 8, 6], [1, 2, 4, 5], [1, 2, 4, 9]]
    expect_equal(list(fn(choices, 0.75)), [0, 0, 2, 3, 3], what="agreement of at least three in four")
    expect_equal(list(fn(choices, 0.5)), [0, 0, 0, 3, 3], what="agreement of at least one half")


def _share_drift(fn: Any) -> None:
    """Each layer agrees with the one before, and the last one not at all with the first."""
    choices = [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7]]
    expect_equal(list(fn(choices, 0.75)), [0, 0, 2, 2, 4], what="choices that drift by one block a layer")


def _share_random(fn: Any) -> None:
    rng = random.Random(1)
    for size in [4] * 20 + [0] * 40:  # 0: near the beginning a layer has fewer blocks to choose
        choices = [rng.sample(range(9), size or rng.randint(1, 6)) for _ in range(rng.randint(1, 12))]
        least = rng.choice([0.25, 0.5, 0.75, 1.0])
        expect_equal(list(fn(choices, least)), share_oracle(choices, least), what=f"{len(choices)} layers, at least {least}")


def _share_edges(fn: Any) -> None:
    choices = [[1, 2], [2, 1], [3, 4]]
    expect_equal(list(fn(choices, 0.0)), [0, 0, 0], what="no agreement asked for")
    expect_equal(list(fn(choices, 1.0)), [0, 0, 2], what="the same blocks in another order")
    expect_equal(list(fn([[5]], 1.0)), [0], what="one layer")
    expect_equal(list(fn([], 1.0)), [], what="no layers")


def _share_inputs(fn: Any) -> None:
    choices = [[3, 1], [1, 3], [0, 2]]
    with unchanged(choices=choices):
        fn(choices, 0.5)


STRETCH = Task(
    "2.2 stretch",
    "Layers that share a choice",
    (
        NamedCheck("shape", _share_shape, hint=2),
        NamedCheck("exact: five layers by hand", _share_by_hand, hint=1),
        NamedCheck("exact: a choice that drifts", _share_drift, hint=1),
        NamedCheck("random: against the rule", _share_random, hint=2),
        NamedCheck("edges: nothing and everything", _share_edges, hint=3),
        NamedCheck("state: inputs unchanged", _share_inputs, hint=3),
    ),
    (
        "A layer reads what its leader chose, so it is the leader's choice that its own must agree with, not its neighbour's.",
        "Keep the number of the current leader. agreement = blocks in both / blocks of the layer's own choice.",
        "for layer, own in enumerate(choices): shared = len(set(own) & set(choices[leader])); if shared < least * len(own) (or "
        "layer is 0): leader = layer; append leader.",
    ),
    references=(share_oracle,),
)

TASKS = (CORE, BREAK, STRETCH)
