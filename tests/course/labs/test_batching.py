"""Lesson 5.1's pictures, counts and panel without a front end, on a tiny random model."""

from __future__ import annotations

import statistics

import pytest

from minillm.course.labs import batching as lab
from minillm.course.panel import Cancelled
from minillm.course.plots import png
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.traffic.trace import exponential_lengths, lognormal_lengths

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=256
)
SECONDS = 60
CHAT = lab.workload(12, 5, 20, 64)


@pytest.fixture(scope="module")
def load() -> lab.Load:
    return lab.Load(Transformer.random(CONFIG), requests=6, median=3, longest=8)


def test_the_harmonic_number_is_the_mean_of_the_longest():
    assert lab.harmonic(1) == 1 and lab.harmonic(4) == pytest.approx(25 / 12)
    drawn = exponential_lengths(16 * 2000, 500, seed=3)
    longest = statistics.fmean(max(drawn[i : i + 16]) for i in range(0, len(drawn), 16))
    assert longest / 500 == pytest.approx(lab.harmonic(16), rel=0.03)
    with pytest.raises(ValueError, match="n must .*0"):
        lab.harmonic(0)


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_steps_counted_with_a_heap_are_those_of_the_scheduler(slots):
    lengths = lognormal_lengths(40, 6, 1.0, high=40, seed=slots)
    run = lab.in_steps(lab.of_lengths(lengths), "continuous", slots)
    assert lab.continuous_steps(lengths, slots) == len(run.steps)


def test_simulated_efficiency_follows_the_law():
    found = lab.simulated_efficiency([1, 4, 16])
    assert found["static"][1] == 1.0 and found["static"][16] == pytest.approx(1 / lab.harmonic(16), abs=0.03)
    assert found["continuous"][16] > 0.95
    assert png(lab.efficiency_figure(found)).startswith(b"\x89PNG")


def test_the_ladder_has_one_defect_less_on_each_line():
    rows = [line.split() for line in lab.ladder(lab.workload(24, 6, 24, 64), 8).splitlines()[1:]]
    assert [r[0] for r in rows] == list(lab.WAYS)
    assert [int(r[1]) for r in rows] == sorted((int(r[1]) for r in rows), reverse=True)
    assert int(rows[0][3]) == int(rows[3][3]) == 0 < int(rows[2][3]) < int(rows[1][3])


def test_a_latency_curve_is_read_up_to_its_first_excess():
    assert lab.sustained({1: 10.0, 2: 20.0, 4: 30.0}, 20) == 2
    assert lab.sustained({1: 10.0, 2: 40.0, 4: 15.0}, 20) == 1, "a rate above one that fails does not count"
    assert lab.sustained({1: 30.0}, 20) == 0
    curve = lab.latency_curve("continuous", 1, [5] * 20, [1, 50])
    assert 5 <= curve[1] < 6 and curve[1] < curve[50]


def test_neighbours_who_come_and_go_slow_a_request_down():
    runs = [lab.simulate(lab.neighbours(n), lambda s: 1 + s.tokens / 16, max_num_seqs=8) for n in (0, 3, 20)]
    tpot = [run.requests[0].tpot for run in runs]
    assert tpot == sorted(tpot) and tpot[0] < tpot[1] < tpot[2]


def test_timelines_are_drawn_whole_and_in_part():
    runs = {way: lab.in_steps(CHAT, way, 4) for way in ("static", "continuous")}
    whole, part = png(lab.timeline_figure(runs)), png(lab.timeline_figure(runs, upto=3))
    assert whole.startswith(b"\x89PNG") and whole != part
    stepper = lab.timeline_stepper(runs, stride=5)
    try:
        before = stepper.picture.value
        stepper.go(0)
        assert stepper.picture.value != before and "step 5. static: " in stepper.verdict.value
        stepper.go(99)
        assert "continuous: done" in stepper.verdict.value
    finally:
        stepper.close()


def test_a_run_of_the_panel_can_be_stopped(load):
    calls = []

    def tick(share):
        calls.append(share)
        if len(calls) == 4:
            raise Cancelled

    with pytest.raises(Cancelled):
        load.serve(2, None, tick)
    assert all(0 <= c < 1 for c in calls)
    run = load.serve(2, None)
    assert len(run.requests) == 6 and run.output_tokens == load.trace(None).output_tokens


def test_the_panel_follows_its_sliders_and_keeps_its_points(load):
    panel = lab.load_panel(load, slots=2)
    try:
        panel.wait(SECONDS)
        first = panel.picture.value
        assert bytes(first).startswith(b"\x89PNG") and "2 slots, all at once" in panel.verdict.value
        assert "tok/s" in panel.verdict.value and "p99" in panel.verdict.value
        panel["slots"].value = 4
        panel.wait(SECONDS)
        assert panel.picture.value != first and "4 slots, all at once" in panel.verdict.value
    finally:
        panel.close()


def test_a_verdict_while_it_is_measured_and_without_a_queue(load):
    assert "measuring" in lab.explain(2, "all at once", None)
    assert "nan" not in lab.explain(8, "all at once", load.serve(8, None))
    assert png(lab.load_figure({})).startswith(b"\x89PNG")
