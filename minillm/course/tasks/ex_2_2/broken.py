"""2.2 break: find the fault in the keys that a query reads."""

from __future__ import annotations

import random
from typing import Any, Sequence

from minillm.attention.window import SparseView
from minillm.course.expect import Mismatch, expect_equal, unchanged
from minillm.course.task import NamedCheck, Task


def keys_oracle(query: int, chosen: Sequence[int], window: int, size: int) -> list[int]:
    """Key by key, from the definition."""
    near = max(0, query - window + 1) // size
    return [key for key in range(query + 1) if key // size >= near or key // size in set(chosen)]


def _break_shape(fn: Any) -> None:
    got = fn(11, [0], 4, 4)
    if not isinstance(got, list) or not all(type(key) is int for key in got):
        raise Mismatch(f"a list of positions is wanted, got {got!r:.80}")


def _break_whole(fn: Any) -> None:
    """The query is the last of its block."""
    expect_equal(fn(15, [0], 4, 4), [0, 1, 2, 3, 12, 13, 14, 15], what="query 15, block 0 chosen, window 4, blocks of 4")


def _break_middle(fn: Any) -> None:
    expect_equal(fn(17, [1], 4, 4), [4, 5, 6, 7, 12, 13, 14, 15, 16, 17], what="query 17, block 1 chosen, window 4, blocks of 4")
    expect_equal(fn(16, [1], 1, 4), [4, 5, 6, 7, 16], what="query 16, the first of its block, window 1")


def _break_random(fn: Any) -> None:
    rng = random.Random(0)
    for _ in range(60):
        size, window, query = rng.randint(1, 7), rng.randint(1, 9), rng.randint(0, 50)
        near = max(0, query - window + 1) // size
        chosen = sorted(rng.sample(range(near), min(near, rng.randint(0, 3))))
        what = f"query {query}, blocks {chosen} chosen, window {window}, blocks of {size}"
        expect_equal(fn(query, chosen, window, size), keys_oracle(query, chosen, window, size), what=what)
    what = "query 17, blocks 3, 0 and 1 chosen, window 6, blocks of 4: block 3 is local too, and read once"
    expect_equal(fn(17, [3, 0, 1], 6, 4), keys_oracle(17, [3, 0, 1], 6, 4), what=what)


def _break_start(fn: Any) -> None:
    expect_equal(fn(0, [], 64, 16), [0], what="the first token sees itself")
    expect_equal(fn(2, [], 64, 16), [0, 1, 2], what="a window beyond the beginning")


def _break_inputs(fn: Any) -> None:
    chosen = [2, 0]
    with unchanged(chosen=chosen):
        fn(30, chosen, 5, 4)


BREAK = Task(
    "2.2 break",
    "The keys that a query reads, with a fault",
    (
        NamedCheck("shape", _break_shape),
        NamedCheck("exact: a query at the end of its block", _break_whole, hint=1),
        NamedCheck("exact: a query within its block", _break_middle, hint=1),
        NamedCheck("random: key by key", _break_random, hint=2),
        NamedCheck("edges: the beginning", _break_start, hint=2),
        NamedCheck("state: inputs unchanged", _break_inputs),
    ),
    (
        "Which block holds the query's own key, and is it in the loop when it is not full yet?",
        "Blocks are numbered from 0: the query stands in block query // size, the window's first key in block "
        "max(0, query - window + 1) // size. Both are local, and so are all between them.",
        "range(first, query // size + 1): (query + 1) // size counts full blocks only. And no key after the query: "
        "min(end, query + 1).",
    ),
    references=(keys_oracle, SparseView),
)
