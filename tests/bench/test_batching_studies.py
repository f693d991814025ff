"""The studies of batching, simulation and scheduling, on tiny models: every bar is fed, and what is exact is exact."""

from __future__ import annotations

import pytest

from minillm.bench.studies import batching, scheduling, simulation

from ..strategies import tiny_llm, tiny_model


def test_the_batching_study_counts_steps_and_occupancy():
    state = batching.make_state(tiny_model(), requests=12, slots=4, median=3, longest=12)
    rounds = [batching.measure(state, turn) for turn in range(2)]
    for name in ("continuous", "static", "static-sorted"):
        assert rounds[0][f"{name} steps"] == rounds[1][f"{name} steps"] and rounds[0][f"{name}_s"] > 0
    assert rounds[0]["continuous steps"] < rounds[0]["static steps"] > rounds[0]["static-sorted steps"]
    assert rounds[0]["continuous occupancy"] > rounds[0]["static occupancy"]
    assert all(bar.value(rounds[0]) > 0 for bar in batching.BARS)


def test_the_batching_bars_compare_the_right_way_round():
    found = {"tokens": 100.0}
    for way, steps in (("continuous", 10.0), ("static", 20.0), ("static-sorted", 15.0)):
        found |= {f"{way} steps": steps, f"{way}_s": steps / 5, f"{way} occupancy": 9 / steps}
    assert [bar.value(found) for bar in batching.BARS] == pytest.approx([2, 1.5, 2, 1.5, 0.9, 0.45, 0.6, 50])


def test_the_simulation_study_compares_the_same_trace_twice():
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 64, "block_size": 4}
    state = simulation.make_state(tiny_llm(**options), 8, 500.0, (2, 12), 4, 10, options)
    found = simulation.measure(state, 0)
    assert all(bar.value(found) > 0 for bar in simulation.BARS)
    found = {f"{who} {what}": n for who, n in (("simulated", 2.0), ("real", 4.0)) for what in
             ("tok/s", "p95 TPOT", "p95 TTFT", "steps")} | {"simulation_s": 0.1, "real_s": 1.0}  # fmt: skip
    assert [bar.value(found) for bar in simulation.BARS] == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.1])


def test_the_scheduling_study_times_every_kind_of_change():
    found = scheduling.measure((40, 100), 1)
    assert set(found) == {"step_s", "alone_s", "tenth_s", "change_s", "abort_s"} and found["step_s"] > 0 < found["abort_s"]
    found = {"step_s": 2e-3, "alone_s": 1e-3, "tenth_s": 1e-4, "change_s": 1e-5, "abort_s": 1e-6}
    assert [bar.value(found) for bar in scheduling.BARS] == pytest.approx([2, 2, 2, 10, 1])


def test_a_loaded_scheduler_decodes_with_everybody_else_waiting():
    scheduler = scheduling.loaded(10, 30)
    assert len(scheduler.running) == 10 and len(scheduler.waiting) == 30
    assert [s.num_tokens for s in scheduler.schedule().scheduled] == [1] * 10
