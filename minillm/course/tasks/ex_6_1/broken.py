"""6.1 break: find out why drafted answers lose their thread: a pass goes on behind a refusal."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_equal, is_whole, show
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_6_1.common import OPTIONS, PROMPTS, TINY
from minillm.model.transformer import Transformer


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
