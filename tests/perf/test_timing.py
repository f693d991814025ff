"""Timing: what is run, how often, and how the samples are summed up."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.perf import timing
from minillm.perf.timing import Timing, compare, measure


class FakeClock:
    """A stopwatch that runs the call and reads its seconds from a list."""

    def __init__(self, seconds):
        self.seconds = iter(seconds)

    def __call__(self, fn):
        fn()
        return next(self.seconds)


def test_warm_up_runs_are_run_and_not_counted(monkeypatch):
    monkeypatch.setattr(timing, "_wall_clock", FakeClock([100, 100, 1, 2, 3]))
    calls = []
    timed = measure(lambda: calls.append(1), warmup=2, repeats=3)
    assert timed.samples == (1, 2, 3)
    assert len(calls) == 5


def test_compared_functions_take_turns_and_each_goes_first(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "_wall_clock", FakeClock([1.0] * 100))
    compare({name: lambda name=name: order.append(name) for name in "abc"}, rounds=3, warmup=1)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"


def test_a_machine_that_changes_its_pace_between_rounds_leaves_the_ratio_alone(monkeypatch):
    # Rounds run a-b, b-a, a-b at paces of 1, 50 and 7; b takes twice as long as a, but for one hiccup in the last round.
    # The quotient of the medians would be 21 / 7.
    monkeypatch.setattr(timing, "_wall_clock", FakeClock([1, 2, 100, 50, 7, 21]))
    result = compare({"a": lambda: None, "b": lambda: None}, rounds=3, warmup=0)
    assert result.ratio("b") == 2
    assert result.speedup("b") == 0.5
    assert result.speedup("a", over="b") == 2
    assert "b  21.0 s" in str(result) and "0.50x" in str(result)


def test_text_gives_median_spread_and_runs():
    timed = Timing(tuple(0.0123 + 0.0005 * offset for offset in (-2, -1, 0, 1, 2)))
    assert str(timed) == "12.3 ms (±4 %, 5 runs)"
    assert str(Timing((2.0,))) == "2.00 s (±0 %, 1 run)"


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
def test_percentiles_are_ordered_and_agree_with_the_library(samples):
    timed = Timing(tuple(samples))
    marks = [timed.best, timed.p10, timed.percentile(25), timed.median, timed.percentile(75), timed.p90, max(samples)]
    assert all(low <= high * (1 + 1e-12) for low, high in zip(marks, marks[1:], strict=False))
    if len(samples) > 1:
        first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
        assert timed.iqr == pytest.approx(third - first, abs=1e-9)


def test_the_order_of_samples_is_kept_and_does_not_matter():
    assert Timing((3.0, 1.0, 2.0)).samples == (3.0, 1.0, 2.0)
    assert Timing((3.0, 1.0, 2.0)).median == 2.0


def test_real_time_passes():
    timed = measure(lambda: sum(range(20_000)), warmup=1, repeats=3)
    assert timed.repeats == 3 and 0 < timed.best <= timed.median < 1


def test_an_error_in_the_function_passes_through():
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats must be a whole number of at least 1, got 0"),
        ({"repeats": 2.5}, "repeats must be .* got 2.5"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0, got -1"),
        ({"device": "toaster"}, "device must be 'cpu' or 'cuda', got 'toaster'"),
        ({"device": "meta"}, "device must be 'cpu' or 'cuda', got 'meta'"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, message):
    with pytest.raises(ValueError, match=message):
        measure(lambda: pytest.fail("ran"), **options)


def test_bad_functions_and_names_are_refused():
    with pytest.raises(ValueError, match="fn must be a function"):
        measure(3)
    with pytest.raises(ValueError, match="at least one function"):
        compare({})
    with pytest.raises(ValueError, match="'b' must be a function|b must be a function"):
        compare({"a": lambda: pytest.fail("ran"), "b": None})
    with pytest.raises(ValueError, match="no timing named 'c'; there are a"):
        compare({"a": lambda: None}, rounds=1).ratio("c")
    with pytest.raises(ValueError, match="0..100, got 101"):
        Timing((1.0,)).percentile(101)
    with pytest.raises(ValueError, match="at least one sample"):
        Timing(())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_asking_for_a_gpu_that_is_not_there_says_so():
    with pytest.raises(ValueError, match="torch sees no GPU"):
        measure(lambda: None, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_queued_work_on_a_gpu_is_waited_for():
    x = torch.randn(8192, 8192, device="cuda")
    timed = measure(lambda: x @ x, warmup=2, repeats=5, device="cuda")
    assert 2 * 8192**3 / timed.median < 2e15  # launches alone would look a thousand times faster
