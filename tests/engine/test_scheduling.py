"""Who runs when: admission, chunks, preemption, the static baseline, and requests that can never be served."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import SamplingParams

from ..strategies import (
    MAX_LEN,
    engine_options,
    greedy,
    greedy_params,
    run_to_end,
    slots_needed,
    tiny_engine,
    watched,
    workloads,
)


def ask(engine, prompt, max_tokens=4, **params):
    return engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))


def schedule_of(engine):
    """Run to the end; per step, {request id: tokens scheduled}, and the outputs."""
    steps, done, schedule = [], {}, engine.scheduler.schedule

    def recording():
        plan = schedule()
        steps.append({s.request.request_id: s.num_tokens for s in plan.scheduled})
        return plan

    engine.scheduler.schedule = recording
    while engine.has_work:
        done.update({o.request_id: o for o in engine.step() if o.finished})
    return steps, done


# --- chunked prefill under a budget ---


@settings(max_examples=30)
@given(st.data(), workloads(greedy_params()))
def test_a_step_never_schedules_more_than_the_budget_and_never_nothing(data, work):
    options = data.draw(engine_options(max(slots_needed(p, s) for p, s in work)))
    engine = tiny_engine(**options)
    for prompt, params in work:
        engine.add_request(prompt, params)
    schedule, limit = engine.scheduler.schedule, options["max_num_batched_tokens"]
    while engine.has_work:
        plan = schedule()
        engine.scheduler.schedule = lambda plan=plan: plan
        assert plan.num_tokens or options["overlap"], "with overlap, all that is left may be in flight"
        assert plan.num_tokens + plan.padded_tokens <= limit
        assert all(s.num_tokens > 0 for s in plan.scheduled)
        assert len(plan.scheduled) + plan.padded_rows <= options["max_num_seqs"]
        assert not {id(r) for r in plan.preempted} & {id(s.request) for s in plan.scheduled}
        engine.step()


def test_a_long_prompt_is_computed_in_chunks_beside_a_decoding_request():
    """Lengths 1 and 40, chunk 8: the short one gets a token in every step, the long one what the budget leaves."""
    engine = tiny_engine(max_num_batched_tokens=8)
    short, long = ask(engine, [5], 8), ask(engine, list(range(2, 32)) + list(range(2, 12)), 2)
    steps, done = schedule_of(engine)
    assert steps[:6] == [{short: 1, long: 7}] * 5 + [{short: 1, long: 5}]
    assert done[short].token_ids == greedy([5], 8)
    assert done[long].token_ids == greedy(list(range(2, 32)) + list(range(2, 12)), 2)


def test_a_row_that_the_budget_leaves_out_computes_and_appends_nothing():
    engine = tiny_engine(max_num_batched_tokens=2)
    names = [ask(engine, [t], 5) for t in (4, 5, 6)]
    steps, done = schedule_of(engine)
    assert all(sum(s.values()) <= 2 for s in steps)
    assert [done[n].token_ids for n in names] == [greedy([t], 5) for t in (4, 5, 6)]


def test_no_more_requests_run_at_once_than_max_num_seqs():
    engine = tiny_engine(max_num_seqs=2)
    for t in range(2, 8):
        ask(engine, [t])
    steps, done = schedule_of(engine)
    assert max(map(len, steps)) == 2 and len(done) == 6


def test_requests_are_admitted_in_order_of_arrival_and_none_overtakes_a_large_one():
    engine = tiny_engine(num_blocks=5, block_size=4)
    first, large, small = ask(engine, list(range(2, 12)), 3), ask(engine, list(range(2, 20)), 2), ask(engine, [3], 2)
    steps, _ = schedule_of(engine)
    starts = [next(i for i, s in enumerate(steps) if name in s) for name in (first, large, small)]
    assert starts == sorted(starts) and starts[1] > 0, "the large one waits for blocks, the small one waits behind it"


# --- preemption ---


def test_the_youngest_is_pushed_out_and_the_oldest_never():
    engine = tiny_engine(num_blocks=6, block_size=4)
    names = [ask(engine, [t] * 6, 10) for t in (4, 5, 6)]
    requests = list(engine.scheduler.waiting)
    _, done = schedule_of(engine)
    assert requests[0].num_preemptions == 0 and requests[2].num_preemptions > 0
    assert [done[n].token_ids for n in names] == [greedy([t] * 6, 10) for t in (4, 5, 6)]


def test_a_request_preempted_after_three_tokens_goes_on_with_the_fourth():
    """It has output, yet has to compute its prompt again: nothing may be guessed from either."""
    engine = tiny_engine(num_blocks=4, block_size=4, max_num_batched_tokens=5)
    old, young = ask(engine, [7] * 6, 8), ask(engine, [9] * 3, 8)
    victim = list(engine.scheduler.waiting)[1]
    while not victim.num_preemptions:
        engine.step()
    had = victim.num_output_tokens
    assert had >= 3 and victim.num_computed_tokens == 0 and victim.blocks == []
    done = run_to_end(engine)
    assert done[young].token_ids == greedy([9] * 3, 8) and done[old].token_ids == greedy([7] * 6, 8)


def test_who_was_preempted_goes_before_those_who_never_ran():
    engine = tiny_engine(num_blocks=4, block_size=4, max_num_seqs=2)
    _, young = ask(engine, [7] * 6, 8), ask(engine, [9] * 3, 8)
    late = ask(engine, [3] * 3, 2)
    victim = list(engine.scheduler.waiting)[1]
    while not victim.num_preemptions:
        engine.step()
    assert [r.request_id for r in engine.scheduler.waiting] == [young, late]


# --- what can never fit ---


def test_a_request_that_would_outgrow_the_pool_is_refused_and_others_continue():
    """2 blocks of 4, prompt 8, 8 more: 15 slots."""
    engine = tiny_engine(num_blocks=2, block_size=4)
    other = ask(engine, [4, 5], 3)
    engine.step()
    with pytest.raises(ValueError, match=r"8 tokens with max_tokens=8 needs 15 KV slots, the whole pool has 8"):
        ask(engine, list(range(2, 10)), 8)
    assert run_to_end(engine)[other].token_ids == greedy([4, 5], 3)
    assert run_to_end(engine) == {} and engine.cache.pool.num_free == 2


def test_a_request_that_fills_the_pool_to_the_last_slot_is_served():
    engine = tiny_engine(num_blocks=2, block_size=4)
    name = ask(engine, list(range(2, 9)), 2)  # 7 + 2 tokens, the last of which needs no slot
    assert run_to_end(engine)[name].token_ids == greedy(list(range(2, 9)), 2)
    with pytest.raises(ValueError, match="needs 9 KV slots, the whole pool has 8"):
        ask(engine, list(range(2, 9)), 3)


def test_a_prompt_longer_than_the_pool_is_refused_and_does_not_block_the_queue():
    engine = tiny_engine(num_blocks=2, block_size=4)
    first = ask(engine, [4], 2)
    with pytest.raises(ValueError, match="20 tokens"):
        ask(engine, list(range(2, 22)), 1)
    second = ask(engine, [5], 2)
    assert set(run_to_end(engine)) == {first, second}


@pytest.mark.parametrize("limit", [None, 20])
def test_prompts_around_max_model_len(limit):
    engine = tiny_engine(max_model_len=limit)
    most = limit or MAX_LEN
    prompt = [5] * (most - 1)
    name = ask(engine, prompt, 9)
    out = run_to_end(engine)[name]
    assert out.token_ids == greedy(prompt, 1) and out.finish_reason == "length"
    for length in (most, most + 1):
        with pytest.raises(ValueError, match=rf"{length} tokens.* {most - 1}"):
            ask(engine, [5] * length, 1)
    assert not engine.has_work


def test_output_ends_at_max_model_len():
    engine = tiny_engine(max_model_len=20)
    name = ask(engine, [5] * 15, 100)
    out = run_to_end(engine)[name]
    assert len(out.token_ids) == 5 and out.finish_reason == "length" and out.token_ids == greedy([5] * 15, 5)


def test_a_max_model_len_beyond_the_models_positions_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=rf"{MAX_LEN + 1} .* {MAX_LEN}"):
        tiny_engine(max_model_len=MAX_LEN + 1)


def test_recomputation_needs_a_budget_for_whole_sequences():
    engine = tiny_engine(kv_cache="none", max_num_batched_tokens=10)
    with pytest.raises(ValueError, match="up to 11 tokens .* is 10"):
        ask(engine, [5] * 8, 4)
    name = ask(engine, [5] * 8, 3)
    assert run_to_end(engine)[name].token_ids == greedy([5] * 8, 3)


# --- the baselines do what their names say ---


def test_without_a_cache_every_step_computes_every_token_again():
    engine = tiny_engine(kv_cache="none")
    with watched(engine.model) as batches:
        ask(engine, [5, 6, 7], 4)
        run_to_end(engine)
    assert [b.num_tokens for b in batches] == [3, 4, 5, 6]


def test_contiguous_reserves_a_strip_of_max_model_len_per_request():
    engine = tiny_engine(kv_cache="contiguous", num_blocks=10, block_size=4, max_model_len=20)
    for t in (4, 5, 6):
        ask(engine, [t], 2)
    engine.step()
    assert [r.blocks for r in engine.scheduler.running] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], "40 slots are two strips of 20"
    assert engine.meter.kv_allocated_bytes == 2 * 20 * engine.store.bytes_per_token


def test_static_batches_are_padded_and_wait_for_the_slowest():
    engine = tiny_engine(batching="static", max_num_seqs=2)
    short, long, later = ask(engine, [4], 1), ask(engine, [5] * 6, 4), ask(engine, [6], 2)
    with watched(engine.model) as batches:
        steps, done = schedule_of(engine)
    assert [set(s) for s in steps] == [{short, long}, {long}, {long}, {long}, {later}, {later}]
    assert [(b.num_tokens, b.num_padding) for b in batches] == [(12, 5), (2, 1), (2, 1), (2, 1), (1, 0), (1, 0)]
    for name, prompt, n in ((short, [4], 1), (long, [5] * 6, 4), (later, [6], 2)):
        assert done[name].token_ids == greedy(prompt, n)


def test_a_static_batch_whose_padding_would_break_the_budget_is_cut_short():
    engine = tiny_engine(batching="static", max_num_batched_tokens=10)
    first, second, third = ask(engine, [4] * 5, 1), ask(engine, [5], 1), ask(engine, [6], 1)
    steps, _ = schedule_of(engine)
    assert [set(s) for s in steps] == [{first, second}, {third}], "three rows of five would be fifteen"


def test_padding_rows_write_no_slot_of_a_request():
    engine = tiny_engine(batching="static", max_num_seqs=3)
    for prompt, n in (([4], 1), ([5] * 6, 4), ([6] * 2, 3)):
        ask(engine, prompt, n)
    with watched(engine.model) as batches:
        run_to_end(engine)
    padded = [b for b in batches if b.num_padding]
    assert padded
    for b in padded:
        own, padding = b.slots[: -b.num_padding].tolist(), b.slots[-b.num_padding :].tolist()
        assert set(padding) == {0} and all(s >= b.block_size for s in own)
        assert len(b.logit_indices) <= b.num_rows - b.num_padding
