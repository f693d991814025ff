"""Strips read in place give what gathered pages give."""

from __future__ import annotations

import pytest

from minillm import LLM, SamplingParams
from minillm.attention.strip_backend import StripAttention

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
