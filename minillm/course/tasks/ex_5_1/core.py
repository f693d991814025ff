"""5.1 core: write a continuous batching policy."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_5_1.common import TINY, draw, several
from minillm.engine import policies
from minillm.model.transformer import Transformer
from minillm.traffic.simulate import simulate
from minillm.traffic.trace import at_once, lognormal_lengths, make_trace

WORK = (([3, 1, 4, 1, 5, 9, 2, 6, 5] * 4, 3), ([2, 7], 9), ([1, 6, 1, 8, 0], 1), ([5] * 20, 6), ([4, 4], 5))


class Queue:
    """The waiting requests' numbers, worked out one by one as they are taken; counts how many were."""

    def __init__(self, left: Sequence[int]):
        self.left, self.taken = left, 0

    def __iter__(self) -> Iterator[int]:
        for n in self.left:
            self.taken += 1
            yield n


def _expected(running: Sequence[int], waiting: Sequence[int], budget: int, limit: int) -> list[int]:
    """What a continuous policy grants, one request after the other."""
    grants: list[int] = []
    for place, n in enumerate([*running, *waiting]):
        free = budget - sum(grants)
        if place >= len(running) and (free == 0 or place >= limit):
            break
        grants.append(n if n < free else free)
    return grants


def _ask(policy: Any, running: Sequence[int], waiting: Sequence[int], budget: int, limit: int, what: str) -> None:
    got = policy().grants(tuple(running), iter(waiting), budget, limit)
    case = f"{what}: grants(running={tuple(running)}, waiting={tuple(waiting)}, budget={budget}, limit={limit})"
    expect_equal(list(got), _expected(running, waiting, budget, limit), what=case)


def _core_shape(policy: Any) -> None:
    if not callable(policy):
        raise Mismatch("check takes the class itself, not an object of it: the checks make objects of their own")
    for running, waiting in (((1, 1), (3, 3)), ((), (2,)), ((5,), ())):
        got = policy().grants(running, iter(waiting), 100, 8)
        if not isinstance(got, (list, tuple)) or not all(is_whole(n) for n in got):
            raise Mismatch(f"grants gives a list of whole numbers, got {got!r:.60}")
        if len(got) != len(running) + len(waiting):
            both = f"{len(running)} run, {len(waiting)} wait and all fit"
            raise Mismatch(f"{both}: one grant for each, got {len(got)}")


def _core_by_hand(policy: Any) -> None:
    _ask(policy, (1, 1), (9, 9), 8, 4, "two decode, the next prompt gets the rest of the budget")
    _ask(policy, (1, 5, 1), (9,), 4, 4, "a long prompt runs; the last one sits this step out")
    _ask(policy, (1,), (2, 3, 4), 100, 3, "two slots are free")


def _core_random(policy: Any) -> None:
    for _ in range(60):
        limit = draw(1, 8)
        running = several(draw(0, limit), 1, 12)
        _ask(policy, running, several(draw(0, 9), 1, 12), draw(1, 40), limit, "drawn at random")


def _core_empty(policy: Any) -> None:
    _ask(policy, (), (), 8, 4, "nobody is there")
    _ask(policy, (1, 1, 1), (), 8, 4, "nobody waits")
    _ask(policy, (), (40,), 8, 4, "a prompt longer than the budget")


def _core_full(policy: Any) -> None:
    _ask(policy, (1, 1), (1, 1), 8, 2, "every slot is taken")
    _ask(policy, (4, 4), (1, 1), 8, 4, "the budget is used up by those who run")
    _ask(policy, (1, 1), (6, 1), 8, 4, "a prompt that fits exactly")
    _ask(policy, (1, 1, 1), (1,), 2, 4, "less budget than requests")


def _core_state(policy: Any) -> None:
    mine, running, waiting = policy(), (1, 7), [3, 3]
    with unchanged(waiting=waiting):
        first = list(mine.grants(running, iter(waiting), 9, 4))
    mine.grants((2, 2, 2), iter([5]), 30, 8)
    expect_equal(list(mine.grants(running, iter(waiting), 9, 4)), first, what="the same question, asked again")


def _served(policy: Any, **options: Any) -> tuple[list[tuple[int, ...]], int]:
    settings: dict[str, Any] = dict(dtype="float32", block_size=4, num_blocks=64, max_num_seqs=3, max_num_batched_tokens=16)
    llm = LLM(Transformer.random(TINY), batching=policy, **(settings | options))
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in WORK]
    outputs = llm.generate([prompt for prompt, _ in WORK], params)
    return [o.token_ids for o in outputs], llm.meter.steps


def _core_engine(policy: Any) -> None:
    expected, _ = _served("sequential")
    for options in ({}, {"max_num_batched_tokens": 5}, {"num_blocks": 14}):
        got, steps = _served(policy(), **options)
        said = ", ".join(f"{k}={v}" for k, v in options.items()) or "as it is"
        expect_equal(got, expected, what=f"tokens of five requests on your policy, engine {said}")
        expect_equal(steps, _served("continuous", **options)[1], what=f"steps, engine {said}")


def _core_budget(policy: Any) -> None:
    queue = Queue([4] * 10_000)
    policy().grants((1,) * 6, queue, 64, 8)
    expect_at_most(queue.taken, 2, "waiting requests taken from the iterable, two slots free")
    queue = Queue([40] * 10_000)
    policy().grants((1,) * 6, queue, 64, 32)
    expect_at_most(queue.taken, 2, "waiting requests taken from the iterable, budget for two")
    trace = make_trace("traffic", at_once(60), [3] * 60, lognormal_lengths(60, 8, 1.0, high=60), 61)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    run = simulate(trace, lambda _: 1.0, batching=policy(), **options)
    best = simulate(trace, lambda _: 1.0, **options)
    expect_at_most(len(run.steps), len(best.steps), "steps for 60 requests on 8 slots")


CORE = Task(
    "5.1 core",
    "Write a continuous batching policy",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: three steps by hand", _core_by_hand, hint=1),
        NamedCheck("random: against one request after the other", _core_random, hint=3),
        NamedCheck("edges: nobody runs, nobody waits, a long prompt", _core_empty, hint=2),
        NamedCheck("edges: no slot or no budget is left", _core_full, hint=3),
        NamedCheck("state: nothing is remembered, inputs unchanged", _core_state, hint=1),
        NamedCheck("engine: five requests, small budgets and pools", _core_engine, hint=3),
        NamedCheck("budget: requests looked at, steps taken", _core_budget, hint=3),
    ),
    (
        "Everything that a step needs is in the four arguments. Go through the running requests, oldest first, and give each\n"
        "what it wants while the budget lasts. Then let waiting ones start in the same way, until slots or budget are used up.",
        "The answer has len(running) numbers first, 0 for a request that gets nothing this step, and then one for each waiting\n"
        "request that starts, at least 1. Free slots: limit - len(running). The other waiting ones are not in the answer.",
        "for n in running: grant = min(n, budget); budget -= grant. Then queue = iter(waiting), and while slots are free and\n"
        "budget > 0: left = next(queue, None); stop at None. Test before you take: a request that was taken was looked up.",
    ),
    Seam("batching", "batching policy", lambda cls: {"batching": cls()}),
    (
        policies.Continuous, policies.Sequential, policies.Static, policies.StaticSorted, policies.share, policies.start,
        _expected,
    ),
)  # fmt: skip
