"""Exercise 6.1: the accept rule of a drawn draft, a pass that goes on behind a refusal, the test that a careless rule fails."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, describe, expect_equal, is_whole, show, unchanged
from minillm.course.labs.speculation import distributions, limit
from minillm.course.task import NamedCheck, Seam, Task
from minillm.engine.request import Request
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.spec.draft import Draft
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


# 6.1 stretch: the test that a careless rule fails ------------------------------------------------------------------------------

Rule = Callable[[Tensor, Tensor, int, float, float], tuple[int, bool]]
DRAWS = 5000


def _pick(weights: Tensor, w: float) -> int:
    shares = weights.cumsum(0)
    return min(int((shares <= w * shares[-1]).sum()), int(weights.nonzero()[-1]))


def _replaced_from_p(p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
    return (token, True) if u * q[token] < p[token] else (_pick(p, w), False)


def _always(p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
    return token, True


def _likeliest_left(p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
    return (token, True) if u * q[token] < p[token] else (int((p - q).argmax()), False)


def _one_number(p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
    return _true_rule(p, q, token, u, u)


def _too_strict(p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
    """Four fifths of what it should accept: on WIDE each share is off by four hundredths at most."""
    if u * q[token] < 0.8 * p[token]:
        return token, True
    left = (p - q).clamp(min=0)
    return _pick(left if left.sum() > 0 else p, w), False


def _ignores_the_draft(p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
    """Right, if slow: its tokens do have the distribution p."""
    return _pick(p, w), False


class ImpossibleOnce:
    """The rule, but for one token that the model cannot say: counted, not drawn, so that no answer is spared it by luck."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
        self.asked += 1
        never = (p == 0).nonzero().flatten().tolist()
        return (never[0], False) if never and self.asked == 700 else _true_rule(p, q, token, u, w)


