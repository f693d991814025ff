"""Exercise 6.1: the accept rule of a drawn draft, a pass that goes on behind a refusal, a drafter of one's own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.config import ModelConfig
from minillm.course.expect import Mismatch, expect_equal, is_whole, show, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.engine.request import Request
from minillm.model.transformer import Transformer
from minillm.spec.draft import Draft
from minillm.spec.ngram import NgramProposer
from minillm.spec.verify import accept_or_replace, verify

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, max_position=128,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 2, 7], [1, 6, 1, 8, 0])
OPTIONS: dict[str, Any] = {"dtype": "float64", "block_size": 4, "num_blocks": 60}


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


def _dist(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# 6.1 core: the accept rule ----------------------------------------------------------------------------------------------------


def _true_rule(p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
    if u * float(q[token]) < float(p[token]):
        return token, True
    left = [max(0.0, a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    left = left if sum(left) > 0 else p.tolist()
    total, wanted = 0.0, w * sum(left)
    for i, x in enumerate(left):
        total += x
        if wanted < total:
            return i, False
    return max(i for i, x in enumerate(left) if x > 0), False


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
    expect_equal(_rule(f, p, q, token, u, w), _true_rule(p, q, token, u, w), what=f"(token, stands) for {what}")


def _core_shape(f: Any) -> None:
    _rule(f, _dist(0.5, 0.5), _dist(0.9, 0.1), 0, 0.1, 0.5)
    _rule(f, _dist(0.5, 0.5), _dist(0.9, 0.1), 0, 0.9, 0.5)


def _core_by_hand(f: Any) -> None:
    p, q = _dist(0.5, 0.3, 0.2), _dist(0.2, 0.3, 0.5)
    for token, u, w in ((0, 0.99, 0.5), (1, 0.99, 0.5), (2, 0.39, 0.5), (2, 0.41, 0.5), (2, 0.99, 0.99)):
        _judge(f, p, q, token, u, w)


def _core_residual(f: Any) -> None:
    p, q = _dist(0.4, 0.1, 0.5), _dist(0.1, 0.8, 0.1)  # left over: 0.3, 0, 0.4
    for w in (0.0, 0.42, 0.44, 0.99):
        _judge(f, p, q, 1, 0.5, w)


def _core_random(f: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for p, q in zip(_rows(300), _rows(300), strict=True):
        token = draw.choice([i for i, x in enumerate(q.tolist()) if x > 0])
        _judge(f, p, q, token, draw.random(), draw.random())


def _core_counted(f: Any) -> None:
    p, q, n = _dist(0.6, 0.25, 0.15, 0.0), _dist(0.1, 0.2, 0.3, 0.4), 4000
    numbers, counts = torch.rand(n, 3, dtype=torch.float64).tolist(), [0, 0, 0, 0]
    for u, w, drawn in numbers:
        token = int((q.cumsum(0) <= drawn).sum().clamp(max=3))
        counts[f(p.clone(), q.clone(), token, u, w)[0]] += 1
    for i, x in enumerate(p.tolist()):
        if abs(counts[i] / n - x) > 0.045:
            raise Mismatch(f"token {i} came out in a share of {counts[i] / n:.3f} of {n} draws; p gives it {x:g}")


def _core_edges(f: Any) -> None:
    one = _dist(0.0, 1.0, 0.0)
    for p, q, token in (
        (_dist(0.0, 0.5, 0.5), _dist(0.5, 0.5, 0.0), 0), (one, _dist(0.4, 0.3, 0.3), 2),
        (_dist(0.2, 0.5, 0.3), one, 1), (one, one, 1),
    ):  # fmt: skip
        for u in (0.0, 0.3, 0.7, 1 - 2**-53):
            for w in (0.0, 0.5, 1 - 2**-53):
                _judge(f, p, q, token, u, w)


def _core_rounding(f: Any) -> None:
    p, q = _dist(0.2, 0.8, 0.0), _dist(0.2 + 1e-12, 0.8, 0.0)
    token, accepted = _rule(f, p, q, 0, 1 - 1e-13, 0.9)
    if accepted or not p[token] > 0:
        what = "p and q differ by 1e-12 and nothing is left over: any token of p but no acceptance"
        raise Mismatch(f"{what}, got {(token, accepted)}")


def _core_state(f: Any) -> None:
    p, q = _dist(0.4, 0.1, 0.5), _dist(0.1, 0.8, 0.1)
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


# 6.1 break: a pass that goes on behind a refusal ------------------------------------------------------------------------------


@dataclass
class Judge:
    """A rule whose verdicts are set: replaced[i] stands in place of the i-th drafted token, None lets it stand."""

    replaced: Sequence[int | None]
    asked: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)

    def rule(self, i: int, token: int) -> tuple[int, bool]:
        self.asked.append(i)
        other = self.replaced[i]
        return (token, True) if other is None else (other, False)

    def sample(self, i: int) -> int:
        self.sampled.append(i)
        return 100 + i


def _true_pass(draft: Sequence[int], rule: Callable[[int, int], tuple[int, bool]], sample: Callable[[int], int]) -> list[int]:
    out: list[int] = []
    for i, token in enumerate(draft):
        token, stands = rule(i, token)
        out.append(token)
        if not stands:
            return out
    return [*out, sample(len(draft))]


def _run(f: Any, draft: Sequence[int], replaced: Sequence[int | None]) -> Judge:
    judge, truth = Judge(replaced), Judge(replaced)
    got = f(list(draft), judge.rule, judge.sample)
    if not isinstance(got, list) or not all(is_whole(t) for t in got):
        raise Mismatch(f"one_pass gives a list of token ids, got {show(got)}")
    refused = next((i for i, x in enumerate(replaced) if x is not None), None)
    what = f"draft {list(draft)}, " + (f"refused at place {refused}" if refused is not None else "nothing refused")
    expect_equal([int(t) for t in got], _true_pass(draft, truth.rule, truth.sample), what=what)
    return judge


def _break_shape(f: Any) -> None:
    got = f([5, 6], Judge([None, None]).rule, Judge([]).sample)
    if not isinstance(got, list) or len(got) != 3 or not all(is_whole(t) for t in got):
        raise Mismatch(f"two drafted tokens that stand and the model's own: a list of 3 token ids, got {show(got)}")


def _break_by_hand(f: Any) -> None:
    _run(f, [5, 6, 7], [None, None, None])
    _run(f, [5, 6, 7], [None, 9, None])


def _break_random(f: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(100):
        n = draw.randint(1, 6)
        _run(f, [draw.randint(0, 60) for _ in range(n)], [draw.choice([None, None, draw.randint(61, 99)]) for _ in range(n)])


def _break_edges(f: Any) -> None:
    _run(f, [], [])
    _run(f, [5], [None])
    _run(f, [5], [8])
    _run(f, [5, 6, 7], [8, 8, 8])
    _run(f, [5, 6, 7], [None, None, 8])


def _break_state(f: Any) -> None:
    judge = _run(f, [5, 6, 7, 8], [None, 9, None, None])
    expect_equal(judge.asked, [0, 1], what="places that the rule was asked about, refused at place 1")
    expect_equal(judge.sampled, [], what="places that were sampled, refused at place 1")


def _break_engine(f: Any) -> None:
    """Passes over a real model: its row i says what follows i drafted tokens."""
    llm = LLM(Transformer.random(TINY), **OPTIONS)

    def after(ids: Sequence[int]) -> int:
        return llm.generate([list(ids)], SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids[0]

    prompt, draw = list(PROMPTS[0]), random.Random(3)
    expected = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    ids = list(prompt)
    while len(ids) < len(prompt) + 8:
        done = len(ids) - len(prompt)
        draft = [t if draw.random() < 0.6 else (t + 1) % 61 for t in expected[done : done + 3]]
        base = list(ids)
        says = [after([*base, *draft[:i]]) for i in range(len(draft) + 1)]
        new = f(list(draft), lambda i, t, says=says: (says[i], says[i] == t), lambda i, says=says: says[i])
        ids += [int(t) for t in new]
    expect_equal(ids[len(prompt) : len(prompt) + 8], list(expected[:8]), what="greedy tokens of a tiny model, pass by pass")


BREAK = Task(
    "6.1 break",
    "Find out why drafted answers lose their thread",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: nothing refused; refused in the middle", _break_by_hand, hint=1),
        NamedCheck("random: against the pass by hand", _break_random, hint=2),
        NamedCheck("edges: no draft, one token, the first or the last refused", _break_edges, hint=2),
        NamedCheck("state: nothing is asked behind a refusal", _break_state, hint=1),
        NamedCheck("engine: pass by pass, a real model's own text", _break_engine, hint=1),
    ),
    (
        "Row i of a pass was computed behind the drafted tokens before it. What does row i + 1 know about a text in which\n"
        "drafted token i was replaced?",
        "With γ drafted tokens a pass gives the accepted ones and exactly one more: the replacement of the first refused one,\n"
        "or, if all stand, sample(γ).",
        "for i, token in enumerate(draft): token, stands = rule(i, token); out.append(token); unless it stands: return out\n"
        "then append sample(len(draft)) and return",
    ),
)


# 6.1 stretch: a drafter of one's own ------------------------------------------------------------------------------------------


def _continuation(ids: Sequence[int], n: int) -> tuple[int, ...]:
    """Tokens that followed the latest earlier occurrence of the longest repeated suffix of at most three tokens."""
    for size in range(min(3, len(ids) - 1), 0, -1):
        for at in range(len(ids) - size - 1, -1, -1):
            if list(ids[at : at + size]) == list(ids[-size:]):
                return tuple(ids[at + size : at + size + n])
    return ()


def _request(ids: Sequence[int]) -> Request:
    return Request("r", len(ids), list(ids), SamplingParams(), 0, frozenset(), 64)


def _ask(cls: Any, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[tuple[int, ...]]:
    requests = [_request(ids) for ids in texts]
    got = cls().propose(requests, list(lengths))
    if not isinstance(got, (list, tuple)) or len(got) != len(texts) or not all(isinstance(d, Draft) for d in got):
        raise Mismatch(f"propose gives a list of one Draft for each request, got {show(got)}")
    for draft in got:
        if not all(is_whole(t) for t in draft.token_ids):
            raise Mismatch(f"a draft's token_ids are whole numbers, got {show(draft.token_ids)}")
        if draft.probs is not None:
            raise Mismatch("a lookup names its tokens with certainty: leave probs None")
    expect_equal([r.token_ids for r in requests], [list(ids) for ids in texts], what="your drafter changed a request's token_ids")
    return [tuple(int(t) for t in d.token_ids) for d in got]


def _look(cls: Any, ids: Sequence[int], n: int) -> None:
    expect_equal(_ask(cls, [ids], [n])[0], _continuation(ids, n), what=f"text {list(ids)}, at most {n} tokens")


def _stretch_shape(cls: Any) -> None:
    if not isinstance(cls, type):
        raise Mismatch("check takes the class itself, not an object of it")
    _ask(cls, [[5, 6, 5], [7]], [2, 2])


def _stretch_by_hand(cls: Any) -> None:
    _look(cls, [5, 6, 7, 8, 9, 1, 5, 6], 2)
    _look(cls, [5, 6, 1, 5, 6, 2, 5, 6], 1)
    _look(cls, [3, 5, 6, 1, 4, 5, 6, 2, 3, 5, 6], 1)
    _look(cls, [9, 5, 6, 7, 1, 2, 5, 6, 7, 3, 9, 5, 6, 7], 1)  # three tokens are the most that is asked for


def _stretch_random(cls: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(200):
        _look(cls, [draw.randint(0, 3) for _ in range(draw.randint(1, 24))], draw.randint(1, 5))


def _stretch_edges(cls: Any) -> None:
    for ids, n in (([5], 3), ([5, 6, 7], 3), ([5, 5], 3), ([5, 5, 5, 5], 3), ([5, 6, 5, 6], 0), ([5, 6, 5], 9)):
        _look(cls, ids, n)


def _stretch_several(cls: Any) -> None:
    texts, lengths = ([5, 6, 7, 5, 6], [1, 2, 3], [8, 9, 8, 9]), (1, 2, 0)
    expected = [_continuation(ids, n) for ids, n in zip(texts, lengths, strict=True)]
    expect_equal(_ask(cls, texts, lengths), expected, what="three requests at once")


def _stretch_state(cls: Any) -> None:
    mine = cls()
    for ids in ([5, 6, 7, 5, 6], [9, 9, 1], [5, 6, 8, 5, 6]):
        got = mine.propose([_request(ids)], [2])[0].token_ids
        expect_equal(tuple(got), _continuation(ids, 2), what=f"text {ids}, asked after others: requests share nothing")


def _passes(drafter: Any) -> tuple[list[tuple[int, ...]], int]:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    tokens, llm = _answers(params, speculative=drafter, adaptive_drafts=False, num_draft_tokens=4, max_draft_batch=64)
    return tokens, llm.meter.steps


class Reference:
    """The rule word for word, as a Proposer."""

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        return [Draft(_continuation(r.token_ids, n)) for r, n in zip(requests, lengths, strict=True)]


def _stretch_engine(cls: Any) -> None:
    expected, _ = _answers(SamplingParams(max_tokens=60, ignore_eos=True))
    expect_equal(_passes(cls())[0], expected, what="greedy tokens of three prompts with your drafter")


def _stretch_passes(cls: Any) -> None:
    (_, got), (_, most) = _passes(cls()), _passes(Reference())
    if got > most:
        raise Mismatch(f"three answers of 60 tokens took {got} passes; with every match found it is {most}")


STRETCH = Task(
    "6.1 stretch",
    "Put a drafter of your own into the engine",
    (
        NamedCheck("shape", _stretch_shape, hint=2),
        NamedCheck("exact: the longest match, the latest place", _stretch_by_hand, hint=1),
        NamedCheck("random: against every place and size", _stretch_random, hint=3),
        NamedCheck("edges: nothing repeats, nothing asked, the end of the text", _stretch_edges, hint=2),
        NamedCheck("edges: several requests of different lengths", _stretch_several, hint=2),
        NamedCheck("state: requests share nothing", _stretch_state, hint=2),
        NamedCheck("engine: the same greedy tokens", _stretch_engine, hint=2),
        NamedCheck("budget: passes of the model", _stretch_passes, hint=1),
    ),
    (
        "More evidence first: do the text's last three tokens occur earlier? Only then two, then one. Among equal evidence the\n"
        "latest place: the text has moved on since the others.",
        "propose(requests, lengths) gives [Draft((token, …)), …], one for each request in order, at most lengths[i] tokens,\n"
        "Draft() for no guess. request.token_ids is the text so far: read it, do not change it.",
        "for size in (3, 2, 1), where the text is longer than size:\n"
        "    for at in range(len(ids) - size - 1, -1, -1):\n"
        "        if ids[at:at + size] == ids[-size:]: return Draft(tuple(ids[at + size:at + size + n]))",
    ),
    Seam("speculative", "drafter", lambda cls: {"speculative": cls()}),
    (NgramProposer,),
)

TASKS = (CORE, BREAK, STRETCH)
