"""What a drafting model may still use of its own KV."""

from __future__ import annotations

import pytest
import torch

from minillm import SamplingParams
from minillm.engine.request import Request
from minillm.spec.choice import low_bit_copy
from minillm.spec.draft_model import Progress

from ..strategies import tiny_model


@pytest.mark.parametrize(
    ("request_now", "valid"),
    [
        (([1, 2, 3, 4, 5, 6], [7, 8, 9], 0), 5),  # all was accepted; the last token is always computed anew
        (([1, 2, 3, 9, 8, 7], [7, 8, 9], 0), 3),  # refused at the fourth, and two more tokens came without a draft
        (([1, 2, 3, 4, 5, 6], [7, 5, 9], 0), 2),  # the second block was replaced
        (([1, 2, 3, 4, 5, 6], [7, 8, 9], 1), 0),  # the same blocks, but somebody else had them in between
        (([1, 2, 3, 4, 5, 6], [0, 8, 9], 0), 5),  # the first block went out of the window: nobody reads it again
        (([1, 2, 3, 4, 5, 6], [0, 5, 9], 0), 2),
        (([1, 2], [7], 0), 1),
        (([1], [7], 0), 0),
    ],
)
def test_only_tokens_of_the_request_in_blocks_of_the_request_count(request_now, valid):
    token_ids, blocks, preemptions = request_now
    request = Request("r", 1, token_ids, SamplingParams(), 0, frozenset(), 64, blocks=blocks, num_preemptions=preemptions)
    assert Progress([1, 2, 3, 4, 5, 6, 7], [7, 8, 9], 0).still_valid(request, 2) == valid


def test_a_drafter_that_has_seen_nothing_starts_at_the_beginning():
    request = Request("r", 1, [1, 2, 3], SamplingParams(), 0, frozenset(), 64, blocks=[4])
    assert Progress().still_valid(request, 4) == 0


def test_a_copy_of_a_sixteen_bit_model_shares_its_embedding():
    model = tiny_model().converted(torch.bfloat16, "cpu")
    assert low_bit_copy("int8", model).embedding is model.embedding