class Planned:
    """Says tokens in the numbers that are planned, whatever it is asked."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.tokens = itertools.cycle([token for token, n in enumerate(counts) for _ in range(n)])

    def __call__(self, p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
        return next(self.tokens), False


P, Q = _dist(0.4, 0.3, 0.2, 0.1), _dist(0.2, 0.2, 0.1, 0.5)
# With these every careless rule is so far off that half of the draws find it, whatever the seed: n · Σ (share - p)² / p
# is 138 or more for 5,000 draws, and the border is 24.
WIDE = _dist(0.2, 0.15, 0.15, 0.1, 0.1, 0.1, 0.1, 0.1), _dist(0.1, 0.1, 0.1, 0.06, 0.16, 0.16, 0.16, 0.16)
CARELESS = {
    "a rule that replaces from p": _replaced_from_p, "a rule that accepts everything": _always,
    "a rule that replaces by the largest difference": _likeliest_left,
    "a rule that uses u for both decisions": _one_number, "a rule that accepts a fifth too little": _too_strict,
}  # fmt: skip


class Witness:
    """A rule that counts its calls, and keeps what it was given."""

    def __init__(self, rule: Rule):
        self.rule, self.tokens, self.numbers = rule, list[int](), list[tuple[float, float]]()

    def __call__(self, p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
        if not is_whole(token):
            asked = describe(token)
            raise Mismatch(f"the rule was asked about {asked}; a token is a whole number: int(...) or .tolist() makes it one")
        if not 0 <= token < len(q):
            raise Mismatch(f"the rule was asked about token {show(token)}; drafts are whole numbers from 0 to {len(q) - 1}")
        if not (0 <= u < 1 and 0 <= w < 1):
            raise Mismatch(f"the rule was given u={show(u)}, w={show(w)}; both are in [0, 1)")
        self.tokens.append(int(token))
        self.numbers.append((float(u), float(w)))
        return self.rule(p, q, int(token), float(u), float(w))


def _audit(f: Any, rule: Rule, p: Tensor, q: Tensor, draws: int = DRAWS) -> bool:
    got = f(rule, p, q, draws)
    if not isinstance(got, bool):
        extra = "; bool(...) makes one of it" if "bool" in str(getattr(got, "dtype", "")) else ""
        raise Mismatch(f"keeps gives True or False, got {describe(got)}{extra}")
    return got


def _verdict(f: Any, rule: Rule, expected: bool, what: str, p: Tensor = P, q: Tensor = Q) -> None:
    got = _audit(f, rule, p, q)
    if expected and not got:  # chance refuses a right rule once in a thousand seeds: the same question, tokens renumbered
        got = _audit(f, rule, p.flip(0), q.flip(0))
    expect_equal(got, expected, what=f"{what}, p={p.tolist()}, q={q.tolist()}, {DRAWS:,} draws")


def _stretch_shape(f: Any) -> None:
    _audit(f, _true_rule, P, Q, 1000)


def _stretch_right(f: Any) -> None:
    _verdict(f, _true_rule, True, "the rule of the core task")
    _verdict(f, _true_rule, True, "the rule where p and q are equal", P, P)
    _verdict(f, _ignores_the_draft, True, "a rule that always draws from p")


def _stretch_careless(f: Any) -> None:
    for what, rule in CARELESS.items():
        _verdict(f, rule, False, what, *WIDE)


def _stretch_border(f: Any) -> None:
    """Counts that are planned, not drawn: the same for every seed."""
    near, far = [(2, 2, 400, 4.0, True), (31, 31, DRAWS, 52.0, True)], [(2, 2, DRAWS, 15.5, False), (200, 2, DRAWS, 15.5, False)]
    for vocab, can, draws, chi, expected in near + far:
        p = torch.zeros(vocab, dtype=torch.float64)
        p[:can] = 1 / can
        q = torch.full_like(p, 1 / vocab)
        witness = Witness(_ignores_the_draft)
        _audit(f, witness, p, q, draws)
        n = len(witness.tokens)  # the learner's own number of draws
        delta = (chi / n * can / (can - can % 2)) ** 0.5
        sides = [1 - can % 2 * (i == can - 1) for i in range(can)]
        counts = [round(n / can * (1 + delta * side * (-1) ** i)) for i, side in enumerate(sides)]
        counts[-1] += n - sum(counts)
        found = sum((c - n / can) ** 2 / (n / can) for c in counts)
        shown = f"{counts[0]:,} and {counts[1]:,}" + (" by turns" if can > 2 else "")
        never = f" ({vocab - can} more that cannot occur)" if vocab > can else ""
        what = f"{can} equally likely tokens{never}, {n:,} draws, counts of {shown}: "
        what += f"chi-square is {found:.1f}, the border {limit(can - 1):.1f}"
        expect_equal(_audit(f, Planned(counts), p, q, draws), expected, what=what)


def _stretch_zeros(f: Any) -> None:
    holes = _dist(0.6, 0.0, 0.4), _dist(0.3, 0.4, 0.3)
    _verdict(f, _true_rule, True, "the rule, where the model cannot say token 1", *holes)
    _verdict(f, _true_rule, True, "the rule, where the drafter cannot say token 0", _dist(0.5, 0.5), _dist(0.0, 1.0))
    _verdict(f, ImpossibleOnce(), False, "a rule that says token 1 once", *holes)
    certain = _dist(0.0, 1.0, 0.0), _dist(0.3, 0.4, 0.3)
    _verdict(f, _true_rule, True, "the rule, where the model can say token 1 only", *certain)
    _verdict(f, _always, False, "a rule that accepts everything", *certain)


def _stretch_drafts(f: Any) -> None:
    witness = Witness(_true_rule)
    _audit(f, witness, P, Q)
    counts = torch.bincount(torch.tensor(witness.tokens), minlength=len(Q)).double()
    expected = len(witness.tokens) * Q
    if float(((counts - expected) ** 2 / expected).sum()) > 30:
        raise Mismatch(f"drafts have the shares {[round(x, 3) for x in (counts / counts.sum()).tolist()]}, q is {Q.tolist()}")
    u, w = torch.tensor(witness.numbers, dtype=torch.float64).T
    if abs(float(torch.corrcoef(torch.stack([u, w]))[0, 1])) > 0.1 or min(float(u.std()), float(w.std())) < 0.2:
        raise Mismatch("u and w must be drawn evenly from [0, 1), each on its own")
    of = [u[torch.tensor(witness.tokens) == t].mean().item() for t in range(len(Q))]
    if max(of) - min(of) > 0.1:
        raise Mismatch("u must not depend on the drafted token: draw the token with a number of its own")


def _stretch_state(f: Any) -> None:
    p, q = P.clone(), Q.clone()
    with unchanged(p=p, q=q):
        first = [_audit(f, rule, p, q, 4000) for rule in (_true_rule, _always, _true_rule)]
    expect_equal(first, [True, False, True], what="three rules one after another")


def _stretch_engine(f: Any) -> None:
    model = Transformer.random(TINY)
    for prompt in PROMPTS[:2]:
        p, q = (torch.from_numpy(x) for x in distributions(model, model.skipping([0, 1]), prompt, keep=8))
        _verdict(f, accept_or_replace, True, "the engine's own rule", p, q)
        _verdict(f, _always, False, "the engine with every draft accepted", p, q)


def _stretch_budget(f: Any) -> None:
    for draws in (1000, 3000):
        witness = Witness(_true_rule)
        _audit(f, witness, P, Q, draws)
        if not draws / 2 <= len(witness.tokens) <= draws:
            raise Mismatch(f"the rule was called {len(witness.tokens):,} times; half of {draws:,} at least, and no more than all")


STRETCH = Task(
    "6.1 stretch",
    "Write the test that a careless rule fails",
    (
        NamedCheck("shape", _stretch_shape, hint=2),
        NamedCheck("exact: rules that keep p", _stretch_right, hint=3),
        NamedCheck("exact: five careless rules", _stretch_careless, hint=1),
        NamedCheck("exact: counts on both sides of the border", _stretch_border, hint=3),
        NamedCheck("random: drafts come from q, u and w from nowhere", _stretch_drafts, hint=2),
        NamedCheck("edges: tokens of probability 0", _stretch_zeros, hint=3),
        NamedCheck("state: inputs unchanged, nothing remembered", _stretch_state, hint=2),
        NamedCheck("engine: its own rule, between two models", _stretch_engine, hint=1),
        NamedCheck("budget: calls of the rule", _stretch_budget, hint=2),
    ),
    (
        "No single token shows it: count. Which counts do you expect of a rule that keeps p, and how far from them is chance?",
        "Draw tokens from q, as many as draws says, and a pair u, w for each; call rule(p, q, token, u, w), and count\n"
        "the tokens that come out: [vocab]. Expected: draws * p. The lesson's chi_square and limit judge the difference.",
        "Where p is 0, nothing may come out at all, and nothing can be divided by: look at these tokens first. Over the others\n"
        "chi-square is sum((counts - expected) ** 2 / expected); one fewer than their number are its degrees of freedom.\n"
        "Only one such token: nothing is left to compare.",
    ),
)

TASKS = (CORE, BREAK, STRETCH)
