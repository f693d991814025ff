"""Prompt lookup proposes what followed the same tokens before, and nothing where there is no evidence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.spec.ngram import NgramProposer


def slow(ids, n, longest, shortest):
    """The rule, word for word."""
    for size in range(min(longest, len(ids) - 1), shortest - 1, -1):
        places = [i for i in range(len(ids) - size) if ids[i : i + size] == ids[-size:]]
        if places and n > 0:
            known, start = list(ids), places[-1] + size
            for i in range(n):
                known.append(known[start + i])
            return tuple(known[len(ids) :])
    return ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 6), st.integers(1, 4), st.integers(0, 3))
def test_it_is_the_continuation_of_the_longest_suffix_that_occurred_before(ids, n, shortest, more):
    proposer = NgramProposer(shortest + more, shortest)
    assert proposer.continuation(ids, n) == slow(ids, n, shortest + more, shortest)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([5, 6, 7, 8, 9, 5, 6], (7, 8, 9)),
        ([5, 6, 7, 1, 5, 6, 8, 2, 3, 5, 6], (8, 2, 3)),  # the latest place
        ([4, 5, 6, 7, 1, 9, 5, 6, 8, 2, 3, 4, 5, 6], (7, 1, 9)),  # the longer match
        ([1, 1, 1, 1, 1], (1, 1, 1)),
        ([7, 5, 6, 5, 6, 5], (6, 5, 6)),  # a repetition is expected to repeat
        ([5, 6, 7, 8], ()),
        ([5], ()),
        ([5, 6, 5], (6, 5, 6)),  # one token is weak evidence; the adaptive length judges what it is worth
    ],
)
def test_examples(ids, expected):
    assert NgramProposer().continuation(ids, 3) == expected


def test_a_match_shorter_than_the_shortest_is_no_evidence():
    assert NgramProposer(shortest=2).continuation([5, 6, 5], 3) == () != NgramProposer(shortest=2).continuation([5, 6, 5, 6], 3)


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (3, 0)])
def test_an_impossible_n_gram_is_refused(longest, shortest):
    with pytest.raises(ValueError, match=f"shortest={shortest} to longest={longest}"):
        NgramProposer(longest, shortest)
