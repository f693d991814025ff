"""6.2 core: draft by looking the text up."""

from __future__ import annotations

import random
from typing import Any, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, show, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_1_1.common import TINY
from minillm.engine.request import Request
from minillm.model.transformer import Transformer
from minillm.spec import ngram
from minillm.spec.draft import Draft


def _request(ids: Sequence[int]) -> Request:
    return Request("r", 1, list(ids), SamplingParams(), 0, frozenset(), 64)


def _lookup(ids: Sequence[int], n: int, longest: int = 3) -> tuple[int, ...]:
    """Token by token: the longest suffix that stood somewhere before, its latest place, and what followed there."""
    for size in range(min(longest, len(ids) - 1), 0, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if list(ids[start : start + size]) == list(ids[-size:]):
                return tuple(ids[start + size : start + size + n])
    return ()


def _propose(cls: Any, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[tuple[int, ...]]:
    got = cls().propose([_request(ids) for ids in texts], list(lengths))
    if not isinstance(got, (list, tuple)) or len(got) != len(texts):
        raise Mismatch(f"propose gives one Draft for each of {len(texts)} requests, got {show(got)}")
    for draft in got:
        if not isinstance(draft, Draft) or not isinstance(draft.token_ids, tuple) or draft.probs is not None:
            raise Mismatch(f"propose gives Draft((token, …)), a tuple, without probs: a lookup is certain; got {show(draft)}")
    return [draft.token_ids for draft in got]


def _compare(cls: Any, ids: Sequence[int], n: int) -> None:
    expect_equal(_propose(cls, [ids], [n])[0], _lookup(ids, n), what=f"text {show(list(ids))}, at most {n} tokens")


def _core_shape(cls: Any) -> None:
    if not isinstance(cls, type):
        raise Mismatch("check takes the class itself, not an object of it")
    expect_equal([len(d) for d in _propose(cls, [[1, 2, 3], [1, 2, 1, 2]], [2, 1])], [0, 1], what="lengths of two drafts")


def _core_by_hand(cls: Any) -> None:
    _compare(cls, [5, 6, 7, 8, 5, 6], 2)
    _compare(cls, [1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2)  # the latest
    _compare(cls, [7, 1, 2, 3, 5, 2, 3, 6, 1, 2, 3], 3)  # the longest


def _core_random(cls: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(200):
        words = draw.randint(2, 4)
        _compare(cls, [draw.randint(1, words) for _ in range(draw.randint(1, 40))], draw.randint(1, 6))


def _core_edges(cls: Any) -> None:
    for ids, n in (([4], 3), ([4, 4], 3), ([4, 4, 4], 2), ([1, 2, 3], 4), ([1, 2, 1], 0), ([9, 8, 9], 5)):
        _compare(cls, ids, n)


def _core_batch(cls: Any) -> None:
    texts, lengths = [[1, 2, 3, 1, 2], [5, 6], [7, 7, 7, 7], [1, 2, 3, 1, 2]], [1, 4, 2, 3]
    got = _propose(cls, texts, lengths)
    expect_equal(got, [_lookup(t, n) for t, n in zip(texts, lengths, strict=True)], what="drafts of four requests")


def _core_state(cls: Any) -> None:
    mine, request = cls(), _request([1, 2, 3, 1, 2])
    with unchanged(token_ids=request.token_ids):
        mine.propose([request], [3])
    request.token_ids.append(3)
    got = mine.propose([request], [2])[0].token_ids
    expect_equal(got, _lookup(request.token_ids, 2), what="after one more token")
    other = _request([2, 3, 8, 7, 6, 1, 2, 3])  # another text under the same id: ids are free again when a request has ended
    expect_equal(mine.propose([other], [2])[0].token_ids, _lookup(other.token_ids, 2), what="another request after the first")


def _core_engine(cls: Any) -> None:
    model, prompts = Transformer.random(TINY), [[3, 1, 4, 1, 5] * 3, [2, 7], [6, 6, 6]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)

    def tokens(**options: Any) -> tuple[list[tuple[int, ...]], LLM]:
        llm = LLM(model, dtype="float32", block_size=4, num_blocks=96, **options)
        return [o.token_ids for o in llm.generate([list(p) for p in prompts], params)], llm

    expected, plain = tokens()
    got, mine = tokens(speculative=cls(), adaptive_drafts=False, num_draft_tokens=4)
    expect_equal(got, expected, what="tokens of three prompts with your drafts")
    expect_at_most(mine.meter.steps, plain.meter.steps - 1, "passes of the target")


def _core_budget(cls: Any) -> None:
    request = _request(list(range(3000)) + [0, 1])
    asked = _Counting(request.token_ids)
    request.token_ids = asked
    cls().propose([request], [4])
    expect_at_most(asked.read, 60_000, "tokens read to look a text of 3,002 tokens up")


class _Counting(list[int]):
    """A list that counts the tokens that are read from it."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        got = super().__getitem__(at)
        self.read += len(got) if isinstance(at, slice) else 1
        return got


CORE = Task(
    "6.2 core",
    "Draft by looking the text up",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: what followed, the latest, the longest", _core_by_hand, hint=1),
        NamedCheck("random: against trying every place", _core_random, hint=3),
        NamedCheck("edges: texts of one token, repetitions, no match", _core_edges, hint=3),
        NamedCheck("edges: four requests at once", _core_batch, hint=2),
        NamedCheck("state: requests unchanged, nothing remembered", _core_state, hint=2),
        NamedCheck("engine: the same tokens in fewer passes", _core_engine, hint=1),
        NamedCheck("budget: tokens read", _core_budget, hint=3),
    ),
    (
        "The last three tokens stood here before? Then propose what followed the latest time. If not, try the last two, then\n"
        "the last one. No earlier place: no draft.",
        "propose gets requests (read request.token_ids) and one length for each, and gives one Draft for each. Draft(()) is\n"
        "none. A tuple of at most `length` tokens, without probs.",
        "for size in (3, 2, 1), only if size < len(ids): tail = ids[-size:]; for start from len(ids) - size - 1 down to 0:\n"
        "if ids[start : start + size] == tail: return ids[start + size : start + size + length]",
    ),
    Seam("speculative", "proposer of drafts", lambda cls: {"speculative": cls()}),
    (ngram.NgramProposer, ngram.NgramProposer.continuation),
)
