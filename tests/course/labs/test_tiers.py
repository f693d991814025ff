"""Lesson 1.3's bench, panel and pictures without a front end, on a tiny random model."""

from __future__ import annotations

import math

import pytest

from minillm.course.labs import tiers as lab
from minillm.course.plots import png
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.timing import Timing
from minillm.perf.transfer import Link, PrefillRate

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=512
)
PRICES = lab.Prices(PrefillRate(CONFIG, 1e6, 0.01), {"host": Link(1e9), "disk": Link(1e8), "slow": Link(1e6, 5.0)}, 256)
SECONDS = 60


@pytest.fixture(scope="module")
def bench() -> lab.TierBench:
    return lab.TierBench(Transformer.random(CONFIG), most=64)


def test_every_way_does_what_it_says(bench):
    for way in lab.WAYS:
        meter = bench.engines["host" if way == "recompute" else way].meter
        meter.reset()
        assert bench.run(way, 32) > 0
        assert (meter.loaded_tokens, meter.tokens_computed) == ((0, 33) if way == "recompute" else (32, 1))
        assert meter.tier_read_bytes == (0 if way == "recompute" else 32 * bench.prices.bytes_per_token)


@pytest.mark.parametrize("tokens", [0, 8, 24, 80, -16])
def test_lengths_that_are_no_whole_blocks_are_refused(bench, tokens):
    with pytest.raises(ValueError, match="1 to 4 blocks of 16 tokens"):
        bench.run("host", tokens)


def test_the_slow_link_breaks_even_where_it_was_asked_to():
    for tokens in (64, 256):
        link = lab.slow_link(PRICES.prefill.seconds, 256, tokens)
        prices = lab.Prices(PRICES.prefill, {"slow": link}, 256)
        assert tokens <= prices.crossover("slow") <= tokens + 1


def test_a_slow_tier_pays_its_latency_once_a_load(monkeypatch):
    import torch

    slept: list[float] = []
    monkeypatch.setattr(lab.time, "sleep", slept.append)
    tier = lab.SlowTier(1000, Link(100.0, 7.0))
    tier.write([(b"a", torch.zeros(50, dtype=torch.uint8)), (b"b", torch.zeros(100, dtype=torch.uint8))], frozenset())
    assert tier.read(b"c") is None and tier.read(b"a") is not None and tier.read(b"b") is not None
    assert slept == [7.5, 1.0]


def test_the_crossing_is_interpolated_between_lengths():
    recomputed = {64: 1.0, 256: 4.0}
    assert lab.crossing(recomputed, {64: 2.0, 256: 2.0}) == pytest.approx(128)
    assert lab.crossing(recomputed, {64: 0.5, 256: 2.0}) == 0.0
    assert lab.crossing(recomputed, {64: 2.0, 256: 5.0}) == math.inf


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
    seen = {way: {32: Timing((0.5, 0.6))} for way in lab.WAYS}
    for made in (
        lab.tier_picture(), lab.time_figure(PRICES, "slow", seen, here=64), lab.time_figure(bench.prices, "host", {}),
    ):  # fmt: skip
        assert png(made).startswith(b"\x89PNG")
