"""KV in 8 bits in the engine: an answer depends on the request alone, and the counts are those of the bytes that are there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import LLM, EngineConfig, SamplingParams
from minillm.bench.quality import logprobs
from minillm.cache.kv_store import PlainKVStore

from ..strategies import (
    assert_empty,
    engine_options,
    greedy_params,
    models,
    one_thread,  # noqa: F401
    poison_freed_blocks,
    reference,
    slots_needed,
    tiny_llm,
    tiny_model,
    workloads,
)

KINDS = ("int8", "fp8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_prompt_reads_its_own_keys_and_values_rounded(group, kind):
    """Also in the step that writes them: the first token of every chunk size is that of the rounded reference."""
    prompt = [5, 9, 13, 2, 30, 7, 7, 11, 3, 28, 17]
    expected = tuple(reference(group, kv_dtype=kind).greedy(prompt, 8))
    for chunk in (1, 3, 4, 11, 64):
        llm = tiny_llm(group, kv_dtype=kind, max_num_batched_tokens=chunk)
        assert llm.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 2, 3])
def test_the_probabilities_are_those_of_rounded_keys_and_values(group, kind):
    prompt = [5, 9, 13, 2, 30, 7, 7, 11, 3, 28, 17]
    (found,) = logprobs(tiny_model(group), [prompt], kind)
    expected = reference(group, kv_dtype=kind).logits(prompt).log_softmax(-1).float()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=40)
@given(st.data(), st.sampled_from(KINDS), models)
def test_an_answer_does_not_depend_on_options_or_batch_mates(data, kind, model):
    work = data.draw(workloads(greedy_params()))
    options = data.draw(engine_options(max(slots_needed(p, s) for p, s in work)))
    group, window, sinks = model
    given = {"kv_dtype": kind, "attention_window": window, "attention_sinks": sinks}
    alone = [tiny_llm(group, window, **given).generate(p, s)[0].token_ids for p, s in work]
    llm = tiny_llm(group, window, **(options | given))
    if options["kv_cache"] != "none":
        poison_freed_blocks(llm.engine)
    outs = llm.generate([p for p, _ in work], [s for _, s in work])
    assert [o.token_ids for o in outs] == alone
    if options["prefix_cache"] == "none":
        assert_empty(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_tiers_and_prefix_hits_give_the_same_answer(kind):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [[i, *range(4, 20)] for i in (1, 2, 3, 1, 2, 3)]
    cold = [tiny_llm(kv_dtype=kind).generate(p, params)[0].token_ids for p in prompts]
    warm = tiny_llm(kv_dtype=kind, prefix_cache="radix", num_blocks=7, host_cache=1 << 20, tier_policy="always")
    assert [warm.generate(p, params)[0].token_ids for p in prompts] == cold
    assert warm.meter.prefix_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_meter_counts_the_bytes_that_are_stored(kind):
    llm, plain = (tiny_llm(dtype="float32", kv_dtype=k) for k in (kind, "auto"))
    for one in (llm, plain):
        one.generate([4, 5, 6], SamplingParams(max_tokens=4, ignore_eos=True))
    per_row, plain_row = 4 + 4, 4 * 4  # head_dim 4: one byte each and a float32; or four bytes each
    assert llm.meter.kv_read_bytes * plain_row == plain.meter.kv_read_bytes * per_row
    assert llm.meter.kv_write_bytes * plain_row == plain.meter.kv_write_bytes * per_row
    assert llm.meter.kv_pool_bytes * plain_row == plain.meter.kv_pool_bytes * per_row
    assert llm.meter.kv_live_peak * plain_row == plain.meter.kv_live_peak * per_row
    assert llm.meter.kv_write_bytes == 6 * llm.engine.store.bytes_per_token
    assert llm.meter.activation_bytes > plain.meter.activation_bytes


def test_the_same_memory_holds_more_tokens():
    half, full = (tiny_llm(dtype="float32", num_blocks=None, kv_memory=1 << 14, kv_dtype=k) for k in ("int8", "auto"))
    assert half.engine.pool_size.num_blocks == 2 * full.engine.pool_size.num_blocks
    assert half.engine.pool_size.num_blocks * 4 * half.engine.store.bytes_per_token <= 1 << 14


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"kv_dtype": "int4"}, "kv_dtype must be one of 'auto', 'int8', 'fp8', got 'int4'"),
        ({"kv_dtype": 8}, "kv_dtype must be a string, got 8"),
        ({"kv_dtype": "int8", "kv_store": PlainKVStore.allocate}, "beside another kv_store leave kv_dtype='auto'"),
    ],
)
def test_what_does_not_go_together_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(**wrong)


def test_a_compiled_step_knows_the_plain_store_only():
    with pytest.raises(ValueError, match="leave attention_backend='auto' and kv_store='plain', and kv_dtype='auto'"):
        LLM(tiny_model(), kv_dtype="int8", compile=True, num_blocks=8)
