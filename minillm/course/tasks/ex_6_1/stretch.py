"""6.1 stretch: write the test that a careless accept rule fails."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from minillm.course.expect import Mismatch, describe, expect_equal, is_whole, show, unchanged
from minillm.course.labs.speculation import distributions, limit
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_6_1.common import PROMPTS, TINY, dist, true_rule
from minillm.model.transformer import Transformer
from minillm.spec.verify import accept_or_replace

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
    return true_rule(p, q, token, u, u)


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
        return (never[0], False) if never and self.asked == 700 else true_rule(p, q, token, u, w)


class Planned:
    """Says tokens in the numbers that are planned, whatever it is asked."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.tokens = itertools.cycle([token for token, n in enumerate(counts) for _ in range(n)])

    def __call__(self, p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
        return next(self.tokens), False


P, Q = dist(0.4, 0.3, 0.2, 0.1), dist(0.2, 0.2, 0.1, 0.5)
# With these every careless rule is so far off that half of the draws find it, whatever the seed: n · Σ (share - p)² / p
# is 138 or more for 5,000 draws, and the border is 24.
WIDE = dist(0.2, 0.15, 0.15, 0.1, 0.1, 0.1, 0.1, 0.1), dist(0.1, 0.1, 0.1, 0.06, 0.16, 0.16, 0.16, 0.16)
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
    _audit(f, true_rule, P, Q, 1000)


def _stretch_right(f: Any) -> None:
    _verdict(f, true_rule, True, "the rule of the core task")
    _verdict(f, true_rule, True, "the rule where p and q are equal", P, P)
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
    holes = dist(0.6, 0.0, 0.4), dist(0.3, 0.4, 0.3)
    _verdict(f, true_rule, True, "the rule, where the model cannot say token 1", *holes)
    _verdict(f, true_rule, True, "the rule, where the drafter cannot say token 0", dist(0.5, 0.5), dist(0.0, 1.0))
    _verdict(f, ImpossibleOnce(), False, "a rule that says token 1 once", *holes)
    certain = dist(0.0, 1.0, 0.0), dist(0.3, 0.4, 0.3)
    _verdict(f, true_rule, True, "the rule, where the model can say token 1 only", *certain)
    _verdict(f, _always, False, "a rule that accepts everything", *certain)


def _stretch_drafts(f: Any) -> None:
    witness = Witness(true_rule)
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
        first = [_audit(f, rule, p, q, 4000) for rule in (true_rule, _always, true_rule)]
    expect_equal(first, [True, False, True], what="three rules one after another")


def _stretch_engine(f: Any) -> None:
    model = Transformer.random(TINY)
    for prompt in PROMPTS[:2]:
        p, q = (torch.from_numpy(x) for x in distributions(model, model.skipping([0, 1]), prompt, keep=8))
        _verdict(f, accept_or_replace, True, "the engine's own rule", p, q)
        _verdict(f, _always, False, "the engine with every draft accepted", p, q)


def _stretch_budget(f: Any) -> None:
    for draws in (1000, 3000):
        witness = Witness(true_rule)
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
