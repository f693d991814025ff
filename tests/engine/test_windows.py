"""Sliding windows and attention sinks: what is seen, what is given back, and what may not be shared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.attention.window import Window
from minillm.config import EngineConfig
from minillm.perf.work import visible_pairs

from ..strategies import WatchedAttention, greedy, poison_freed_blocks, reference, run_to_end, tiny_engine, tiny_model

LONG = list(range(2, 30))
windows = st.builds(Window, st.none() | st.integers(1, 12), st.integers(0, 6)).filter(lambda w: w.size or not w.sinks)


def seen_by(w: Window, query: int) -> set[int]:
    """The definition, key by key."""
    return {k for k in range(query + 1) if w.size is None or k > query - w.size or k < w.sinks}


@given(windows, st.integers(1, 9), st.integers(0, 30))
def test_positions_are_the_keys_that_some_query_sees(w, q_len, before):
    queries = range(before, before + q_len)
    want = sorted(set.union(*(seen_by(w, q) for q in queries)))
    assert w.positions(q_len, before + q_len).tolist() == want and w.count(q_len, before + q_len) == len(want)
    mask = w.sees(np.array(queries)[:, None], np.array(want)[None, :])
    assert mask.tolist() == [[k in seen_by(w, q) for k in want] for q in queries]
    assert visible_pairs(q_len, before + q_len, w.size, w.sinks) == mask.sum()


@given(windows, st.integers(0, 40), st.integers(1, 7))
def test_a_block_is_unseen_when_no_later_query_sees_a_key_of_it(w, query, size):
    later = set.union(*(seen_by(w, q) for q in range(query, query + 60)))
    blocks = [i for i in range(query // size + 1) if not later & set(range(i * size, (i + 1) * size))]
    assert list(w.unseen_blocks(query, size)) == blocks


@given(windows, st.integers(1, 12), st.integers(1, 7), st.integers(1, 60))
def test_no_request_holds_more_blocks_than_it_is_admitted_for(w, chunk, size, length):
    held, most = set(), 0
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        held |= set(range(start // size, -(-end // size)))
        most = max(most, len(held))
        held -= set(w.unseen_blocks(end, size))
    assert most <= w.most_blocks(length, chunk, size)


def test_a_window_of_4_reads_exactly_4_keys_and_the_sinks():
    for sinks in (0, 3):
        engine = tiny_engine(attention_window=4, attention_sinks=sinks)
        engine.add_request(LONG, SamplingParams(max_tokens=3, ignore_eos=True))
        engine.step()
        before = engine.meter.kv_read_bytes
        engine.step()
        assert engine.meter.kv_read_bytes - before == (4 + sinks) * engine.store.bytes_per_token


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_windowed_request_holds_blocks_for_its_window_and_no_more(chunk, sinks):
    engine = tiny_engine(attention_window=6, attention_sinks=sinks, max_num_batched_tokens=chunk)
    poison_freed_blocks(engine)
    name = engine.add_request(LONG[:20], SamplingParams(max_tokens=24, ignore_eos=True))
    held = []
    while engine.has_work:
        done = {o.request_id: o for o in engine.step()}
        held += [sum(map(bool, r.blocks)) for r in engine.scheduler.running if r.num_output_tokens > 1]
    assert max(held) <= 3 + -(-sinks // 4) and done[name].token_ids == tuple(reference(3, 6, sinks).greedy(LONG[:20], 24))


def test_a_pool_smaller_than_the_text_serves_a_windowed_request():
    engine = tiny_engine(attention_window=4, num_blocks=4, max_num_batched_tokens=4)
    poison_freed_blocks(engine)
    name = engine.add_request(LONG, SamplingParams(max_tokens=12, ignore_eos=True))  # 39 tokens, 16 slots
    assert run_to_end(engine)[name].token_ids == tuple(reference(3, 4).greedy(LONG, 12))
    with pytest.raises(ValueError, match="needs 39 KV slots, the whole pool has 16"):
        tiny_engine(num_blocks=4).add_request(LONG, SamplingParams(max_tokens=12))


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_window_of_at_least_the_length_is_dense_attention(sinks):
    llm = LLM(tiny_model(), block_size=4, num_blocks=20, attention_window=48, attention_sinks=sinks)
    assert llm.generate([LONG], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids == greedy(LONG, 12)


def test_the_narrower_of_two_windows_counts():
    for model, option in ((4, 9), (9, 4)):
        llm = LLM(tiny_model(3, model), block_size=4, num_blocks=20, attention_window=option)
        out = llm.generate([LONG], SamplingParams(max_tokens=6, ignore_eos=True))[0]
        assert out.token_ids == tuple(reference(3, 4).greedy(LONG, 6))


def test_a_preempted_request_beyond_its_window_computes_again():
    engine = tiny_engine(attention_window=4, num_blocks=7, block_size=2, max_num_batched_tokens=4)
    poison_freed_blocks(engine)
    names = {engine.add_request([*LONG[:13], t], SamplingParams(max_tokens=9, ignore_eos=True)): t for t in (4, 5, 6)}
    requests = list(engine.scheduler.waiting)
    done = run_to_end(engine)
    for name, t in names.items():
        assert done[name].token_ids == tuple(reference(3, 4).greedy([*LONG[:13], t], 9))
    assert any(r.num_preemptions for r in requests)


@pytest.mark.parametrize("sinks, found", [(0, 0), (9, 12)])
def test_what_a_window_left_behind_is_neither_kept_nor_served(sinks, found):
    """Only the blocks before the first gap are a prefix; those are the sinks'."""
    engine = tiny_engine(attention_window=4, attention_sinks=sinks, prefix_cache="radix", max_num_batched_tokens=8)
    poison_freed_blocks(engine)
    for turn in range(2):
        name = engine.add_request(LONG, SamplingParams(max_tokens=6, ignore_eos=True))
        out = run_to_end(engine)[name]
        assert out.token_ids == tuple(reference(3, 4, sinks).greedy(LONG, 6)) and out.num_cached_tokens == turn * found


