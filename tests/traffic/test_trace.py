"""Traces: equal seeds give equal traces, and the numbers have the distribution that was asked for."""

from __future__ import annotations

import statistics

import pytest

from minillm.traffic.trace import (
    Arrival,
    Trace,
    at_once,
    bursty,
    exponential_lengths,
    lognormal_lengths,
    make_trace,
    poisson,
    public_workload,
    uniform_lengths,
)


def test_equal_seeds_give_equal_traces_and_others_differ():
    def made(seed):
        times, lengths = poisson(20, 3.0, seed), lognormal_lengths(20, 10, seed=seed)
        return make_trace("a", times, uniform_lengths(20, 2, 9, seed), lengths, 32, seed)

    assert made(1) == made(1) != made(2)
    assert public_workload(32, 0.1, seed=3) == public_workload(32, 0.1, seed=3) != public_workload(32, 0.1, seed=4)


def test_these_numbers_are_the_same_on_every_machine():
    assert [round(t, 6) for t in poisson(3, 2.0, seed=7)] == [0.664651, 0.721748, 1.125303]
    assert lognormal_lengths(6, 20, seed=7) == [13, 27, 10, 177, 17, 52] and uniform_lengths(6, 1, 9, seed=7) == [
        5,
        8,
        4,
        8,
        4,
        1,
    ]


def test_a_shorter_trace_is_the_beginning_of_a_longer_one():
    assert poisson(5, 2.0, seed=1) == poisson(9, 2.0, seed=1)[:5]
    assert uniform_lengths(5, 1, 99, seed=1) == uniform_lengths(9, 1, 99, seed=1)[:5]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(burstiness):
    times = [0.0, *bursty(20_000, 4.0, burstiness, seed=1)]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times == sorted(times) and statistics.fmean(gaps) == pytest.approx(1 / 4, rel=0.1)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness, rel=0.1)


def test_lengths_have_the_distribution_that_was_asked_for():
    lengths = lognormal_lengths(20_000, 100, 1.0, seed=1)
    assert statistics.median(lengths) == pytest.approx(100, rel=0.05)
    assert sum(x > 272 for x in lengths) / 20_000 == pytest.approx(0.159, abs=0.01)
    assert min(lognormal_lengths(999, 4, 2.0, low=3, high=50)) == 3 and max(lognormal_lengths(999, 4, 2.0, low=3, high=50)) == 50
    assert set(uniform_lengths(999, 2, 5)) == {2, 3, 4, 5} and uniform_lengths(3, 4, 4) == [4, 4, 4]
    drawn = exponential_lengths(20_000, 50, seed=1)
    assert min(drawn) >= 1 and statistics.fmean(drawn) == pytest.approx(50, rel=0.05)


def test_the_public_workload_is_256_requests_of_100_to_1024_tokens_at_once():
    trace = public_workload(32)
    lengths = [x for a in trace.arrivals for x in (len(a.prompt), a.output_len)]
    assert len(trace) == 256 and {a.time for a in trace.arrivals} == {0.0}
    assert 100 <= min(lengths) < 110 and 1010 < max(lengths) <= 1024
    small = public_workload(32, scale=0.1, requests=5)
    assert len(small) == 5 and all(10 <= len(a.prompt) <= 102 for a in small.arrivals)
    assert all(2 <= t < 32 for a in small.arrivals for t in a.prompt)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: at_once(0), "n must .*0"),
        (lambda: poisson(3, 0), "rate .*0"),
        (lambda: bursty(3, 1.0, -1), "burstiness .*-1"),
        (lambda: poisson(3, 1.0, seed=-1), "seed .*-1"),
        (lambda: uniform_lengths(3, 5, 4), r"high must be at least low \(5\), got 4"),
        (lambda: uniform_lengths(3, 0, 4), "low .*0"),
        (lambda: lognormal_lengths(3, 10, sigma=0), "sigma .*0"),
        (lambda: make_trace("a", [0.0], [1, 2], [3], 32), "1 times, 2 prompt and 1 output"),
        (lambda: make_trace("a", [0.0], [0], [3], 32), "prompt length .*0"),
        (lambda: make_trace("a", [0.0], [1], [0], 32), "output_len .*0"),
        (lambda: make_trace("a", [1.0, 0.0], [1, 1], [1, 1], 32), "in order"),
        (lambda: make_trace("a", [0.0], [1], [1], 2), "vocab_size .*2"),
        (lambda: Trace("a", ()), "at least one request"),
        (lambda: Trace("a", (Arrival(0.0, (), 1),)), "at least one token"),
        (lambda: Trace("a", (Arrival(float("nan"), (1,), 1),)), "finite"),
        (lambda: Trace("a", tuple(Arrival(t, (1,), 1) for t in (0.0, float("nan"), 2.0))), "finite.*request 1 has nan"),
        (lambda: Trace("a", (Arrival("0", (1,), 1),)), "request 0 has '0'"),
        (lambda: Trace("a", (Arrival(0.0, (1, -1), 1),)), "token ids.* request 0 has -1"),
        (lambda: Trace("a", (Arrival(0.0, "ab", 1),)), "token ids.* request 0 has 'a'"),
        (lambda: Trace("a", (Arrival(0.0, (1.5,), 1),)), "token ids.* request 0 has 1.5"),
        (lambda: bursty(3, 1.0, 1e200), "burstiness .*1e.200"),
        (lambda: bursty(3, 1.0, 1e-200), "burstiness .*1e-200"),
        (lambda: exponential_lengths(3, 1e19), "mean .*1e.19"),
        (lambda: uniform_lengths(3, 1, 10.5), "high .*10.5"),
        (lambda: lognormal_lengths(3, 5, high=float("nan")), "high .*nan"),
        (lambda: make_trace("a", [0.0], [1], [1], "32"), "vocab_size .*'32'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
