"""The seam bears a prefix cache that really keeps blocks: output equals cold, and nothing is lost. B is the block size."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minillm import LLM, EngineConfig, SamplingParams
from minillm.engine.engine import Engine

from ..strategies import (
    MAX_LEN,
    models,
    poison_freed_blocks,
    reference,
    run_to_end,
    slots_needed,
    tiny_engine,
    tiny_model,
    watched,
)
from .dict_prefix import DictPrefixCache

B = 4


def cached_engine(block_size=B, **options) -> Engine:
    engine = tiny_engine(prefix_cache=DictPrefixCache(block_size), block_size=block_size, **options)
    poison_freed_blocks(engine)
    return engine


def ask(engine, prompt, max_tokens=5):
    name = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return run_to_end(engine)[name]


def cold(prompt, max_tokens=5):
    return tuple(reference().greedy(prompt, max_tokens))


@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_a_prompt_sent_twice_equals_cold_and_recomputes_at_least_one_token(length):
    engine, prompt = cached_engine(), list(range(2, 2 + length))
    assert ask(engine, prompt).num_cached_tokens == 0
    with watched(engine.model) as batches:
        second = ask(engine, prompt)
    assert second.token_ids == cold(prompt)
    assert second.num_cached_tokens == (length - 1) // B * B <= length - 1
    assert batches[0].num_tokens == length - second.num_cached_tokens >= 1
    assert engine.meter.prefix_tokens == second.num_cached_tokens


def test_an_answer_is_a_prefix_for_the_next_turn():
    engine, prompt = cached_engine(), [5, 6, 7]
    first = ask(engine, prompt, max_tokens=7)
    longer = [*prompt, *first.token_ids, 9]
    second = ask(engine, longer)
    # ten tokens stand in front of the 9; the last of them was sampled and never computed
    assert second.num_cached_tokens == 2 * B and second.token_ids == cold(longer)


def test_prompts_that_diverge_inside_a_block_share_only_the_blocks_before_it():
    engine = cached_engine()
    ask(engine, [2, 3, 4, 5, 6, 7, 8, 9])
    other = [2, 3, 4, 5, 6, 7, 30, 9, 10]
    out = ask(engine, other)
    assert out.num_cached_tokens == B and out.token_ids == cold(other)


def test_a_preempted_request_finds_its_own_old_blocks_and_computes_only_the_rest():
    """Three tokens are out when it is pushed out; the count of what is scheduled then starts behind the hit."""
    engine = cached_engine(num_blocks=5, max_num_seqs=2)
    old = engine.add_request(list(range(2, 10)), SamplingParams(max_tokens=8, ignore_eos=True))
    young = engine.add_request(list(range(12, 19)), SamplingParams(max_tokens=8, ignore_eos=True))
    victim = engine.scheduler.waiting[1]
    done = run_to_end(engine)
    assert victim.num_preemptions >= 1 and victim.num_cached_tokens > 0
    assert done[old].token_ids == cold(list(range(2, 10)), 8) and done[young].token_ids == cold(list(range(12, 19)), 8)
    engine.cache.pool.check()


@pytest.mark.parametrize("block_size", [1, 4])
def test_eviction_gives_blocks_back_once_each_and_what_was_evicted_is_computed_again(block_size):
    engine = cached_engine(block_size, num_blocks=-(-16 // block_size))
    prompts = [[first, *range(10, 19)] for first in (2, 3, 4, 2)]
    for prompt in prompts:
        assert ask(engine, prompt, max_tokens=6).token_ids == cold(prompt, 6)
        engine.cache.pool.check()
    evicted = engine.cache.prefix.evicted
    assert evicted and all(1 <= b <= engine.cache.pool.num_blocks for b in evicted), "blocks, not tokens"
    assert engine.cache.pool.num_cached == len(engine.cache.prefix.prefix_of)


@pytest.mark.parametrize("when", ["waiting", "mid-chunk", "decoding"])
def test_an_abort_restores_the_pool_and_leaves_no_unfinished_kv_in_the_cache(when):
    engine = cached_engine(max_num_batched_tokens=6, max_num_seqs=1)
    prompt = list(range(2, 15))
    name = engine.add_request(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    computed = {"waiting": 0, "mid-chunk": 6, "decoding": 14}[when]
    for _ in range({"waiting": 0, "mid-chunk": 1, "decoding": 4}[when]):
        engine.step()
    engine.abort(name)
    pool = engine.cache.pool
    assert pool.num_referenced == 0 and pool.num_cached == computed // B and pool.num_free + pool.num_cached == pool.num_blocks
    again = ask(engine, prompt)
    assert again.token_ids == cold(prompt) and again.num_cached_tokens == min(computed // B, 12 // B) * B


def test_an_interrupted_step_leaves_no_unfinished_kv_in_the_cache():
    from ..strategies import WatchedAttention

    backend = WatchedAttention()
    engine = cached_engine(attention_backend=backend)
    prompt = list(range(2, 12))
    name = engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    backend.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort(name)
    assert engine.cache.pool.num_cached == 0 and engine.cache.pool.num_free == engine.cache.pool.num_blocks
    assert ask(engine, prompt).token_ids == cold(prompt)


def test_running_requests_share_cached_blocks_and_the_last_one_returns_them():
    engine = cached_engine()
    ask(engine, list(range(2, 11)))
    pool, shared = engine.cache.pool, engine.cache.prefix.match(list(range(2, 10)))
    names = [engine.add_request([*range(2, 10), t], SamplingParams(max_tokens=m, ignore_eos=True)) for t, m in ((11, 2), (12, 5))]
    engine.step()
    assert [pool.ref_count(b) for b in shared] == [2, 2]
    engine.step()
    assert [pool.ref_count(b) for b in shared] == [1, 1], "the shorter one has ended"
    done = run_to_end(engine)
    assert names[1] in done and pool.num_referenced == 0 and pool.num_cached >= 2


def test_a_prefix_cache_without_kv_is_refused():
    with pytest.raises(ValueError, match="kv_cache='none'"):
        tiny_engine(kv_cache="none", prefix_cache=DictPrefixCache(B))


def test_the_seam_takes_a_learners_own_object_by_keyword():
    mine = DictPrefixCache(B)
    llm = LLM(tiny_model(), prefix_cache=mine, block_size=B, num_blocks=20)
    prompt = list(range(2, 12))
    first, second = (llm.generate(prompt, SamplingParams(max_tokens=3))[0] for _ in range(2))
    assert first.token_ids == second.token_ids and second.num_cached_tokens == 8 and llm.meter.prefix_tokens == 8


few = st.lists(st.integers(2, 3), min_size=1, max_size=18)  # two different tokens: many equal beginnings
turns = st.lists(st.lists(st.tuples(few, st.integers(1, 8)), min_size=1, max_size=4), min_size=2, max_size=4)


@settings(max_examples=50)
@given(models, turns, st.integers(1, 5), st.integers(0, 4), st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_output_equals_cold_under_any_history_of_requests(model, turns, block_size, slack, budget, seqs, static):
    needed = max(slots_needed(p, SamplingParams(max_tokens=n)) for turn in turns for p, n in turn)
    options = EngineConfig(
        prefix_cache=DictPrefixCache(block_size), block_size=block_size, num_blocks=-(-needed // block_size) + slack,
        max_num_batched_tokens=budget, max_num_seqs=seqs, batching="static" if static else "continuous",
    )  # fmt: skip
    engine = Engine(tiny_model(*model), None, options)
    poison_freed_blocks(engine)
    for turn in turns:
        names = [engine.add_request(p, SamplingParams(max_tokens=n, ignore_eos=True)) for p, n in turn]
        done = run_to_end(engine)
        for name, (prompt, n) in zip(names, turn, strict=True):
            assert done[name].token_ids == tuple(reference(*model).greedy(prompt, min(n, MAX_LEN - len(prompt))))
            assert done[name].num_cached_tokens % block_size == 0
        pool = engine.cache.pool
        pool.check()
        assert pool.num_referenced == 0 and pool.num_cached == len(engine.cache.prefix.prefix_of)
    event("something was evicted" if engine.cache.prefix.evicted else "nothing was evicted")
    event("something was found" if engine.meter.prefix_tokens else "nothing was found")
