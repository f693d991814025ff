"""ForwardBatch: rows of different lengths laid end to end, and where each token's KV goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.engine.batch import ForwardBatch, Row, slots_of


@given(st.permutations(range(1, 9)), st.integers(1, 6), st.data())
def test_position_p_lies_in_block_p_over_block_size_at_the_remainder(blocks, block_size, data):
    start = data.draw(st.integers(0, 8 * block_size))
    stop = data.draw(st.integers(start, 8 * block_size))
    want = [blocks[p // block_size] * block_size + p % block_size for p in range(start, stop)]
    assert slots_of(blocks, block_size, start, stop).tolist() == want


rows = st.builds(
    lambda ids, start, wants: (ids, start, wants),
    st.lists(st.integers(0, 31), min_size=1, max_size=6),
    st.integers(0, 10),
    st.booleans(),
)


@settings(max_examples=60)
@given(st.lists(rows, min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 3))
def test_every_tensor_agrees_with_a_walk_over_the_rows(drawn, block_size, num_padding):
    table_of = iter(range(1, 1000))
    built = [
        Row(ids, start, [next(table_of) for _ in range(-(-(start + len(ids)) // block_size))], wants)
        for ids, start, wants in drawn
    ]
    batch = ForwardBatch.build(built, block_size, num_padding)
    tokens, positions, slots, sampled = [], [], [], []
    for row in built:
        for i, token in enumerate(row.token_ids):
            p = row.start + i
            tokens.append(token)
            positions.append(p)
            slots.append(row.blocks[p // block_size] * block_size + p % block_size)
        if row.wants_logits:
            sampled.append(len(tokens) - 1)
    pad = [0] * num_padding
    assert batch.token_ids.tolist() == tokens + pad and batch.positions.tolist() == positions + pad
    assert batch.slots.tolist() == slots + pad, "padding writes to the null block's first slot"
    assert batch.logit_indices.tolist() == sampled, "the logits of padding are dropped"
    assert batch.q_lens == (*(len(r.token_ids) for r in built), *[1] * num_padding)
    assert batch.kv_lens == (*(r.kv_len for r in built), *[1] * num_padding)
    assert (batch.num_tokens, batch.num_rows) == (len(tokens) + num_padding, len(built) + num_padding)
    for t in (batch.token_ids, batch.positions, batch.slots, batch.logit_indices):
        assert t.dtype == torch.int64


def test_large_block_numbers_do_not_overflow():
    assert slots_of([2**30], 16, 0, 2).tolist() == [2**34, 2**34 + 1]


@pytest.mark.parametrize("ids", [[4, 5], (4, 5), np.array([4, 5], dtype=np.uint8)])
def test_token_ids_may_be_any_sequence(ids):
    assert ForwardBatch.build([Row(ids, 0, [1])], 4).token_ids.tolist() == [4, 5]
