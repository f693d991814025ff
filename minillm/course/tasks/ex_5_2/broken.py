"""5.2 break: find out where a mixed step is sampled."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Callable, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole, show
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_5_2.common import TINY, fair
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.runner import ModelRunner
from minillm.model.transformer import Transformer


def _true_places(granted: Sequence[int], left: Sequence[int]) -> list[int | None]:
    """Token by token: the flat step is walked, and who has just computed the last token it had left is noted."""
    places: list[int | None] = [None] * len(granted)
    rows = [row for row, n in enumerate(granted) for _ in range(n)]
    missing = list(left)
    for place, row in enumerate(rows):
        missing[row] -= 1
        if not missing[row]:
            places[row] = place
    return places


def _places(f: Any, granted: Sequence[int], left: Sequence[int]) -> None:
    got, expected = f(tuple(granted), tuple(left)), _true_places(granted, left)
    what = f"granted={list(granted)}, left={list(left)}"
    if not isinstance(got, list) or len(got) != len(expected):
        raise Mismatch(f"{what}: one entry for each of {len(expected)} requests in a list, got {show(got)}")
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if not (g is None or is_whole(g)) or g != e:  # in words of its own: None is an answer here, not a forgotten return
            place = f"place of request {i}: got {show(g)}, expected {show(e)}"
            raise Mismatch(f"{what}: {place}; in all: got {show(got)}, expected {show(expected)}")


def _break_shape(f: Any) -> None:
    got = f((1, 1), (1, 1))
    if not isinstance(got, list) or len(got) != 2 or not all(is_whole(p) or p is None for p in got):
        raise Mismatch(f"sample_places gives a list, one whole number or None for each request, got {show(got)}")


def _break_by_hand(f: Any) -> None:
    _places(f, (1, 1, 1), (1, 1, 1))
    _places(f, (1, 6, 1), (1, 14, 1))
    _places(f, (1, 8, 1), (1, 8, 1))


def _break_random(f: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(300):
        left = [draw.choice((1, 1, draw.randint(1, 30))) for _ in range(draw.randint(1, 6))]
        _places(f, [draw.choice((n, draw.randint(1, n))) for n in left], left)


def _break_edges(f: Any) -> None:
    _places(f, (1, 0, 4), (1, 9, 4))
    _places(f, (0, 0, 3), (1, 1, 9))
    _places(f, (1,), (7,))
    _places(f, (), ())


def _break_state(f: Any) -> None:
    granted, left = [1, 4, 0, 2], [1, 9, 1, 2]
    f(granted, left)
    expect_equal((granted, left), ([1, 4, 0, 2], [1, 9, 1, 2]), what="granted and left after the call")


def _break_engine(f: Any) -> None:
    model = Transformer.random(TINY)
    prompts = [[3, 1], [3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8]]
    outputs = LLM(model, dtype="float32", num_blocks=24).generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    for budget in (64, 5, 1):
        got = _drive(model, f, prompts, budget)
        expect_equal(got, [list(o.token_ids) for o in outputs], what=f"tokens with a budget of {budget}")


def _drive(model: Transformer, f: Callable[..., Any], prompts: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Six greedy tokens for each prompt, all in one batch, each token taken from where f says."""
    store = PlainKVStore.allocate(model.config, 64 * len(prompts), model.dtype, model.device)
    runner = ModelRunner(model, store, TorchAttention(), 64)
    texts, computed = [list(p) for p in prompts], [0] * len(prompts)
    for _ in range(200):
        left = [len(t) - c if len(t) < len(p) + 6 else 0 for t, c, p in zip(texts, computed, prompts, strict=True)]
        at_work = [i for i, n in enumerate(left) if n]
        if not at_work:
            return [t[len(p) :] for t, p in zip(texts, prompts, strict=True)]
        wanted = [left[i] for i in at_work]
        granted = fair(wanted, (), budget, len(prompts))
        ends = [(i, computed[i] + n) for i, n in zip(at_work, granted, strict=True) if n]
        rows = [Row(texts[i][computed[i] : end], computed[i], [i]) for i, end in ends]
        places = f(tuple(granted), tuple(wanted))
        expect_at_most(max((p for p in places if p is not None), default=0), sum(granted) - 1, what="the last place")
        taken = [(i, p) for i, p in zip(at_work, places, strict=True) if p is not None]
        batch = ForwardBatch.build(rows, 64)
        if taken:
            batch = replace(batch, logit_indices=torch.tensor([p for _, p in taken]))
        logits, _ = runner.forward(batch)
        for i, n in zip(at_work, granted, strict=True):
            computed[i] += n
        for (i, _), row in zip(taken, logits, strict=False):
            texts[i].append(int(row.argmax()))
    raise Mismatch("200 steps did not give six tokens to everybody")


BREAK = Task(
    "5.2 break",
    "Find out why answers went wrong when chunking was switched on",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: three decode; a piece of a prompt between them; its end", _break_by_hand, hint=1),
        NamedCheck("random: pieces of all lengths", _break_random, hint=2),
        NamedCheck("edges: who sits out, one token of many, an empty step", _break_edges, hint=3),
        NamedCheck("state: inputs unchanged", _break_state, hint=2),
        NamedCheck("engine: greedy tokens of a mixed batch", _break_engine, hint=3),
    ),
    (
        "Before chunking, whoever took part in a step computed all it had left. Which two things were true then of every\n"
        "request in a step, and are not any more?",
        "granted and left have one number for each request. The step's tokens lie one after the other: the tokens of request i\n"
        "end at sum(granted[: i + 1]).",
        "Who has computed less than it had left has no next token yet; who was granted nothing has no place at all. Both are\n"
        "answered by comparing two numbers.",
    ),
)  # fmt: skip
