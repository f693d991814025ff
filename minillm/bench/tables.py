"""A report as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from minillm.perf.units import format_rate, format_time

BUSY = 0.1


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print a report: machine, engines, rates, bars, and where minillm's time goes."""
    settings = report["settings"]
    console.print(f"[bold]minillm bench[/bold] of {report['model']}, {report['date']}", highlight=False)
    machine = report["machine"]
    if machine:
        console.print(f"{machine['label']}; memory reads at {format_rate(machine['bandwidth'], 'B/s')}", highlight=False)
    console.print(f"{settings['threads']} threads, {settings['rounds']} rounds, engines taking turns", highlight=False)
    if settings.get("quick"):
        console.print("[yellow]--quick: shows that everything runs; its numbers mean nothing[/yellow]")
    busy = max(report["busy_before_rounds"], default=0.0)
    if busy > BUSY:
        console.print(f"[yellow]others kept the processor {busy:.0%} busy: trust nothing below[/yellow]", highlight=False)
    for name, measure in report["measures"].items():
        console.print(f"  {name}: {measure['title']}", highlight=False)
    for table in (_engines(report), _rates(report), _bars(report), _overhead(report), _profile(report)):
        if table.row_count:
            console.print(table)


def _engines(report: Mapping[str, Any]) -> Table:
    table = _table("Engines", "engine", "versions", "what it is", "greedy tokens as minillm in float32")
    agreement, of = report["agreement"]["leading_equal"], report["agreement"]["new_tokens"]
    for name, engine in report["engines"].items():
        equal = agreement.get(name)
        versions = ", ".join(f"{k} {v}" for k, v in engine.get("versions", {}).items() if k not in ("numpy", "python"))
        what = engine.get("engine", "").split(";")[0] if engine["status"] == "available" else engine["status"]
        table.add_row(name, versions, what, "" if equal is None else f"{', '.join(map(str, equal))} of {of}")
    return table


def _rates(report: Mapping[str, Any]) -> Table:
    table = _table("Rates", "measure", "engine", "median", "spread", "floor", "of the floor")
    for title, measure in report["measures"].items():
        if measure["kind"] == "overhead":
            continue
        for name, s in measure["series"].items():
            share = s.get("of_floor")
            floor = ("", "") if share is None else (f"{s['median'] / share:,.0f} tok/s", f"{share:.0%}")
            table.add_row(title, name, f"{s['median']:,.1f} tok/s", f"±{s['spread']:.0%}", *floor)
            title = ""
        for name, reason in measure["refused"].items():
            table.add_row(title, name, f"not available: {reason}", "", "", "")
            title = ""
        table.add_section()
    return table


def _bars(report: Mapping[str, Any]) -> Table:
    table = _table("Bars", "measure", "engine", "against", "ratio", "bar", "aim", "met")
    for bar in report["bars"]:
        name, engine = bar["measure"], bar["engine"]
        if bar["peer"] is None:
            most = f"at most {bar['at_most']:.0%}"
            table.add_row(name, engine, "", _share(bar.get("value")), most, "", _met(bar["met"]))
            continue
        ratio = "not measured"
        if bar["ratio"] is not None:
            several = len(bar["ratios"]) > 1
            ratio = f"{bar['ratio']:.2f}x" + several * f" ({min(bar['ratios']):.2f} to {max(bar['ratios']):.2f})"
        goal, aim = (f"{g:g}x" if g is not None else "" for g in (bar["at_least"], bar["aim"]))
        table.add_row(name, engine, bar["against"] or bar["peer"], ratio, goal, aim, _met(bar["met"]))
    return table


def _overhead(report: Mapping[str, Any]) -> Table:
    """Shares of one step of minillm, by part."""
    series = {n: s["samples"] for m in report["measures"].values() if m["kind"] == "overhead" for n, s in m["series"].items()}
    parts = list(dict.fromkeys(part for samples in series.values() for sample in samples for part in sample["shares"]))
    table = _table("Parts of a step, share of its time", "engine", "step", *parts, "outside the model")
    for name, samples in series.items():
        shares = [_share(statistics.median(s["shares"].get(part, 0.0) for s in samples)) for part in parts]
        step, outside = (statistics.median(s[key] for s in samples) for key in ("step_seconds", "outside"))
        table.add_row(name, format_time(step), *shares, _share(outside))
    return table


def _profile(report: Mapping[str, Any]) -> Table:
    profile = report["profile"]
    groups = list(dict.fromkeys(group for p in profile.values() for group in p["shares"]))
    table = _table("Where an eager step of minillm goes, share of its time", "measure", "step", *groups)
    for name, p in profile.items():
        shares = [_share(p["shares"].get(group, 0.0)) for group in groups]
        table.add_row(name, format_time(p["step_seconds"]), *shares)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column in ("engine", "measure", "against", "ratio", "median"))
    return table


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _met(met: bool | None) -> str:
    return {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[met]
