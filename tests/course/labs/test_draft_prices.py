"""What checking drafts costs and the speed-up that follows, without a front end, on a tiny random model."""

from __future__ import annotations

import pytest

from minillm import LLM
from minillm.course.labs import draft_prices as prices
from minillm.course.plots import png
from minillm.model.transformer import Transformer
from minillm.spec.length import tokens_per_pass

from ...strategies import tiny_config

SECONDS = 60


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(Transformer.random(tiny_config(max_position=256)), num_blocks=120, block_size=4, dtype="float64")


@pytest.fixture(scope="module")
def bench(llm: LLM) -> prices.Bench:
    return prices.Bench(llm, context=9)


def test_speed_up_by_hand():
    assert prices.speedup(0.5, 4, 0.1, 1.0) == pytest.approx(1.38, abs=0.01)
    assert prices.speedup(0.2, 4, 0.1, 1.0) == pytest.approx(0.89, abs=0.01)
    assert prices.speedup(0.7, 4, 0.0, 1.0) == tokens_per_pass(0.7, 4) == pytest.approx(2.773, abs=1e-3)
    assert prices.speedup(0.7, 4, 0.0, 5.0) < 1


def test_v_between_points_starts_at_one_and_goes_on_behind_the_last():
    assert [prices.v_between({4: 1.4, 8: 2.0}, g) for g in (0, 2, 4, 6, 8, 16)] == pytest.approx([1, 1.2, 1.4, 1.7, 2.0, 3.0])
    assert prices.v_between({}, 5) == 1.0


def test_every_row_of_a_checking_step_has_blocks_of_its_own_and_a_small_pool_is_refused(bench):
    step = bench.batch(4, 5)
    assert step.q_lens == (5,) * 4 and step.kv_lens == (14,) * 4 and len(step.logit_indices) == 20
    assert len(set(step.slots.tolist())) == 20 and min(step.slots.tolist()) >= bench.size
    with pytest.raises(ValueError, match="60 rows need .* blocks, the pool has 120"):
        bench.batch(60, 5)


def test_costs_are_measured_once_and_positive(bench):
    first = bench.v(2, 3, rounds=1)
    assert first > 0 and bench.v(2, 3) == first
    costs = bench.costs([0], [5, 6, 5, 6], rounds=1)
    assert list(costs) == ["lookup", "layers"] and min(costs.values()) > 0


def test_the_panel_follows_its_sliders(bench):
    panel = prices.speedup_panel(bench, alpha=0.52, c=0.0)
    try:
        panel.wait(SECONDS)
        first = panel.picture.value
        assert bytes(first).startswith(b"\x89PNG") and "E = " in panel.verdict.value and "S = " in panel.verdict.value
        panel["alpha"].value = 0.0
        panel["c"].value = 1.0
        panel.wait(SECONDS)
        assert panel.picture.value != first and "E = 1.00" in panel.verdict.value and "slower" in panel.verdict.value
    finally:
        panel.close()


def test_the_prediction_stands_before_the_measurement():
    assert "measuring v" in prices.explain(0.5, 4, 0.1, None) and "S = " not in prices.explain(0.5, 4, 0.1, None)
    assert "faster" in prices.explain(0.9, 4, 0.0, 1.1) and "slower" in prices.explain(0.1, 4, 0.1, 1.1)


def test_figures_are_drawn():
    figures = [prices.speedup_figure(0.5, 0.1, v, 4, 1) for v in ({}, {4: 1.2})]
    for made in (prices.acceptance_figure(), *figures):
        assert png(made).startswith(b"\x89PNG")
