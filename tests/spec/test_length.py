"""The draft length follows a request's own acceptance."""

from __future__ import annotations

import pytest

from minillm.spec.length import DraftLength, best_length, speedup, tokens_per_pass


@pytest.mark.parametrize(("alpha", "length", "expected"), [(0.7, 4, 2.7731), (0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 0, 1.0)])
def test_expected_tokens_of_a_pass(alpha, length, expected):
    assert tokens_per_pass(alpha, length) == pytest.approx(expected)


@pytest.mark.parametrize(("price", "expected"), [(0.01, 14), (0.05, 8), (0.1, 6), (0.2, 4), (0.3, 3)])
def test_the_best_length_at_an_acceptance_of_80_percent_is_the_known_one(price, expected):
    """With a checking pass that costs one step, whatever is checked, the price is the draft's cost c alone."""
    assert best_length(0.8, 30, price) == expected


def test_drafting_pays_from_the_acceptance_that_equals_its_price():
    assert best_length(0.09, 8, 0.1) == 0 < best_length(0.11, 8, 0.1)
    assert speedup(0.5, 4, 0.1) == pytest.approx(1.38, abs=0.01) and speedup(0.2, 4, 0.1) == pytest.approx(0.89, abs=0.01)


def test_everything_accepted_leads_to_the_longest_draft_and_everything_refused_to_none():
    length = DraftLength(8)
    for _ in range(30):
        length.tell(n := length.next(), n)
    assert length.next() == 8
    for _ in range(60):
        length.tell(length.next(), 0)
    assert length.next() <= 1


def test_a_hopeless_text_is_tried_again_now_and_then():
    length = DraftLength(8, patience=5, accepted=0.0, refused=20.0)
    assert [length.next() for _ in range(10)] == [0, 0, 0, 0, 1] * 2
    for _ in range(60):
        length.tell(n := length.next(), n)
    assert length.next() == 8, "the text has become predictable"


def test_a_draft_of_nothing_teaches_nothing_and_no_length_is_ever_above_the_longest():
    length = DraftLength(0)
    before = length.alpha
    length.tell(0, 0)
    assert length.alpha == before and {length.next() for _ in range(20)} == {0}
