"""5.2 core: share the token budget of a step, decodes first."""

from __future__ import annotations

import copy
import random
from typing import Any, Iterator, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole, show
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_5_2.common import TINY, fair
from minillm.engine.policies import Continuous, share, start
from minillm.engine.scheduler import SchedulerOutput
from minillm.model.transformer import Transformer


class Queue:
    """What waits, taken one by one; counts how many were taken."""

    def __init__(self, left: Sequence[int]):
        self.left, self.taken = list(left), 0

    def __iter__(self) -> Iterator[int]:
        for n in self.left:
            self.taken += 1
            yield n


def _ask(policy: Any, running: Sequence[int], waiting: Sequence[int], budget: int, limit: int) -> list[int]:
    got = policy().grants(tuple(running), Queue(waiting), budget, limit)
    if not isinstance(got, (list, tuple)):
        raise Mismatch(f"grants gives a list of whole numbers, got {show(got)}")
    for i, n in enumerate(got):
        if not is_whole(n) or n < 0:
            raise Mismatch(f"grant [{i}] must be a whole number of at least 0, got {show(n)}")
    return [int(n) for n in got]


def _compare(policy: Any, running: Sequence[int], waiting: Sequence[int], budget: int, limit: int) -> None:
    what = f"running {list(running)}, waiting {list(waiting)}, budget {budget}, limit {limit}"
    expect_equal(_ask(policy, running, waiting, budget, limit), fair(running, waiting, budget, limit), what=what)


def _core_shape(policy: Any) -> None:
    if not callable(policy):
        raise Mismatch("check takes the class itself, not an object of it: the checks make objects of their own")
    for running, waiting, length in (((1, 1), (), 2), ((), (5,), 1), ((1, 9), (4, 3), 4)):
        got = _ask(policy, running, waiting, 64, 8)
        if len(got) != length:
            raise Mismatch(
                f"running {list(running)} and waiting {list(waiting)} with room for all: got {len(got)} grants, expected {length}"
            )


def _core_by_hand(policy: Any) -> None:
    _compare(policy, (1, 1, 1), (20,), 8, 8)
    _compare(policy, (30, 1, 1), (), 8, 8)


def _core_random(policy: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(200):
        running = [draw.choice([1, 1, 1, draw.randint(2, 40)]) for _ in range(draw.randint(0, 6))]
        waiting = [draw.randint(1, 40) for _ in range(draw.randint(0, 4))]
        if running or waiting:
            _compare(policy, running, waiting, draw.randint(1, 60), len(running) + draw.randint(0, 3))


def _core_small_budget(policy: Any) -> None:
    for budget in (1, 2, 3):
        _compare(policy, (1, 1, 1), (9,), budget, 8)
        _compare(policy, (9, 1, 1), (9,), budget, 8)


def _core_full(policy: Any) -> None:
    _compare(policy, (1, 1), (5,), 64, 2)
    _compare(policy, (), (5, 5, 5), 64, 2)


def _core_last_piece(policy: Any) -> None:
    _compare(policy, (1, 7), (6, 5, 4), 20, 8)
    _compare(policy, (), (8, 8), 8, 8)
    _compare(policy, (8,), (8,), 8, 8)


def _core_state(policy: Any) -> None:
    running, mine = [1, 9, 1], policy()
    before = copy.deepcopy(running)
    first = list(mine.grants(running, Queue([4]), 12, 8))
    expect_equal(running, before, what="your code changed running")
    expect_equal(list(mine.grants(running, Queue([4]), 12, 8)), first, what="the same question asked twice")


def _core_engine(policy: Any) -> None:
    prompts = [[(5 * i + 3 * r) % 61 for i in range(n)] for r, n in enumerate((70, 4, 6, 5))]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 24, 20, 22)]
    model = Transformer.random(TINY)

    def run(batching: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        llm = LLM(model, dtype="float32", block_size=4, num_blocks=64, max_num_batched_tokens=8, batching=batching)
        steps: list[tuple[int, ...]] = []

        def observe(plan: SchedulerOutput) -> None:
            running = [r for r in llm.engine.scheduler.running if r.num_output_tokens]
            served = {id(s.request) for s in plan.scheduled}
            steps.append((sum(s.num_tokens for s in plan.scheduled), sum(id(r) not in served for r in running)))

        llm.engine.scheduler.observers.append(observe)
        return [o.token_ids for o in llm.generate(prompts, params)], steps

    expected, _ = run("continuous")
    got, steps = run(policy())
    expect_equal(got, expected, what="tokens of four prompts under your policy")
    for i, (tokens, stalled) in enumerate(steps):
        expect_at_most(tokens, 8, f"tokens of step {i}")
        expect_at_most(stalled, 0, f"decoding requests that sat out step {i}")


def _core_taken(policy: Any) -> None:
    for running, budget, limit, most in (((1, 1), 2, 8, 0), ((1, 1), 64, 2, 0), ((1,), 11, 8, 1), ((), 64, 3, 3)):
        queue = Queue([10] * 1000)
        policy().grants(running, queue, budget, limit)
        expect_at_most(queue.taken, most + 1, f"waiting requests taken, running {list(running)}, budget {budget}, limit {limit}")


CORE = Task(
    "5.2 core",
    "Share the token budget",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: three decode and a prompt waits; a prompt that is older than who decodes", _core_by_hand, hint=1),
        NamedCheck("random: against token by token", _core_random, hint=3),
        NamedCheck("edges: a budget that is smaller than the number of decodes", _core_small_budget, hint=1),
        NamedCheck("edges: no room for another request", _core_full, hint=2),
        NamedCheck("edges: pieces that end a prompt", _core_last_piece, hint=3),
        NamedCheck("state: inputs unchanged, nothing remembered", _core_state, hint=3),
        NamedCheck("engine: the same tokens, and nobody who decodes sits a step out", _core_engine, hint=1),
        NamedCheck("budget: the queue is not searched", _core_taken, hint=2),
    ),
    (
        "Three groups share the budget one after the other: who has exactly one token left, who has more, and who waits. Within\n"
        "a group the order stays: the oldest first. Age must not put a long prompt in front of somebody's next token.",
        "The result has one number for each running request, in their order, 0 included. Then one for each waiting request that\n"
        "starts; it ends where the budget or the room (limit - len(running)) ends. Take from waiting one by one, no list().",
        "grants = [0] * len(running)\n"
        "for i, n in enumerate(running): if n == 1: ...   then the same for n > 1 with min(n, budget)\n"
        "then: for n in waiting, after checking that there is room and budget left, append min(n, budget).",
    ),
    Seam("batching", "batching policy", lambda cls: {"batching": cls()}),
    (Continuous, share, start),
)
