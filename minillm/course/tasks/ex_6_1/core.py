"""6.1 core: accept a drawn draft, or replace it."""

from __future__ import annotations

import random
from typing import Any, Sequence

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_equal, is_whole, show, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_6_1.common import OPTIONS, PROMPTS, TINY, dist, true_rule
from minillm.engine.request import Request
from minillm.model.transformer import Transformer
from minillm.spec.draft import Draft
from minillm.spec.verify import accept_or_replace, verify


def _answers(params: SamplingParams, **options: Any) -> tuple[list[tuple[int, ...]], LLM]:
    llm = LLM(Transformer.random(TINY), **OPTIONS, **options)
    return [output.token_ids for output in llm.generate(list(PROMPTS), params)], llm


def _rows(n: int, vocab: int = 5, zeros: bool = True) -> Tensor:
    """n random distributions, some of whose tokens cannot occur."""
    weights = torch.rand(n, vocab, dtype=torch.float64) + 0.01
    if zeros:
        weights *= torch.rand(n, vocab) > 0.3
        weights[:, 0] += (weights.sum(-1) == 0).double()
    return weights / weights.sum(-1, keepdim=True)


def _rule(f: Any, p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
    got = f(p.clone(), q.clone(), token, u, w)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Mismatch(f"accept gives (token, whether the drafted token stands), got {show(got)}")
    if not is_whole(got[0]) or not isinstance(got[1], bool):
        raise Mismatch(f"accept gives a whole number and a bool, got {show(got)}; int(...) and bool(...) make them of a tensor")
    if not 0 <= got[0] < len(p):
        raise Mismatch(f"p {show(p.tolist())}, q {show(q.tolist())}: {got[0]} is no token of a vocabulary of {len(p)}")
    return int(got[0]), got[1]


def _judge(f: Any, p: Tensor, q: Tensor, token: int, u: float, w: float) -> None:
    what = f"p {[round(x, 3) for x in p.tolist()]}, q {[round(x, 3) for x in q.tolist()]}, token {token}, u={u:.3g}, w={w:.3g}"
    expect_equal(_rule(f, p, q, token, u, w), true_rule(p, q, token, u, w), what=f"(token, stands) for {what}")


def _core_shape(f: Any) -> None:
    _rule(f, dist(0.5, 0.5), dist(0.9, 0.1), 0, 0.1, 0.5)
    _rule(f, dist(0.5, 0.5), dist(0.9, 0.1), 0, 0.9, 0.5)


def _core_by_hand(f: Any) -> None:
    p, q = dist(0.5, 0.3, 0.2), dist(0.2, 0.3, 0.5)
    for token, u, w in ((0, 0.99, 0.5), (1, 0.99, 0.5), (2, 0.39, 0.5), (2, 0.41, 0.5), (2, 0.99, 0.99)):
        _judge(f, p, q, token, u, w)


def _core_residual(f: Any) -> None:
    p, q = dist(0.4, 0.1, 0.5), dist(0.1, 0.8, 0.1)  # left over: 0.3, 0, 0.4
    for w in (0.0, 0.42, 0.44, 0.99):
        _judge(f, p, q, 1, 0.5, w)


def _core_random(f: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for p, q in zip(_rows(300), _rows(300), strict=True):
        token = draw.choice([i for i, x in enumerate(q.tolist()) if x > 0])
        _judge(f, p, q, token, draw.random(), draw.random())


def _core_counted(f: Any) -> None:
    p, q, n = dist(0.6, 0.25, 0.15, 0.0), dist(0.1, 0.2, 0.3, 0.4), 4000
    numbers, counts = torch.rand(n, 3, dtype=torch.float64).tolist(), [0, 0, 0, 0]
    for u, w, drawn in numbers:
        token = int((q.cumsum(0) <= drawn).sum().clamp(max=3))
        counts[f(p.clone(), q.clone(), token, u, w)[0]] += 1
    for i, x in enumerate(p.tolist()):
        if abs(counts[i] / n - x) > 0.045:
            raise Mismatch(f"token {i} came out in a share of {counts[i] / n:.3f} of {n} draws; p gives it {x:g}")


def _core_edges(f: Any) -> None:
    one = dist(0.0, 1.0, 0.0)
    for p, q, token in (
        (dist(0.0, 0.5, 0.5), dist(0.5, 0.5, 0.0), 0), (one, dist(0.4, 0.3, 0.3), 2),
        (dist(0.2, 0.5, 0.3), one, 1), (one, one, 1),
    ):  # fmt: skip
        for u in (0.0, 0.3, 0.7, 1 - 2**-53):
            for w in (0.0, 0.5, 1 - 2**-53):
                _judge(f, p, q, token, u, w)


def _core_rounding(f: Any) -> None:
    p, q = dist(0.2, 0.8, 0.0), dist(0.2 + 1e-12, 0.8, 0.0)
    token, accepted = _rule(f, p, q, 0, 1 - 1e-13, 0.9)
    if accepted or not p[token] > 0:
        what = "p and q differ by 1e-12 and nothing is left over: any token of p but no acceptance"
        raise Mismatch(f"{what}, got {(token, accepted)}")


def _core_state(f: Any) -> None:
    p, q = dist(0.4, 0.1, 0.5), dist(0.1, 0.8, 0.1)
    for u in (0.01, 0.9):
        with unchanged(p=p, q=q):
            f(p, q, 1, u, 0.3)


class Flat:
    """Draws drafts from a flat distribution."""

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        flat = torch.full((TINY.vocab_size,), 1 / TINY.vocab_size, dtype=torch.float64)
        tokens = [tuple((7 * r.num_tokens + i) % 61 for i in range(n)) for r, n in zip(requests, lengths, strict=True)]
        return [Draft(ids, flat.expand(len(ids), -1)) for ids in tokens]


def _core_engine(f: Any) -> None:
    asked = 0

    def counted(*given: Any) -> tuple[int, bool]:
        nonlocal asked
        asked += 1
        answer: tuple[int, bool] = f(*given)
        return answer

    params = SamplingParams(max_tokens=16, temperature=1.0, seed=5, ignore_eos=True)
    for drafter in ({"speculative": Flat()}, {"speculative": "draft", "draft_model": [0, 1]}):
        options = {**drafter, "adaptive_drafts": False, "num_draft_tokens": 3}
        expected, _ = _answers(params, **options)
        got, _ = _answers(params, accept_rule=counted, **options)
        expect_equal(got, expected, what="tokens of three prompts at temperature 1 under your rule")
    if not asked:
        raise Mismatch("the engine never asked your rule")


CORE = Task(
    "6.1 core",
    "Accept a drawn draft, or replace it",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: when a drafted token stands", _core_by_hand, hint=1),
        NamedCheck("exact: what replaces a refused token", _core_residual, hint=1),
        NamedCheck("random: against the rule by loops", _core_random, hint=3),
        NamedCheck("random: 4,000 draws have the target's shares", _core_counted, hint=1),
        NamedCheck("edges: probabilities of 0 and 1", _core_edges, hint=3),
        NamedCheck("edges: nothing is left over but rounding", _core_rounding, hint=2),
        NamedCheck("state: inputs unchanged", _core_state, hint=3),
        NamedCheck("engine: the same tokens at a temperature", _core_engine, hint=3),
    ),
    (
        "The drafter proposes token too often by q / p where q > p: accept it p / q of the times. What it proposes too rarely\n"
        "has to come from the replacements, so these are drawn from what p has more of than q.",
        "p, q: [vocab] float64. u decides acceptance, w the replacement. Give (int, bool). Where max(0, p - q) is zero\n"
        "everywhere, p and q are equal up to rounding: draw from p.",
        "if u * q[token] < p[token]: return token, True\n"
        "left = (p - q).clamp(min=0); if left.sum() is 0: left = p\n"
        "shares = left.cumsum(0); the first index with shares > w * shares[-1], as an int; return index, False",
    ),
    Seam("accept_rule", "accept rule", lambda f: {"accept_rule": f}),
    (accept_or_replace, verify),
)
