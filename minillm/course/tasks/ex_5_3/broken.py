"""5.3 break: find out who frees blocks that a step in flight still reads."""

from __future__ import annotations

import random
from typing import Any

from minillm.course.expect import Mismatch, expect_equal, unchanged
from minillm.course.task import NamedCheck, Task


class _Oracle:
    """What a ledger must have released, found by looking at every step anew."""

    def __init__(self) -> None:
        self.flights: list[set[int]] = []
        self.ended: set[int] = set()

    @property
    def free(self) -> list[int]:
        return sorted(b for b in self.ended if not any(b in reads for reads in self.flights))


def _ledger_shapes(cls: Any) -> None:
    ledger = cls()
    ledger.launch([1, 2])
    ledger.end([3])
    ledger.land()
    if not isinstance(ledger.free, list):
        raise Mismatch(f"free is a list of blocks, got {type(ledger.free).__name__}")
    expect_equal(ledger.free, [3], what="free, after block 3, which no step reads, was given back")


def _ledger_one(cls: Any) -> None:
    ledger = cls()
    ledger.launch([1, 2, 3])
    ledger.end([1, 2])
    expect_equal(sorted(ledger.free), [], what="free, while the step that reads 1 and 2 is in flight")
    ledger.land()
    expect_equal(sorted(ledger.free), [1, 2], what="free, after it has landed")


def _ledger_two(cls: Any) -> None:
    ledger = cls()
    ledger.launch([1, 2, 5])
    ledger.launch([1, 2, 3])
    ledger.end([1, 2])
    ledger.land()
    expect_equal(sorted(ledger.free), [], what="free, after step 1 has landed: step 2 still reads 1 and 2")
    ledger.land()
    expect_equal(sorted(ledger.free), [1, 2], what="free, after step 2 has landed")


def _ledger_random(cls: Any) -> None:
    for _ in range(30):
        ledger, oracle, held, fresh = cls(), _Oracle(), [], iter(range(1, 1000))
        for _ in range(30):
            act = random.choice(("launch", "launch", "end", "land", "begin"))
            if act == "begin":
                held.append([next(fresh) for _ in range(random.randint(1, 3))])
            elif act == "launch" and len(oracle.flights) < 3:
                reads = [b for blocks in held for b in blocks if random.random() < 0.9]
                ledger.launch(list(reads))
                oracle.flights.append(set(reads))
            elif act == "land" and oracle.flights:
                ledger.land()
                oracle.flights.pop(0)
            elif act == "end" and held:
                blocks = held.pop(random.randrange(len(held)))
                ledger.end(list(blocks))
                oracle.ended |= set(blocks)
            expect_equal(sorted(ledger.free), oracle.free, what=f"free after {act}, {len(oracle.flights)} steps in flight")


def _ledger_idle(cls: Any) -> None:
    ledger = cls()
    ledger.end([4, 2])
    expect_equal(sorted(ledger.free), [2, 4], what="free, when nothing is in flight")
    ledger.end([])
    ledger.launch([])
    ledger.land()
    expect_equal(sorted(ledger.free), [2, 4], what="free, after a step that reads nothing")


def _ledger_state(cls: Any) -> None:
    reads, blocks = [1, 2, 3], [1, 2]
    ledger = cls()
    with unchanged(reads=reads, blocks=blocks):
        ledger.launch(reads)
        ledger.end(blocks)
        ledger.land()
    other = cls()
    expect_equal(other.free, [], what="free of another ledger")


BREAK = Task(
    "5.3 break",
    "Find out who frees too early",
    (
        NamedCheck("shape: free is a list", _ledger_shapes, hint=2),
        NamedCheck("exact: one step in flight", _ledger_one, hint=1),
        NamedCheck("exact: two steps in flight", _ledger_two, hint=1),
        NamedCheck("random: against a look at every step", _ledger_random, hint=3),
        NamedCheck("edges: nothing in flight, nothing read", _ledger_idle, hint=2),
        NamedCheck("state: lists unchanged, ledgers apart", _ledger_state, hint=2),
    ),
    (
        "With overlap two steps can hold a block at once: the one that runs, and the one that was planned before the end was\n"
        "known. Which of them has landed when a block is released?",
        "flights is a list of sets, oldest first. A block of `leaving` may go when it is in none of the sets that remain.",
        "In land: pop the oldest; busy = set().union(*self.flights); release what is not busy, keep the rest in leaving.",
    ),
)
