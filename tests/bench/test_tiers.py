"""A prefix is computed or loaded as was asked, on a tiny random model; a slow link breaks even where it should."""

from __future__ import annotations

import math

import pytest

from minillm.bench import tiers
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.transfer import Link, PrefillRate

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=512
)
PREFILL = PrefillRate(CONFIG, 1e6, 0.01)


@pytest.fixture(scope="module")
def bench() -> tiers.TierBench:
    return tiers.TierBench(Transformer.random(CONFIG), most=64)


def test_every_way_does_what_it_says(bench):
    for way in tiers.WAYS:
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
        link = tiers.slow_link(PREFILL.seconds, 256, tokens)
        prices = tiers.Prices(PREFILL, {"slow": link}, 256)
        assert tokens <= prices.crossover("slow") <= tokens + 1


def test_a_slow_tier_pays_its_latency_once_a_load(monkeypatch):
    import torch

    slept: list[float] = []
    monkeypatch.setattr(tiers.time, "sleep", slept.append)
    tier = tiers.SlowTier(1000, Link(100.0, 7.0))
    tier.write([(b"a", torch.zeros(50, dtype=torch.uint8)), (b"b", torch.zeros(100, dtype=torch.uint8))], frozenset())
    assert tier.read(b"c") is None and tier.read(b"a") is not None and tier.read(b"b") is not None
    assert slept == [7.5, 1.0]


def test_the_crossing_is_interpolated_between_lengths():
    recomputed = {64: 1.0, 256: 4.0}
    assert tiers.crossing(recomputed, {64: 2.0, 256: 2.0}) == pytest.approx(128)
    assert tiers.crossing(recomputed, {64: 0.5, 256: 2.0}) == 0.0
    assert tiers.crossing(recomputed, {64: 2.0, 256: 5.0}) == math.inf
