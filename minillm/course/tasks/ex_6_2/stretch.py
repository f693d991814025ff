"""6.2 stretch: choose the draft length from what was measured."""

from __future__ import annotations

import random
from typing import Any, Sequence

import torch

from minillm.course.expect import Mismatch, expect_equal, is_whole, show, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.spec import length


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
