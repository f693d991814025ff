"""6.2 break: find out why drafts get worse after a pause: a drafter trusts stale KV."""

from __future__ import annotations

import itertools
import random
from typing import Any, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole, show, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_1_1.common import TINY
from minillm.engine.batch import Row
from minillm.engine.request import Request
from minillm.model.transformer import Transformer
from minillm.spec import draft_model
from minillm.spec.draft import NO_DRAFT
from minillm.spec.draft_model import DraftModelProposer, Progress


def _first(fed: Sequence[int], ids: Sequence[int]) -> int:
    same = 0
    while same < min(len(fed), len(ids) - 1) and fed[same] == ids[same]:
        same += 1
    return same


def _start(f: Any, fed: Sequence[int], ids: Sequence[int]) -> None:
    got = f(list(fed), list(ids))
    if not is_whole(got):
        raise Mismatch(f"first_to_compute gives a whole number, got {show(got)}")
    expect_equal(int(got), _first(fed, ids), what=f"fed {show(list(fed))}, text {show(list(ids))}")


def _break_shape(f: Any) -> None:
    got = f([1, 2], [1, 2, 3])
    if not is_whole(got):
        raise Mismatch(f"first_to_compute gives a whole number, got {show(got)}")


def _break_by_hand(f: Any) -> None:
    _start(f, [], [5, 6, 7])
    _start(f, [5, 6, 7, 1, 2], [5, 6, 7, 1, 2, 3])  # all was accepted, and one token more than was fed
    _start(f, [5, 6, 7, 1, 2], [5, 6, 7, 9, 4, 4])  # refused at once, then two steps without a draft


def _break_random(f: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(200):
        ids = [draw.randint(1, 3) for _ in range(draw.randint(1, 12))]
        fed = ids[: draw.randint(0, len(ids))] + [draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
        _start(f, fed, ids)


def _break_edges(f: Any) -> None:
    for fed, ids in (([5], [5]), ([5, 6], [5]), ([], [5]), ([9, 9], [5, 9, 9]), ([5, 6, 7], [5, 6, 7])):
        _start(f, fed, ids)


def _break_state(f: Any) -> None:
    fed, ids = [1, 2, 3, 4], [1, 2, 9]
    with unchanged(fed=fed, ids=ids):
        f(fed, ids)


class _Drafter(DraftModelProposer):
    """minillm's drafter with somebody else's answer to where it goes on."""

    first: Any = None
    fed = 0

    def _row(self, request: Request, drafted: list[int]) -> Row:
        tokens = request.token_ids + drafted
        known = self._progress.get(request.request_id, Progress())
        start = len(tokens) - 1 if drafted else int(type(self).first(list(known.token_ids), list(request.token_ids)))
        if not 0 <= start < len(tokens):
            raise Mismatch(f"{len(tokens)} tokens are there: got {start} as the first to compute")
        self._progress[request.request_id] = Progress(tokens, list(request.blocks), request.num_preemptions)
        self.fed += len(tokens) - start
        return Row(tokens[start:], start, request.blocks)


def _drafting(f: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """(what was drafted, what the drafter says without any KV of its own, tokens that it computed)."""
    model = Transformer.random(TINY)
    options: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 96, "adaptive_drafts": False}
    llm = LLM(model, speculative="draft", draft_model=[0], num_draft_tokens=3, **options)
    assert llm.engine.speculation is not None
    drafter: Any = llm.engine.speculation.proposer
    drafter.__class__ = type("Drafter", (_Drafter,), {"first": staticmethod(f)})
    alone = LLM(model.skipping([0]), dtype="float32", num_blocks=32)
    drafted: list[tuple[int, ...]] = []
    texts: list[list[int]] = []
    plain = drafter.propose

    asked = itertools.count()

    def watched(requests: Any, lengths: Any) -> Any:
        if next(asked) % 3:  # a step that had no room for drafts
            return [NO_DRAFT for _ in requests]
        drafts = plain(requests, lengths)
        drafted.extend(d.token_ids for d in drafts if d)
        texts.extend(list(r.token_ids) for r, d in zip(requests, drafts, strict=True) if d)
        return drafts

    drafter.propose = watched
    llm.generate([[3, 1, 4, 1, 5]], SamplingParams(max_tokens=32, ignore_eos=True))
    said = [
        alone.generate([t], SamplingParams(max_tokens=len(d), ignore_eos=True))[0].token_ids
        for t, d in zip(texts, drafted, strict=True)
    ]
    return drafted, said, drafter.fed


def _break_engine(f: Any) -> None:
    drafted, said, _ = _drafting(f)
    for i, (got, expected) in enumerate(zip(drafted, said, strict=True)):
        expect_equal(got, expected, what=f"draft {i} against the drafter without a cache")


def _break_budget(f: Any) -> None:
    _, _, fed = _drafting(f)
    _, _, least = _drafting(_first)
    expect_at_most(fed, least, "tokens that the drafter computed")


BREAK = Task(
    "6.2 break",
    "Find out why drafts get worse after a pause",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: a full acceptance, and a refusal with a pause behind it", _break_by_hand, hint=1),
        NamedCheck("random: any text", _break_random, hint=3),
        NamedCheck("edges: nothing fed, all fed, a text of one token", _break_edges, hint=2),
        NamedCheck("state: inputs unchanged", _break_state, hint=2),
        NamedCheck("engine: it drafts what it would say without a cache", _break_engine, hint=1),
        NamedCheck("budget: tokens computed", _break_budget, hint=3),
    ),
    (
        "The drafter's cache holds the keys of what it *drafted*, the text what the target *said*. Where do the two part?",
        "A whole number from 0 to len(ids) - 1: the last token is always computed, its logits are wanted.",
        "Count from the front while fed[i] == ids[i], and stop at len(ids) - 1 at the latest. Lengths alone cannot tell.",
    ),
    references=(Progress.still_valid, draft_model._common),
)
