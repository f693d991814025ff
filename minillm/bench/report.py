"""From samples to a report: medians, spreads, floors, ratios and bars. The report is plain data; `tables` draws it."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from minillm.bench.engines import Engine
from minillm.bench.floors import floor_seconds, read_machine
from minillm.bench.measures import BARS, Bar, Measure
from minillm.bench.rounds import Results, Sample
from minillm.model.config import ModelConfig
from minillm.perf.timing import Timing

FORMAT = 1


def make_report(
    results: Results, engines: Sequence[Engine], measures: Sequence[Measure], config: ModelConfig, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that was measured, and how, as JSON can hold it. settings: what the run was asked for."""
    return {
        "what": "minillm bench", "format": FORMAT, "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": config.name, "settings": dict(settings), "machine": results.machine,
        "busy_before_rounds": results.busy,
        "engines": {e.name: _engine(e, results) for e in engines},
        "measures": {m.name: _measure(m, engines, results, config) for m in measures},
        "bars": [judged for bar in BARS if (judged := judge(bar, engines, measures, results))],
        "profile": results.profile,
        "agreement": {
            "new_tokens": results.checked_tokens, "leading_equal": results.agreement, "refused": results.refused.get("check", {}),
        },
    }  # fmt: skip


def _engine(engine: Engine, results: Results) -> dict[str, Any]:
    reason = results.missing.get(engine.name)
    status = "available" if reason is None else f"not available: {reason}"
    return {"family": engine.family, "status": status, "options": dict(engine.options), **results.facts.get(engine.name, {})}


def _measure(measure: Measure, engines: Sequence[Engine], results: Results, config: ModelConfig) -> dict[str, Any]:
    series = {}
    for engine in engines:
        for method in engine.methods if measure.kind == "mix" else ("",):
            samples = results.samples.get(measure.name, {}).get(engine.series(method))
            if samples:
                series[engine.series(method)] = _series(measure, engine, samples, results, config)
    return {
        "title": measure.title, "kind": measure.kind, "unit": measure.unit, "rows": measure.rows, "prompt": measure.prompt,
        "new": measure.new, "series": series, "refused": results.refused.get(measure.name, {}),
    }  # fmt: skip


def _series(measure: Measure, engine: Engine, samples: Sequence[Sample], results: Results, config: ModelConfig) -> dict[str, Any]:
    values = Timing(tuple(s.value for s in samples))
    out: dict[str, Any] = {"family": engine.family, "median": values.median, "spread": values.spread}
    if results.machine is not None and measure.kind != "overhead":
        machine, facts = read_machine(results.machine), results.facts.get(engine.name, {})
        floors = [floor_seconds(measure, engine, facts, s.answer, config, machine) for s in samples]
        if None not in floors:
            taken = [s.answer["seconds"] for s in samples]
            out["floor_seconds"] = statistics.median(f for f in floors if f is not None)
            out["of_floor"] = statistics.median(f / t for f, t in zip(floors, taken, strict=True) if f is not None)
    return out | {"samples": [{"round": s.round, "value": s.value, **s.answer} for s in samples]}


def judge(bar: Bar, engines: Sequence[Engine], measures: Sequence[Measure], results: Results) -> dict[str, Any] | None:
    """The bar with what was reached; None if nobody asked for its measure or engine. met is None where nothing can be judged."""
    if bar.measure not in {m.name for m in measures} or bar.engine not in {e.name for e in engines}:
        return None
    verdict: dict[str, Any] = {**dataclasses.asdict(bar), "against": None, "ratio": None, "met": None}
    samples = results.samples.get(bar.measure, {})
    mine = {s.round: s.value for s in samples.get(bar.engine, [])}
    if bar.peer is None:
        if mine and bar.at_most is not None:
            verdict["value"] = statistics.median(mine.values())
            verdict["met"] = verdict["value"] <= bar.at_most
        return verdict
    names = [e.series(m) for e in engines if e.family == bar.peer for m in {"", *e.methods}]
    theirs = {name: {s.round: s.value for s in samples[name]} for name in names if samples.get(name)}
    if mine and theirs:
        best = max(theirs, key=lambda name: statistics.median(theirs[name].values()))
        ratios = paired_ratios(mine, theirs[best])
        if ratios:
            ratio = statistics.median(ratios)
            verdict |= {"against": best, "ratio": ratio, "ratios": ratios}
            verdict["met"] = None if bar.at_least is None else ratio >= bar.at_least
    return verdict


def paired_ratios(mine: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Quotients within a round, where both ran under the same conditions; rounds that only one of them finished are left out."""
    return [mine[r] / theirs[r] for r in sorted(mine.keys() & theirs.keys())]
