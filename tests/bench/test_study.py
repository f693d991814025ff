"""A study's rounds become medians and verdicts; a wrong name is refused before anything runs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from minillm.bench import study
from minillm.bench.study import Bar


def toy(cold=(8.0, 9.0, 40.0), **limits):
    turns = []

    def measure(state, turn):
        turns.append((state, turn))
        return {"cold_s": cold[turn], "hit_s": 2.0}

    bar = Bar("cold / hit", lambda r: r["cold_s"] / r["hit_s"], **limits)
    return SimpleNamespace(TITLE="toy", ROUNDS=3, BARS=(bar,), prepare=lambda: "model", measure=measure, turns=turns)


def run(toy, rounds=3):
    return study.run(toy, rounds, say=lambda line: None)


def test_a_bar_is_judged_by_the_median_of_its_rounds():
    t = toy(at_least=4.5)
    (bar,) = run(t)["bars"]
    assert (bar["median"], bar["rounds"], bar["met"]) == (4.5, [4.0, 4.5, 20.0], True)
    assert t.turns == [("model", 0), ("model", 1), ("model", 2)]


LIMITS = [({"at_least": 4.6}, False), ({"at_most": 4.5}, True), ({"at_most": 4.4}, False), ({}, None)]


@pytest.mark.parametrize(("limits", "met"), [*LIMITS, ({"at_least": 4, "at_most": 5}, True)])
def test_a_bar_has_a_floor_or_a_ceiling_or_is_only_reported(limits, met):
    assert run(toy(**limits))["bars"][0]["met"] is met


def test_the_table_shows_median_range_and_verdict():
    (line,) = study.table(run(toy(at_least=5)))
    assert line.split() == ["cold", "/", "hit", "4.5", "(4", "to", "20)", "at", "least", "5", "NOT", "MET"]


def test_every_study_there_is_can_be_loaded_and_says_what_it_is():
    for name in study.names():
        found = study.load(name)
        assert found.TITLE and found.__doc__ and found.ROUNDS >= 3 and found.BARS
        assert callable(found.prepare) and callable(found.measure)


def test_a_study_that_is_not_there_is_refused_before_another_runs(monkeypatch):
    monkeypatch.setattr(study, "names", lambda: ["toy"])
    with pytest.raises(ValueError, match="there is no study 'tow'; there are toy"):
        study.run_studies(["toy", "tow"])


def test_the_report_holds_every_round_and_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(study, "names", lambda: ["toy"])
    monkeypatch.setattr(study, "load", lambda name: toy(at_most=1))
    said = []
    assert study.run_studies(["all"], 2, tmp_path / "found.json", said.append) is False
    report = json.loads((tmp_path / "found.json").read_text())
    assert [r["cold_s"] for r in report["studies"]["toy"]["rounds"]] == [8.0, 9.0]
    assert report["machine"]["bandwidth"] > 0 and len(report["studies"]["toy"]["busy"]) == 2 and "NOT MET" in said[-1]
    with pytest.raises(ValueError, match="rounds"):
        study.run_studies(["toy"], 0)
