"""Strips read in place give what gathered pages give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.attention.strip_backend import InPlace, Span, StripAttention
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.engine.batch import ForwardBatch, Row

from ..strategies import greedy, tiny_engine, tiny_model


@pytest.mark.parametrize("options", [{"kv_cache": "contiguous"}, {"allocation": "exact"}, {"max_num_batched_tokens": 3,
                                     "allocation": "reserve"}, {"allocation": "exact", "batching": "static"}])  # fmt: skip
def test_strips_give_the_same_tokens(options):
    llm = LLM(tiny_model(), block_size=4, num_blocks=40, attention_backend=StripAttention(), **options)
    prompts = [[5, 6, 7], [8] * 11, [9]]
    outs = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    assert [out.token_ids for out in outs] == [greedy(p, 6) for p in prompts]


def test_a_scattered_row_is_refused():
    engine = tiny_engine(attention_backend=StripAttention())
    for t in (4, 5):
        engine.add_request([t] * 4, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    with pytest.raises(ValueError, match="is no strip; StripAttention needs kv_cache='contiguous'"):
        engine.step()


BLOCK, MODEL = 4, tiny_model()


@given(data=st.data())
def test_rows_in_any_strips_get_what_a_gather_gives_them(data):
    starts = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True).map(lambda at: [1 + 3 * i for i in at]))
    rows = []
    for block in starts:  # strips of three blocks, in any order and at any distance
        total = data.draw(st.sampled_from([5, 9, 12]))
        new = data.draw(st.sampled_from([1, 1, 1, 3]))
        rows.append(Row([1] * new, total - new, [*range(block, block + -(-total // BLOCK))]))
    config = MODEL.config
    store = PlainKVStore.allocate(config, 25 * BLOCK, torch.float64)
    store.layers[0].copy_(torch.randn(store.layers[0].shape, dtype=torch.float64))
    batch = ForwardBatch.build(rows, BLOCK)
    q = torch.randn(batch.num_tokens, config.num_heads, config.head_dim, dtype=torch.float64)
    got, expected = (b.forward(q, 0, store, b.plan(batch, torch.float64)) for b in (StripAttention(), TorchAttention()))
    torch.testing.assert_close(got, expected)


def test_equal_strips_at_equal_distances_are_one_call_and_others_their_own():
    def spans(rows: list[tuple[int, int]]) -> list[Span]:
        batch = ForwardBatch.build([Row([1], total - 1, [*range(b, b + -(-total // BLOCK))]) for b, total in rows], BLOCK)
        return [group.slots for group in StripAttention().plan(batch, torch.float32)]

    assert spans([(1, 7), (3, 7), (5, 7)]) == [Span(4, 7, 3, 8)]
    assert spans([(1, 7), (3, 8)]) == [Span(4, 7), Span(12, 8)]
    assert spans([(1, 7), (3, 7), (6, 7)]) == [Span(4, 7, 2, 8), Span(24, 7)]
    assert spans([(3, 7), (1, 7)]) == [Span(12, 7), Span(4, 7)]


def test_nothing_is_copied():
    store = PlainKVStore.allocate(MODEL.config, 40, torch.float32)
    k, v = InPlace(store).read(0, Span(4, 7, 3, 8))
    assert k.shape == v.shape == (3, 7, MODEL.config.num_kv_heads, MODEL.config.head_dim)
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() == store.layers[0].untyped_storage().data_ptr()