def test_a_backend_of_ones_own_keeps_every_block_unless_it_says_what_it_sees():
    class Mine:
        def __init__(self, inner):
            self.plan, self.forward, self.work = inner.plan, inner.forward, inner.work

    for backend, gone in ((Mine(WatchedAttention(4)), 0), (WatchedAttention(4), 5)):
        engine = tiny_engine(attention_backend=backend)
        engine.add_request(LONG, SamplingParams(max_tokens=3, ignore_eos=True))
        engine.step()
        (r,) = engine.scheduler.running
        assert r.blocks.count(0) == gone + (gone > 0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention_window": 0}, "attention_window must be a whole number of at least 1, got 0"),
        ({"attention_window": True}, "attention_window must be"),
        ({"attention_sinks": -1}, "attention_sinks must be a whole number of at least 0, got -1"),
        ({"attention_sinks": 2}, "attention_sinks=2 without a window"),
        ({"attention_window": 5, "attention_backend": WatchedAttention()}, "a backend of your own has its own"),
    ],
)
def test_a_window_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine(**options)


# --- strips ---


def test_exact_strips_lie_side_by_side_and_are_as_long_as_the_request_gets():
    engine = tiny_engine(allocation="exact", num_blocks=10)
    for prompt, n in (([4] * 5, 4), ([5] * 9, 9)):
        engine.add_request(prompt, SamplingParams(max_tokens=n, ignore_eos=True))
    engine.step()
    assert [r.blocks for r in engine.scheduler.running] == [[1, 2], [3, 4, 5, 6, 7]]


def test_a_strip_waits_for_a_gap_that_is_wide_enough_though_more_blocks_are_free():
    """External fragmentation, which pages do not have."""
    running = {}
    for allocation in ("exact", "paged"):
        engine = tiny_engine(allocation=allocation, num_blocks=6)
        poison_freed_blocks(engine)
        for length, n in ((7, 2), (1, 8), (7, 2)):  # strips of two blocks each; the first and the last end early
            engine.add_request([4] * length, SamplingParams(max_tokens=n, ignore_eos=True))
        engine.step(), engine.step()
        assert engine.cache.pool.num_free >= 4
        late = engine.add_request([7] * 14, SamplingParams(max_tokens=2, ignore_eos=True))  # four blocks
        engine.step()
        running[allocation] = len(engine.scheduler.running)
        assert run_to_end(engine)[late].token_ids == greedy([7] * 14, 2)
    assert running == {"exact": 1, "paged": 2}


@pytest.mark.parametrize("options", [{"kv_cache": "contiguous"}, {"allocation": "reserve"}, {"allocation": "exact"}])
def test_a_request_with_a_strip_is_never_preempted(options):
    engine = tiny_engine(num_blocks=26, block_size=2, **options)
    for t in range(4, 10):
        engine.add_request([t] * 5, SamplingParams(max_tokens=12, ignore_eos=True))
    done = run_to_end(engine)
    assert len(done) == 6 and engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"allocation": "buddy"}, "allocation must be one of 'paged', 'reserve', 'exact', got 'buddy'"),
        ({"allocation": "exact", "kv_cache": "none"}, "allocation='exact'"),
        ({"allocation": "exact", "prefix_cache": "hash"}, "leave both 'paged'"),
        ({"kv_cache": "contiguous", "prefix_cache": "radix"}, "kv_cache='contiguous'"),
    ],
)
def test_an_allocation_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(("window", "sinks"), [(2**70, 0), (2**70, 2**70), (3, 2**70)])
def test_a_window_beyond_any_text_hides_nothing(window, sinks):
    llm = LLM(tiny_model(), attention_window=window, attention_sinks=sinks)
    (out,) = llm.generate([[5, 9, 3, 7, 2]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert out.token_ids == greedy([5, 9, 3, 7, 2], 6)
