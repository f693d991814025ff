"""Load or recompute by formula: the cheapest split is found, and the break-even points are where both sides cost the same."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.model.presets import preset
from minillm.perf.hardware import card
from minillm.perf.roofline import predict, prefill_work
from minillm.perf.transfer import (
    Link,
    LoadOffer,
    PrefillRate,
    break_even_bandwidth,
    crossover_tokens,
    load_or_recompute,
)

CONFIG = preset("smollm2-135m")
RATE = PrefillRate(CONFIG, 100e9, overhead=0.01)
links = st.builds(Link, st.floats(1e3, 1e11), st.floats(0, 2))


def offer(tiers, past=0, rest=1, host=Link(5e9), disk=Link(1e9, 0.001), block_bytes=700_000) -> LoadOffer:
    return LoadOffer(past, rest, tuple(tiers), 16, block_bytes, {"host": host, "disk": disk}, RATE.seconds)


def total(o: LoadOffer, n: int) -> float:
    return o.load_seconds(n) + o.prefill_seconds(n)


@given(st.lists(st.sampled_from(["host", "disk"]), max_size=12), links, links, st.integers(0, 600), st.integers(1, 600))
def test_no_other_number_of_blocks_is_cheaper_and_ties_load_less(tiers, host, disk, past, rest):
    o = offer(tiers, past, rest, host=host, disk=disk)
    chosen = load_or_recompute(o)
    assert 0 <= chosen <= len(tiers)
    assert all(total(o, chosen) < total(o, n) for n in range(chosen))
    assert all(total(o, chosen) <= total(o, n) for n in range(len(tiers) + 1))


def test_a_fast_link_loads_everything_and_a_slow_one_nothing():
    assert load_or_recompute(offer(["host"] * 8)) == 8
    assert load_or_recompute(offer(["disk"] * 8, disk=Link(1e6))) == 0
    assert load_or_recompute(offer([])) == 0


def test_a_tie_is_computed():
    """A block takes 4 seconds either way; there is nothing to go wrong with what is not loaded."""
    tie = LoadOffer(0, 1, ("disk",) * 3, 4, 1024, {"disk": Link(256.0)}, lambda past, new: float(new))
    assert load_or_recompute(tie) == 0


def test_a_slow_start_is_paid_once_so_that_only_a_long_prefix_is_worth_it():
    slow = Link(1e9, latency=0.5)
    assert [load_or_recompute(offer(["disk"] * n, disk=slow)) for n in (1, 4, 32)] == [0, 0, 32]


def test_a_prefix_is_loaded_up_to_where_the_link_becomes_too_slow():
    assert load_or_recompute(offer(["host"] * 3 + ["disk"] * 5, disk=Link(1e6))) == 3


def test_blocks_behind_slow_ones_are_worth_their_detour_if_they_are_many():
    assert load_or_recompute(offer(["disk"] + ["host"] * 30, disk=Link(1e6))) == 31


def test_each_tier_costs_its_latency_once():
    o = offer(["host", "disk", "host"], host=Link(1e9, 0.1), disk=Link(1e8, 0.2), block_bytes=1_000_000)
    assert o.load_seconds(0) == 0
    assert o.load_seconds(1) == pytest.approx(0.101)
    assert o.load_seconds(3) == pytest.approx(0.1 + 0.002 + 0.2 + 0.01)


def test_prefill_time_is_counted_work_at_a_rate_plus_what_any_pass_costs():
    assert RATE.seconds(7, 0) == 0
    assert RATE.seconds(64, 32) == pytest.approx(0.01 + prefill_work(CONFIG, 32, past=64).total_flops / 100e9)
    assert RATE.seconds(512, 32) > RATE.seconds(0, 32), "later tokens attend to more"


@pytest.mark.parametrize("bandwidth, latency", [(0, 0), (-1, 0), (math.nan, 0), (1e9, -1), (1e9, math.inf)])
def test_a_link_that_cannot_be_is_refused(bandwidth, latency):
    with pytest.raises(ValueError, match="bandwidth|latency"):
        Link(bandwidth, latency)


def test_loads_move_a_link_towards_what_they_showed():
    link = Link(1e9, 0.01)
    for _ in range(40):
        link = link.observed(2e8, 0.01 + 0.4)
    assert link.bandwidth == pytest.approx(5e8, rel=1e-3) and link.latency == 0.01
    assert Link(1e9).observed(0, 1.0) == Link(1e9) and Link(1e9).observed(10, 0.0) == Link(1e9)
    assert 0 < Link(1e9, 0.5).observed(1e6, 0.001).bandwidth < math.inf, "faster than its own latency"


def test_at_the_break_even_bandwidth_loading_takes_as_long_as_computing():
    seconds = RATE.seconds(0, 512)
    speed = break_even_bandwidth(512, 46_080, seconds, latency=0.05)
    assert Link(speed, 0.05).seconds(512 * 46_080) == pytest.approx(seconds)
    assert break_even_bandwidth(512, 46_080, 0.04, latency=0.05) == math.inf


@given(st.floats(1e6, 1e9), st.floats(0, 0.5), st.integers(1, 64))
def test_the_crossover_is_the_first_length_that_pays(bandwidth, latency, rest):
    link, per_token = Link(bandwidth, latency), 46_080
    n = crossover_tokens(link, per_token, RATE.seconds, rest=rest, limit=4096)

    def gain(tokens):
        return RATE.seconds(0, tokens + rest) - RATE.seconds(tokens, rest) - link.seconds(tokens * per_token)

    if n is None:
        assert gain(4096) <= 0
    else:
        assert gain(n) > 0 and (n == 1 or gain(n - 1) <= 0)


def test_qwen3_32b_on_an_h100_breaks_even_below_two_gigabytes_per_second():
    """4096 tokens are 1 GiB of KV: 21.5 ms over a link of 50 GB/s, against 0.28 s of prefill at the card's peak."""
    config, h100 = preset("qwen3-32b"), card("h100")
    kv = 4096 * config.kv_bytes_per_token()
    at_peak = predict(prefill_work(config, 4096), h100).seconds
    assert kv == 2**30
    assert Link(50e9).seconds(kv) == pytest.approx(21.5e-3, rel=0.01)
    assert at_peak == pytest.approx(0.276, rel=0.01)
    assert break_even_bandwidth(4096, config.kv_bytes_per_token(), 2 * at_peak) == pytest.approx(1.94e9, rel=0.01)
