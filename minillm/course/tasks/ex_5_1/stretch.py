"""5.1 stretch: count the steps of a thousand requests without taking them."""

from __future__ import annotations

import itertools
from typing import Any, Sequence

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_5_1.common import TINY, draw, several
from minillm.model.transformer import Transformer
from minillm.traffic.simulate import simulate
from minillm.traffic.trace import at_once, exponential_lengths, make_trace, uniform_lengths

BATCHINGS = ("static", "static-sorted", "continuous")


def _oracle(lengths: Sequence[int], slots: int, batching: str) -> int:
    """The engine's own scheduler, one step after the other."""
    trace = make_trace("lengths", at_once(len(lengths)), [1] * len(lengths), lengths, 61)
    return len(simulate(trace, lambda _: 1.0, batching=batching, max_num_seqs=slots).steps)


def _count(f: Any, lengths: Sequence[int], slots: int, batching: str, expected: int, what: str = "") -> None:
    got = f(list(lengths), slots, batching)
    shown = list(lengths) if len(lengths) < 9 else f"{len(lengths)} lengths"
    expect_equal(got, expected, what=f"{what}count_steps({shown}, {slots}, {batching!r})")


def _stretch_shape(f: Any) -> None:
    for batching in BATCHINGS:
        got = f([2, 3], 2, batching)
        if not is_whole(got):
            raise Mismatch(f"count_steps gives a whole number, got {got!r:.60}")


def _stretch_by_hand(f: Any) -> None:
    _count(f, [5, 1, 4, 2], 2, "static", 9)
    _count(f, [5, 1, 4, 2], 2, "static-sorted", 7)
    _count(f, [5, 1, 4, 2], 2, "continuous", 7)
    _count(f, [1, 1, 6, 6], 2, "continuous", 7)


def _stretch_random(f: Any) -> None:
    for _ in range(12):
        lengths, slots = several(draw(1, 20), 1, 12), draw(1, 6)
        for batching in BATCHINGS:
            _count(f, lengths, slots, batching, _oracle(lengths, slots, batching))


def _stretch_edges(f: Any) -> None:
    for batching in BATCHINGS:
        _count(f, [], 4, batching, 0, "nobody: ")
        _count(f, [7], 4, batching, 7, "fewer requests than slots: ")
        _count(f, [3, 5, 2], 1, batching, 10, "one slot: ")
        _count(f, [4] * 6, 3, batching, 8, "equal lengths: ")
        _count(f, [4] * 7, 3, batching, 12, "a batch that is not full: ")


def _stretch_law(f: Any) -> None:
    """Use of the slots for exponential lengths against 1 / H_n."""
    for n in (4, 16):
        lengths = exponential_lengths(n * 1000, 300, seed=n)
        use = sum(lengths) / (n * f(list(lengths), n, "static"))
        law = 1 / sum(1 / i for i in range(1, n + 1))
        expect_equal(use, law, atol=0.03, what=f"share of {n} slots in use, exponential lengths, static")


def _stretch_state(f: Any) -> None:
    lengths = [5, 1, 4, 2]
    for batching in BATCHINGS:
        with unchanged(lengths=lengths):
            f(lengths, 2, batching)


def _stretch_engine(f: Any) -> None:
    lengths = [5, 1, 9, 2, 3, 3, 8]
    for batching in BATCHINGS:
        llm = LLM(Transformer.random(TINY), block_size=4, num_blocks=40, max_num_seqs=3, batching=batching)
        llm.generate([[i] for i in range(7)], [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
        _count(f, lengths, 3, batching, llm.meter.steps, "steps that the engine took: ")


class Long(int):
    """A length that counts how often it is compared or used in a sum."""

    uses = itertools.count()

    __hash__ = int.__hash__


def _counted(name: str) -> Any:
    def operation(self: Long, other: Any) -> Any:
        next(Long.uses)
        result = getattr(int, name)(self, other)
        return Long(result) if type(result) is int else result

    return operation


for _name in ("add", "radd", "sub", "rsub", "lt", "gt", "le", "ge", "eq"):
    setattr(Long, f"__{_name}__", _counted(f"__{_name}__"))


def _stretch_budget(f: Any) -> None:
    """A thousand requests: the work may grow with them and with the logarithm of the slots, not with the lengths."""
    lengths = [Long(n) for n in uniform_lengths(1000, 1000, 3000, seed=1)]
    for batching in BATCHINGS:
        Long.uses = itertools.count()
        f(list(lengths), 16, batching)
        used = next(Long.uses)
        expect_at_most(used, 60_000, f"sums and comparisons for 1,000 lengths of 1,000 to 3,000, {batching}")


STRETCH = Task(
    "5.1 stretch",
    "The steps of a thousand requests, without taking them",
    (
        NamedCheck("shape", _stretch_shape, hint=2),
        NamedCheck("exact: four requests on two slots by hand", _stretch_by_hand, hint=1),
        NamedCheck("random: against the engine's scheduler", _stretch_random, hint=2),
        NamedCheck("random: exponential lengths and the harmonic number", _stretch_law, hint=1),
        NamedCheck("edges: nobody, one slot, equal lengths, a batch that is not full", _stretch_edges, hint=2),
        NamedCheck("state: lengths unchanged", _stretch_state),
        NamedCheck("engine: the steps that an engine takes", _stretch_engine, hint=3),
        NamedCheck("budget: work that does not grow with the lengths", _stretch_budget, hint=3),
    ),
    (
        "A static batch takes as many steps as its longest answer; cut the list into batches and add up. Sorting first changes\n"
        "only which answers share a batch. For continuous batching think of each slot as a cashier: who is free first?",
        "static: sum of max(lengths[i : i + slots]) for i = 0, slots, 2 * slots …; an empty list has no batch. continuous: for\n"
        "each slot the step at which it is free next; the answer is the largest when all requests have been placed.",
        "ends = [0] * slots as a heap; for each length: heapq.heappush(ends, heapq.heappop(ends) + length). max(ends).\n"
        "static-sorted is static of sorted(lengths); lengths itself must stay as it is.",
    ),
    references=(simulate, _oracle),
)
