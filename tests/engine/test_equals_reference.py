"""Greedy output depends on nothing but the request: it equals a plain recomputation of the whole sequence."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minillm import EngineConfig, SamplingParams
from minillm.engine.engine import Engine

from ..reference import Reference, ending
from ..strategies import (
    EOS,
    GROUPS,
    LATENT,
    MAX_LEN,
    WINDOWS,
    all_models,
    engine_options,
    for_experts,
    greedy,
    greedy_params,
    poison_freed_blocks,
    reference,
    run_to_end,
    slots_needed,
    tiny_engine,
    tiny_model,
    watched,
    workloads,
)  # fmt: skip


def expected(model, prompt, params):
    """Greedy output by the reference: token ids and reason."""
    room = MAX_LEN - len(prompt)
    end = ending(reference(*model).greedy(prompt, min(params.max_tokens, room)), params, EOS, room=room)
    return end.token_ids, end.finish_reason


@settings(max_examples=150)
@given(st.data(), all_models, workloads(greedy_params()))
def test_greedy_tokens_equal_the_reference_under_any_options_and_every_request_ends(data, model, work):
    options = data.draw(engine_options(max(slots_needed(p, s) for p, s in work)))
    group, window, sinks = model
    options = for_experts(options, group)
    given = {"attention_window": window, "attention_sinks": sinks}  # the window is the model's, the engine's or both
    if group in LATENT:
        given["mla"] = data.draw(st.sampled_from(["auto", "absorbed", "naive"]))
    engine = Engine(tiny_model(group, data.draw(st.sampled_from([window, None]))), None, EngineConfig(**options, **given))
    poison_freed_blocks(engine)
    work = [sample for sample in work for _ in range(data.draw(st.sampled_from([1, 1, 2, 4])))]
    names: list[str] = []
    for i, (prompt, params) in enumerate(work):
        same = i > 0 and prompt == work[i - 1][0]
        names.append(engine.add_request(prompt, params, sibling=names[-1] if same else None))
    requests = list(engine.scheduler.waiting)
    with watched(engine.model) as batches:
        done = run_to_end(engine)
        assert max(b.num_tokens for b in batches) <= options["max_num_batched_tokens"]
        calls = len(batches)
        assert engine.step() == [] and len(batches) == calls, "an idle engine calls the model zero times"
    for name, (prompt, params) in zip(names, work, strict=True):
        assert (done[name].token_ids, done[name].finish_reason) == expected(model, prompt, params)
    event("somebody was preempted" if any(r.num_preemptions for r in requests) else "nobody was preempted")
    event("a prompt was shared" if engine.meter.prefix_tokens else "no prompt was shared")
    engine.cache.pool.check()
    assert engine.cache.pool.num_referenced == 0


@settings(max_examples=40)
@given(st.integers(2, 10), st.lists(st.sampled_from([0, 0, 0, 1]), min_size=4, max_size=8), st.integers(2, 12))
def test_rows_of_different_length_that_decode_together_keep_their_own_keys(base, longer, block_size):
    """Most rows equally long, some half as long again: close enough to share one gather, whatever their order."""
    engine = tiny_engine(block_size=block_size, num_blocks=80)
    work = {}
    for i, more in enumerate(longer):
        prompt = [2 + 3 * i] * (base + more * (base // 2))
        work[engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))] = prompt
    done = run_to_end(engine)
    assert {name: out.token_ids for name, out in done.items()} == {name: greedy(p, 4) for name, p in work.items()}


@pytest.mark.parametrize("group, window", list(itertools.product(GROUPS + LATENT, WINDOWS)))
def test_logits_of_every_position_equal_the_reference(group, window):
    """Not only the winner: all logits, to rounding, with the prompt in one chunk and in chunks of 3."""
    prompt = torch.randint(0, 32, (17,), generator=torch.Generator().manual_seed(1)).tolist()
    want = reference(group, window).logits(prompt)
    for chunk in (17, 3):
        engine = tiny_engine(group, window, max_num_batched_tokens=chunk)
        for length in (1, 2, 4, 5, 16, 17):
            engine.add_request(prompt[:length], SamplingParams(max_tokens=1, logprobs=32, ignore_eos=True))
            (out,) = run_to_end(engine).values()
            got = torch.tensor([out.logprobs[0][t] for t in range(32)], dtype=torch.float64)
            torch.testing.assert_close(got, torch.log_softmax(want[length - 1], dim=-1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 4, 8, 32, 33, 64])
def test_a_prompt_of_33_gives_the_same_output_in_chunks_of(chunk):
    prompt, params = list(range(2, 32)) + [5, 9, 2], SamplingParams(max_tokens=8, ignore_eos=True)
    engine = tiny_engine(max_num_batched_tokens=chunk)
    name = engine.add_request(prompt, params)
    assert run_to_end(engine)[name].token_ids == expected((3, None), prompt, params)[0]


def test_a_window_of_4_sees_exactly_4_keys():
    """The reference with a window of 3 or of 5 gives other logits, so equality above is not an accident."""
    model = tiny_model(3, 4)
    prompt = list(range(2, 14))
    exact = reference(3, 4).logits(prompt)[-1]
    for other in (3, 5):
        near = _with_window(model, other).logits(prompt)[-1]
        assert (near - exact).abs().max() > 1e-3


def _with_window(model, window):
    return Reference(model, window)


def test_bfloat16_and_float32_logits_are_close_to_float64():
    """Lower precision promises closeness, not equal tokens: a few units in the last place times the depth of the model."""
    prompt = list(range(2, 22))
    want = torch.log_softmax(reference(3).logits(prompt)[-1], dim=-1)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.15)):
        engine = Engine(tiny_model(3).converted(dtype, "cpu"), None, EngineConfig(num_blocks=16, block_size=4))
        engine.add_request(prompt, SamplingParams(max_tokens=1, logprobs=32, ignore_eos=True))
        (out,) = run_to_end(engine).values()
        got = torch.tensor([out.logprobs[0][t] for t in range(32)], dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
