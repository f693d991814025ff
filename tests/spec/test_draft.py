"""What a proposer of somebody's own gives is a draft, or is refused by the value that is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.spec.draft import Draft, checked

VOCAB = 4
NAN, INF = float("nan"), float("inf")


def probs(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ((1, 2), r"must return Drafts, got \(1, 2\)"),
        (Draft("ab"), "drafted 'ab', which are no token ids"),
        (Draft((1.5,)), "1.5"),
        (Draft(7), "drafted 7, which are no token ids"),
        (Draft(torch.tensor([0.5])), "which are no token ids"),
        (Draft((1, 2, 3, 1)), "drafted 4 tokens where at most 3 were asked for"),
        (Draft((4,)), "token 4, outside the vocabulary of 4"),
        (Draft((1, -1)), "token -1, outside the vocabulary of 4"),
        (Draft((1,), probs([0.5, 0.5])), r"shape \(1, 2\); those of a draft of 1 are a tensor of shape \(1, 4\)"),
        (Draft((1, 2), probs([0, 1, 0, 0])), r"shape \(1, 4\); those of a draft of 2 are"),
        (Draft((1,), torch.tensor([0, 1.0, 0, 0])), r"shape \(4,\)"),
        (Draft((), probs([0, 1, 0, 0])), r"shape \(1, 4\); those of a draft of 0"),
        (Draft((1,), [[0, 1, 0, 0]]), r"shape \[\[0, 1, 0, 0\]\]"),
        (Draft((1,), np.array([[0, 1.0, 0, 0]])), "are a tensor of shape"),
        (Draft((1,), probs([0, 1, 0, 0], dtype=torch.int64)), "torch.int64"),
        (Draft((1,), probs([0, 1, 0, 0], dtype=torch.bool)), "torch.bool"),
        (Draft((1,), probs([0, 1, 0, 0], dtype=torch.complex64)), "torch.complex64"),
        (Draft((1,), probs([-0.5, 1, 0.5, 0])), "probability -0.5 to token 0 at place 0"),
        (Draft((1, 1), probs([0, 1, 0, 0], [0, 0.5, NAN, 0.5])), "probability nan to token 2 at place 1"),
        (Draft((1,), probs([0, INF, 0, 0])), "probability inf to token 1"),
        (Draft((1,), probs([-INF, 1, 0, 0])), "probability -inf to token 0"),
        (Draft((1,), probs([0, 2.0, 0, 0])), "probability 2.0 to token 1"),
        (Draft((1,), probs([0.2, 0.2, 0.2, 0.2])), "sum to 0.8, not to 1"),
        (Draft((1, 1), probs([0, 1, 0, 0], [0.9, 0.9, 0, 0])), "at place 1 that sum to 1.8"),
        (Draft((1,), probs([0, 0, 0, 0])), "sum to 0, not to 1"),
        (Draft((1,), probs([0.5, 0, 0.5, 0])), "drafted token 1 at place 0, to which its own probs give 0.0"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_draft_is_refused_by_its_value(draft, message):
    with pytest.raises(ValueError, match=message):
        checked(draft, 3, VOCAB)


@given(
    logits=st.lists(st.lists(st.floats(-30, 30), min_size=VOCAB, max_size=VOCAB), max_size=3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]), data=st.data(),
)  # fmt: skip
def test_a_softmax_of_any_precision_with_tokens_that_it_can_draw_is_a_draft(logits, dtype, data):
    q = torch.softmax(torch.tensor(logits, dtype=torch.float64).reshape(-1, VOCAB), -1).to(dtype)
    ids = [data.draw(st.sampled_from([i for i in range(VOCAB) if row[i] > 0])) for row in q]
    good = checked(Draft(ids, q), 3, VOCAB)
    assert good.token_ids == tuple(ids) and good.probs.dtype == torch.float64 and torch.equal(good.probs, q.double())


@pytest.mark.parametrize("ids", [(1, 2), [1, 2], torch.tensor([1, 2]), np.array([1, 2]), (np.int64(1), torch.tensor(2))])
def test_token_ids_of_any_kind_become_plain_numbers(ids):
    assert [type(t) for t in checked(Draft(ids), 2, VOCAB).token_ids] == [int, int]


def test_no_draft_is_a_draft_and_asks_for_nothing():
    assert len(checked(Draft(), 0, VOCAB)) == 0 and len(checked(Draft((), torch.empty(0, VOCAB)), 0, VOCAB)) == 0
