"""Lesson 1.3's panel, pictures and table without a front end, on a tiny random model."""

from __future__ import annotations

import pytest

from minillm.bench.tiers import WAYS, Prices, TierBench
from minillm.course.labs import tiers as lab
from minillm.course.plots import png
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.timing import Timing
from minillm.perf.transfer import Link, PrefillRate

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=512
)
PRICES = Prices(PrefillRate(CONFIG, 1e6, 0.01), {"host": Link(1e9), "disk": Link(1e8), "slow": Link(1e6, 5.0)}, 256)
SECONDS = 60


@pytest.fixture(scope="module")
def bench() -> TierBench:
    return TierBench(Transformer.random(CONFIG), most=64)


def test_the_panel_follows_its_sliders(bench):
    panel = lab.tier_panel(bench, tokens=32)
    try:
        panel.wait(SECONDS)
        first = panel.picture.value
        assert bytes(first).startswith(b"\x89PNG") and "32 tokens" in panel.verdict.value and "measured" in panel.verdict.value
        panel["tokens"].value = 64
        panel.wait(SECONDS)
        assert panel.picture.value != first and "64 tokens" in panel.verdict.value
        panel["tier"].value = "slow"
        panel.wait(SECONDS)
        assert "over a slow link" in panel.verdict.value and max(panel["tokens"].options) == 64
    finally:
        panel.close()


def test_the_prediction_stands_before_the_measurement():
    assert "measuring" in lab.explain(PRICES, 64, "host", None) and "<b>load</b>" in lab.explain(PRICES, 64, "host", None)
    found = {"recompute": Timing((1.0,)), "slow": Timing((4.0,))}
    said = lab.explain(PRICES, 16, "slow", found)
    assert "<b>compute</b>" in said and "computing was 4 times as fast" in said and "measuring" not in said


def test_the_table_of_decisions_says_load_where_the_rule_loads():
    table = lab.decisions({"fast": Link(1e9), "slow start": PRICES.links["slow"]}, (16, 256), PRICES.prefill.seconds, 256)
    assert [line.split()[-2:] for line in table.splitlines()[1:]] == [["load", "load"], ["compute", "load"]]


def test_figures_are_drawn(bench):
    seen = {way: {32: Timing((0.5, 0.6))} for way in WAYS}
    for made in (
        lab.tier_picture(), lab.time_figure(PRICES, "slow", seen, here=64), lab.time_figure(bench.prices, "host", {}),
    ):  # fmt: skip
        assert png(made).startswith(b"\x89PNG")
