"""5.3 stretch: simulate a schedule that runs ahead."""

from __future__ import annotations

import random
from typing import Any, Callable, Sequence

from minillm.course.expect import Mismatch, expect_equal, unchanged
from minillm.course.task import NamedCheck, Task


def _spans(plan: Sequence[float], run: Sequence[float], hand: Sequence[float], overlap: bool) -> list[tuple[float, float]]:
    """Event by event: the host's list of jobs, one after the other; a job that hands out waits for its run."""
    n = len(run)
    jobs: list[tuple[str, int]] = []
    if overlap:
        for i in range(n):
            jobs += [("plan", i)] + ([("hand", i - 1)] if i else [])
    else:
        for i in range(n):
            jobs += [("plan", i), ("hand", i)]
    host, stops, spans = 0.0, {-1: 0.0}, []
    for job, i in jobs:
        if job == "plan":
            host += plan[i]
            start = max(host, stops[i - 1])
            stops[i] = start + run[i]
            spans.append((start, stops[i]))
        else:
            host = max(host, stops[i]) + hand[i]
    return spans


def _compare(f: Callable[..., Any], plan: list[float], run: list[float], hand: list[float], what: str) -> None:
    for overlap in (False, True):
        got = f(plan, run, hand, overlap)
        name = f"runs of {what}, {'overlapped' if overlap else 'one at a time'}"
        expect_equal([tuple(map(float, span)) for span in got], _spans(plan, run, hand, overlap), atol=1e-9, what=name)


def _stretch_shapes(f: Any) -> None:
    got = f([1.0, 1.0], [4.0, 4.0], [1.0, 1.0], False)
    if not isinstance(got, list) or len(got) != 2 or any(len(span) != 2 for span in got):
        raise Mismatch(f"it gives a list of (start, stop), one for each step, got {got!r:.80}")


def _stretch_by_hand(f: Any) -> None:
    times = [1.0, 1.0, 1.0], [4.0, 4.0, 4.0], [1.0, 1.0, 1.0]
    for overlap, spans in ((False, [(1, 5), (7, 11), (13, 17)]), (True, [(1, 5), (5, 9), (9, 13)])):
        got = [tuple(map(float, span)) for span in f(*times, overlap)]
        name = "overlapped" if overlap else "one at a time"
        expect_equal(got, [(float(a), float(b)) for a, b in spans], atol=1e-9, what=f"three runs of 4, host 1 and 1, {name}")


def _stretch_slow_host(f: Any) -> None:
    _compare(f, [3.0] * 4, [1.0] * 4, [2.0] * 4, "a host that is slower than the device")


def _stretch_random(f: Any) -> None:
    for _ in range(20):
        n = random.randint(1, 9)
        plan, run, hand = ([random.uniform(0, 3) for _ in range(n)] for _ in range(3))
        _compare(f, plan, run, hand, f"{n} random steps")


def _stretch_edges(f: Any) -> None:
    expect_equal(list(f([], [], [], True)), [], what="no steps")
    _compare(f, [2.0], [3.0], [1.0], "one step")
    _compare(f, [0.0] * 3, [2.0] * 3, [0.0] * 3, "a host that needs no time")


def _stretch_state(f: Any) -> None:
    plan, run, hand = [1.0, 2.0], [3.0, 1.0], [0.5, 0.5]
    with unchanged(plan=plan, run=run, hand=hand):
        f(plan, run, hand, True)


STRETCH = Task(
    "5.3 stretch",
    "Simulate a schedule that runs ahead",
    (
        NamedCheck("shape", _stretch_shapes, hint=2),
        NamedCheck("exact: three steps by hand", _stretch_by_hand, hint=1),
        NamedCheck("exact: a host that is slower than the device", _stretch_slow_host, hint=3),
        NamedCheck("random: against a list of the host's jobs", _stretch_random, hint=3),
        NamedCheck("edges: no steps, one step, no host", _stretch_edges, hint=3),
        NamedCheck("state: lists unchanged", _stretch_state),
    ),
    (
        "The host does one thing at a time. One step at a time its jobs are plan 0, hand out 0, plan 1, hand out 1, …\n"
        "Overlapped they are plan 0, plan 1, hand out 0, plan 2, hand out 1, … Handing out waits for the run; planning does not.",
        "Keep one number for the time at which the host is free. Run i starts when its plan is made and run i - 1 has stopped;\n"
        "spans is a list of (start, stop).",
        "for i: host += plan[i]; start = max(host, last stop); append (start, start + run[i])\n"
        "then, if more than one step (overlapped) or any step is in flight: host = max(host, its stop) + hand[it]",
    ),
    references=(_spans,),
)
