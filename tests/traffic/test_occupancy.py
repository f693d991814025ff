"""Slots held, step by step, without a model: hand-sized cases, the engine's own meter, and the formula of the last block."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import SamplingParams
from minillm.bench.studies import paging
from minillm.traffic.occupancy import before_preemption, last_block_waste, occupancy, waste

from ..strategies import tiny_engine, tiny_model

mixes = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=6)


def test_one_request_step_by_step():
    steps = occupancy([(5, 3)], 16, 16, block_size=4)
    assert [(s.allocated, s.live) for s in steps] == [(8, 5), (8, 6), (8, 7)]
    assert waste(steps) == pytest.approx(6 / 24)
    assert [s.allocated for s in occupancy([(5, 5)], 16, 16, block_size=4)] == [8, 8, 8, 8, 12]
    assert {s.allocated for s in occupancy([(5, 5)], 16, 16, block_size=4, allocation="exact")} == {12}
    assert {s.allocated for s in occupancy([(5, 5)], 16, 16, block_size=4, allocation="reserve")} == {16}


@settings(max_examples=25)
@given(mixes, st.sampled_from(["paged", "reserve", "exact"]), st.integers(1, 6))
def test_it_is_what_the_engine_does(mix, allocation, block_size):
    options = {"allocation": allocation, "block_size": block_size, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    blocks = -(-48 // block_size) + 2
    steps = occupancy(mix, blocks * block_size, 48, **options)
    engine = tiny_engine(num_blocks=blocks, **options)
    for prompt, n in mix:
        engine.add_request([4] * prompt, SamplingParams(max_tokens=n, ignore_eos=True))
    token, peaks = engine.store.bytes_per_token, []
    while engine.has_work:
        engine.step()
        peaks.append((engine.meter.kv_allocated_peak // token, engine.meter.kv_live_peak // token))
    assert engine.meter.steps == len(steps)
    assert peaks[-1] == (max(s.allocated for s in steps), max(s.live for s in steps))


def test_the_formula_of_the_last_block():
    assert last_block_waste(1, 100) == 0
    assert last_block_waste(16, 512) == pytest.approx(0.0144, abs=1e-4)
    assert last_block_waste(16, 100) == pytest.approx(0.07, abs=1e-3)
    steps = occupancy([(n, 65) for n in range(100, 164)], 64 * 256, 256, block_size=16, max_num_seqs=64)
    assert waste(steps) == pytest.approx(last_block_waste(16, 131.5 + 32), rel=0.1)


def test_a_pool_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="request 0 has 9 [+] 9 tokens"):
        occupancy([(9, 9)], 16, 32)
    with pytest.raises(ValueError, match="no room for one request with allocation='reserve'"):
        occupancy([(2, 2)], 16, 64, allocation="reserve")


def test_the_study_feeds_every_bar():
    state = paging.make_state(tiny_model(), context=9, rows=2, steps=3)
    found = paging.hold(paging.lengths(0, 12, 256), 2048, 256) | {k: paging.time_steps(llm, state) for k, llm in (
        ("paged_s", state.paged), ("strips_s", state.strips))}  # fmt: skip
    assert all(bar.value(found) >= 0 for bar in paging.BARS)
    assert found["paged 1 waste"] == 0 < found["paged 16 waste"] < found["paged 64 waste"] < found["reserve waste"]
    assert found["paged 16 rows"] > found["reserve rows"]
    assert state.paged.engine.cache.pool.num_referenced == state.strips.engine.cache.pool.num_referenced == 0
    assert before_preemption(occupancy([(4, 30)] * 4, 64, 64, block_size=4)) == 4
