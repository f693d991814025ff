"""The sparse study: what it measures, on a small bench; and what its bars make of the numbers."""

from __future__ import annotations

import dataclasses

import pytest

from minillm.bench.studies import sparse
from minillm.course.labs.sparse_attention import TINY, Bench


def numbers(fixed: float) -> dict[str, float]:
    """Dense time as the context, sparse time fixed and a hundredth of the context."""
    found = {}
    for phase in sparse.PHASES:
        for n in sparse.CONTEXTS:
            found |= {f"{phase}_dense_{n}": n, f"{phase}_sparse_{n}": fixed + n / 100, f"{phase}_shared_{n}": fixed}
    return found


def test_every_bar_is_fed(monkeypatch):
    monkeypatch.setattr(sparse, "CONTEXTS", (600, 1024))
    monkeypatch.setattr(sparse, "PHASES", {"decode": 1, "prefill": 20})
    bench = Bench(dataclasses.replace(TINY, max_position=1024))
    found = sparse.measure(bench, 1)
    assert {f"{p}_{w}_1024" for p in ("decode", "prefill") for w in sparse.WAYS} <= set(found)
    assert all(seconds > 0 for seconds in found.values())


def test_lines_that_fit_predict_the_crossover_that_is_measured():
    found = numbers(3000)
    for phase in sparse.PHASES:
        assert sparse.predicted(found, phase) == pytest.approx(3000 / 0.99)
        assert sparse.crossover_ratio(found, phase) == pytest.approx(1, rel=1e-6)
    assert all(isinstance(bar.value(found), float) for bar in sparse.BARS)


def test_a_crossover_that_comes_too_late_misses_the_bar():
    found = numbers(3000)
    for n in sparse.CONTEXTS[:-1]:
        if n > 4096:
            found[f"decode_sparse_{n}"] = 2 * n
    bar = next(b for b in sparse.BARS if b.name.startswith("crossover, measured") and "decode" in b.name)
    assert bar.judge([found])["met"] is False


def test_the_prediction_is_never_below_the_length_at_which_something_is_left_out():
    assert sparse.predicted(numbers(0.0), "decode") == sparse.LEAST == 9 * 64 + 63
