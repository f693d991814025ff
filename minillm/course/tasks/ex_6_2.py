"""Exercise 6.2: prompt lookup as a proposer, a drafter that trusts stale KV, and the length that pays."""

from __future__ import annotations

import itertools
import random
from typing import Any, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole, show, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_1_1 import TINY
from minillm.engine.batch import Row
from minillm.engine.request import Request
from minillm.model.transformer import Transformer
from minillm.spec import draft_model, length, ngram
from minillm.spec.draft import NO_DRAFT, Draft
from minillm.spec.draft_model import DraftModelProposer, Progress


def _request(ids: Sequence[int]) -> Request:
    return Request("r", 1, list(ids), SamplingParams(), 0, frozenset(), 64)


# 6.2 core: prompt lookup ------------------------------------------------------------------------------------------------------


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


# 6.2 break: a drafter that trusts stale KV ------------------------------------------------------------------------------------


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


# 6.2 stretch: the length that pays --------------------------------------------------------------------------------------------


def _best(shares: Sequence[float], c: float, v: Sequence[float]) -> int:
    def speed(n: int) -> float:
        return (1 + sum(shares[:n])) / (n * c + v[n])

    best = 0
    for n in range(1, len(shares) + 1):
        if speed(n) > speed(best):
            best = n
    return best


def _length(f: Any, shares: Sequence[float], c: float, v: Sequence[float]) -> None:
    got = f(list(shares), c, list(v))
    if not is_whole(got):
        raise Mismatch(f"best_length gives a whole number, got {show(got)}")
    what = f"shares {[round(s, 3) for s in shares]}, c {c:.3g}, v {[round(x, 3) for x in v]}"
    expect_equal(int(got), _best(shares, c, v), what=what)


def _stretch_shape(f: Any) -> None:
    got = f([0.5, 0.25], 0.1, [1.0, 1.1, 1.2])
    if not is_whole(got) or not 0 <= got <= 2:
        raise Mismatch(f"best_length gives a whole number from 0 to len(shares), got {show(got)}")


def _stretch_by_hand(f: Any) -> None:
    _length(f, [0.75, 0.5, 0.375], 0.25, [1.0, 1.0, 1.0, 1.0])
    _length(f, [0.5, 0.25], 0.6, [1.0, 1.0, 1.0])


def _stretch_random(f: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(300):
        n = draw.randint(1, 8)
        shares = sorted((draw.random() for _ in range(n)), reverse=True)
        v = [1.0] + sorted(draw.uniform(1.0, 2.0) for _ in range(n))
        _length(f, shares, draw.uniform(0.0, 0.6), v)


def _stretch_edges(f: Any) -> None:
    _length(f, [], 0.1, [1.0])
    _length(f, [0.0, 0.0], 0.0, [1.0, 1.0, 1.0])  # a tie: the shorter
    _length(f, [1.0] * 6, 0.0, [1.0] * 7)
    _length(f, [0.9, 0.1, 0.1, 0.1, 0.1], 0.1, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0])


def _stretch_two_peaks(f: Any) -> None:
    """A tile of the hardware is full at 4 tokens: the next one pays for a whole tile, those behind it for nothing."""
    _length(f, [0.9, 0.85, 0.8, 0.78, 0.76, 0.74, 0.72], 0.02, [1.0, 1.0, 1.0, 1.0, 1.9, 1.9, 1.9, 1.9])
    _length(f, [0.9, 0.88, 0.86, 0.84, 0.84, 0.84, 0.84, 0.84], 0.0, [1.0, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8, 1.8])


def _stretch_state(f: Any) -> None:
    shares, v = [0.7, 0.5], [1.0, 1.1, 1.2]
    with unchanged(shares=shares, v=v):
        f(shares, 0.1, v)


STRETCH = Task(
    "6.2 stretch",
    "Choose the draft length from what was measured",
    (
        NamedCheck("shape", _stretch_shape, hint=2),
        NamedCheck("exact: three shares, and a drafter that is too dear", _stretch_by_hand, hint=1),
        NamedCheck("random: against trying every length", _stretch_random, hint=3),
        NamedCheck("edges: nothing to draft, ties, all right", _stretch_edges, hint=2),
        NamedCheck("edges: a checking pass that grows in jumps", _stretch_two_peaks, hint=1),
        NamedCheck("state: inputs unchanged", _stretch_state, hint=2),
    ),
    (
        "Tokens of a pass: the target's own one, and each drafted token as often as it and all before it are right. Time of a\n"
        "pass: n drafts and a check of n + 1 tokens. The speed need not rise and then fall: look at every n.",
        "shares[k] belongs to draft k + 1; v[n] to n drafts, v[0] = 1. 0 drafts are always possible. At equal speed the shorter.",
        "speed(n) = (1 + sum(shares[:n])) / (n * c + v[n]); the n of the largest, the first of them where several are.",
    ),
    references=(length.best_length,),
)

TASKS = (CORE, BREAK, STRETCH)
