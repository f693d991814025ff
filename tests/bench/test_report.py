"""Medians, ratios within rounds, bars, floors, and the report as JSON and as tables."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from rich.console import Console

from minillm.bench.engines import Engine
from minillm.bench.floors import bandwidth_at, floor_seconds, read_machine
from minillm.bench.measures import BARS, MEASURES, Bar
from minillm.bench.report import judge, make_report, paired_ratios
from minillm.bench.rounds import Results, Sample
from minillm.bench.tables import show
from minillm.model.presets import PRESETS

CONFIG = PRESETS["smollm2-135m"]
MACHINE = {
    "name": "fake", "bandwidth": 1e10, "flops": {"float32": 1e11, "bfloat16": 2e11}, "memory": 1e9, "source": "made up",
    "label": "fake", "threads": 1, "working_set": 10**8, "curve": [[10**6, 1e11], [10**8, 1e10]],
}  # fmt: skip
MINE = Engine("minillm", "minillm", "", frozenset({"decode"}))
FAST = Engine("transformers-bf16", "transformers", "", frozenset({"decode"}), weight_bytes=2)
SLOW = Engine("transformers-fp32", "transformers", "", frozenset({"decode"}), weight_bytes=4)
DECODE8 = MEASURES["decode8"]


def results(**series: list[float]) -> Results:
    """Values of rounds 0, 1, …; nan is a round that the engine did not finish."""
    samples = {
        name.replace("_", "-"): [Sample(r, v, {"seconds": 1.0}) for r, v in enumerate(values) if not math.isnan(v)]
        for name, values in series.items()
    }
    return Results(samples={"decode8": samples}, machine=MACHINE)


def test_ratios_are_taken_within_rounds_and_unfinished_rounds_are_left_out():
    assert paired_ratios({0: 2.0, 1: 9.0, 2: 4.0}, {0: 1.0, 2: 1.0, 3: 7.0}) == [2.0, 4.0]


def test_a_disturbance_that_hits_a_whole_round_leaves_the_ratio_alone():
    found = results(minillm=[20.0, 2.0, 20.0], transformers_bf16=[10.0, 1.0, 10.0])
    verdict = judge(Bar("decode8", "minillm", "transformers", 1.6), [MINE, FAST], [DECODE8], found)
    assert verdict["ratios"] == [2.0, 2.0, 2.0] and verdict["ratio"] == 2.0 and verdict["met"] is True


def test_the_peer_stands_with_its_own_best_variant():
    found = results(minillm=[20.0, 20.0], transformers_bf16=[8.0, 8.0], transformers_fp32=[16.0, 16.0])
    verdict = judge(Bar("decode8", "minillm", "transformers", 1.6), [MINE, FAST, SLOW], [DECODE8], found)
    assert verdict["against"] == "transformers-fp32" and verdict["ratio"] == 1.25 and verdict["met"] is False


def test_a_bar_without_measurements_is_neither_met_nor_missed():
    verdict = judge(Bar("decode8", "minillm", "vllm", 0.7), [MINE, FAST], [DECODE8], results(minillm=[20.0]))
    assert verdict["met"] is None and verdict["ratio"] is None


def test_a_bar_of_another_measure_is_left_out():
    assert judge(Bar("decode32", "minillm", "vllm", 0.7), [MINE], [DECODE8], results(minillm=[20.0])) is None


def test_overhead_is_judged_by_its_median_share():
    found = Results(samples={"overhead": {"minillm": [Sample(r, v, {}) for r, v in enumerate([0.05, 0.30, 0.09])]}})
    verdict = judge(Bar("overhead", "minillm", None, at_most=0.10), [MINE], [MEASURES["overhead"]], found)
    assert verdict["value"] == 0.09 and verdict["met"] is True


def test_every_bar_belongs_to_a_measure_and_states_one_limit():
    for bar in BARS:
        assert bar.measure in MEASURES
        assert (bar.at_most is None) == (bar.peer is not None)


def test_floor_of_a_peer_follows_from_its_bytes_per_weight():
    machine = read_machine({**MACHINE, "flops": {"float32": 1e15, "bfloat16": 1e15}})
    two, four = (floor_seconds(DECODE8, e, {"dtype": d}, {}, CONFIG, machine) for e, d in ((FAST, "bfloat16"), (SLOW, "float32")))
    assert four == pytest.approx(2 * two)
    assert two > 64 * CONFIG.matmul_params * 2 / 1e10


def test_floor_of_minillm_is_what_its_meter_counted_without_activations():
    work = {"steps": 2, "flops": {"float32": 10}, "weight_bytes": 10**9, "kv_read_bytes": 10**9, "kv_write_bytes": 0,
            "activation_bytes": 10**12, "launches": 5}  # fmt: skip
    seconds = floor_seconds(DECODE8, MINE, {}, {"work": work}, CONFIG, read_machine(MACHINE))
    assert seconds == pytest.approx(0.2)


def test_quantised_arithmetic_has_a_floor_of_bytes_only():
    quantised = dataclasses.replace(FAST, weight_bytes=None)
    facts = {"dtype": "as the file stores it", "weight_bytes": 98e6}
    machine = read_machine(MACHINE)
    assert 64 * 98e6 / 1e10 < floor_seconds(DECODE8, quantised, facts, {}, CONFIG, machine) < 64 * 150e6 / 1e10
    assert floor_seconds(MEASURES["prefill512"], quantised, facts, {}, CONFIG, machine) is None
    assert floor_seconds(MEASURES["mix32"], FAST, {"dtype": "bfloat16"}, {}, CONFIG, machine) is None


def test_bandwidth_lies_between_its_neighbours_on_the_curve():
    machine = read_machine(MACHINE)
    assert [bandwidth_at(machine, size) for size in (1, 10**6, 10**8, 10**12)] == [1e11, 1e11, 1e10, 1e10]
    assert bandwidth_at(machine, 10**7) == pytest.approx(5.5e10)


@pytest.fixture
def report():
    found = results(minillm=[20.0, 22.0], transformers_bf16=[10.0, 10.0])
    found.facts = {name: {"versions": {"torch": "2"}, "dtype": "bfloat16"} for name in ("minillm", "transformers-bf16")}
    found.missing = {"vllm": "no environment was named"}
    found.refused = {"decode8": {"transformers-fp32": "ValueError: no"}}
    found.busy = [0.04, 0.5]
    found.agreement, found.checked_tokens = {"transformers-bf16": [32, 20]}, 32
    found.profile = {"decode8": {"step_seconds": 0.1, "shares": {"matmuls": 0.7, "Python and dispatch": 0.3}}}
    overhead = {"overhead": 0.05, "outside": 0.1, "step_seconds": 0.1, "shares": {"model": 0.9, "rest": 0.1}}
    found.samples["overhead"] = {"minillm": [Sample(0, 0.05, overhead)]}
    settings = {"threads": 2, "rounds": 2, "quick": False}
    engines = [MINE, FAST, SLOW, Engine("vllm", "vllm", "", frozenset())]
    return make_report(found, engines, [DECODE8, MEASURES["overhead"]], CONFIG, settings)


def test_the_report_holds_raw_samples_medians_machine_versions_and_bars(report):
    read = json.loads(json.dumps(report))
    assert read["machine"]["label"] == "fake" and read["settings"]["threads"] == 2 and read["date"]
    assert read["engines"]["minillm"]["versions"] == {"torch": "2"}
    series = read["measures"]["decode8"]["series"]
    assert [s["value"] for s in series["minillm"]["samples"]] == [20.0, 22.0] and series["minillm"]["median"] == 21.0
    assert series["transformers-bf16"]["of_floor"] > 0
    judged = {(b["measure"], b["peer"]): b["ratio"] for b in read["bars"] if b["met"] is not None}
    assert judged == {("decode8", "transformers"): pytest.approx(2.1), ("overhead", None): None}


def test_an_engine_that_is_missing_is_not_available_for_a_reason(report):
    assert report["engines"]["vllm"]["status"] == "not available: no environment was named"
    assert report["engines"]["minillm"]["status"] == "available"


def test_the_tables_show_rates_bars_refusals_and_where_the_time_goes(report):
    console = Console(record=True, width=200)
    show(report, console)
    text = console.export_text()
    for piece in ("21.0 tok/s", "2.10x", "1.6x", "yes", "ValueError: no", "not available: no environment was named",
                  "32, 20 of 32", "Python and dispatch", "70.0%", "5.0%", "at most 10%", "50% busy"):  # fmt: skip
        assert piece in text, piece
