"""The tiers study: what it measures, on a tiny model; and what its bars make of the numbers."""

from __future__ import annotations

import math

import pytest

from minillm.bench.studies import tiers

from ..strategies import tiny_llm


def test_every_bar_is_fed():
    state = tiers.make_state(tiny_llm(), (8, 16))
    for turn in range(2):
        found = tiers.measure(state, turn)
        assert set(tiers.measured_lengths(found)) == {8, 16}
        assert all(isinstance(bar.value(found), float) for bar in tiers.BARS)
    assert {f"{way}_{n}_s" for way in tiers.WAYS for n in (8, 16)} <= set(found)


def numbers(**predicted):
    found = {f"recompute_{n}_s": n / 100 for n in (64, 128, 256, 512)}
    found |= {f"host_{n}_s": 0.5 for n in (64, 128, 256, 512)} | {f"slow_{n}_s": 2.0 for n in (64, 128, 256, 512)}
    return found | {f"{way}_predicted": length for way, length in predicted.items()}


def test_the_worst_gain_is_taken_from_one_and_a_half_times_the_predicted_length_on():
    assert tiers.worst_gain(numbers(host=40), "host") == pytest.approx(0.64 / 0.5)
    assert tiers.worst_gain(numbers(host=80), "host") == pytest.approx(1.28 / 0.5)
    assert tiers.worst_gain(numbers(host=10**9), "host") == 0.0, "a rule that never loads meets no bar"
    assert tiers.gain_at_longest(numbers(host=40), "host") == pytest.approx(5.12 / 0.5)


def test_the_crossover_is_compared_with_the_predicted_one():
    assert tiers.crossover_ratio(numbers(slow=200), "slow") == pytest.approx(1.0, rel=0.01)
    always, never = numbers(slow=100), numbers(slow=100)
    always.update({f"slow_{n}_s": 0.1 for n in (64, 128, 256, 512)})
    never.update({f"slow_{n}_s": 9.0 for n in (64, 128, 256, 512)})
    assert tiers.crossover_ratio(always, "slow") == 0 and tiers.crossover_ratio(never, "slow") == math.inf
    bar = next(b for b in tiers.BARS if b.at_most)
    assert (bar.at_least, bar.at_most) == (pytest.approx(2 / 3), 1.5)
