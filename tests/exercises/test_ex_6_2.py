"""Exercise 6.2 beyond what tests/notebooks proves of every exercise: what only the engine shows of a drafter's stale KV."""

from __future__ import annotations

import pytest

from minillm.course.tasks.ex_6_2.broken import BREAK, _drafting, _first
from minillm.course.tasks.ex_6_2.core import _lookup
from minillm.spec.ngram import NgramProposer


def shipped(fed: list[int], ids: list[int]) -> int:
    return min(len(fed), len(ids) - 1)


def test_the_engine_check_of_the_break_would_catch_the_shipped_fault_on_its_own() -> None:
    alone = next(check for check in BREAK.checks if check.kind == "engine")
    with pytest.raises(AssertionError, match="against the drafter without a cache"):
        alone.fn(shipped)


def test_the_right_start_drafts_what_a_drafter_without_a_cache_says_and_computes_less() -> None:
    drafted, said, fed = _drafting(_first)
    assert drafted == said and len(drafted) > 4
    assert fed < _drafting(lambda fed, ids: 0)[2]


def test_the_oracle_of_the_core_is_the_engines_lookup_where_both_look_at_three_tokens() -> None:
    ids = [5, 6, 7, 8, 9, 5, 6, 7]
    assert _lookup(ids, 2) == NgramProposer(3, 1).continuation(ids, 2) == (8, 9)
