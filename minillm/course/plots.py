"""The course's drawings: roofline, slot timeline, block table, bars, lines. Each returns a Figure; ``png`` makes bytes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from minillm.course.diagrams import Span, block_table, timeline
from minillm.course.style import (
    COLOURS,
    INK,
    LINES,
    MARKERS,
    SMALL,
    SOFT,
    figure,
    legend,
    place_labels,
    png,
    power_ticks,
    si,
    titled,
)
from minillm.perf.timing import Timing

__all__ = ["Point", "Roof", "Span", "bars", "block_table", "lines", "png", "roofline", "si", "timeline", "timings"]


@dataclass(frozen=True)
class Roof:
    """A machine's limits: peak arithmetic in FLOP/s and memory bandwidth in bytes/s."""

    label: str
    flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOP per byte from which arithmetic, not memory, sets the pace."""
        return self.flops / self.bandwidth


@dataclass(frozen=True)
class Point:
    """An operation measured: its work in FLOPs and bytes, its median seconds, and the fastest and slowest run kept."""

    label: str
    flops: float
    bytes: float
    seconds: float
    fastest: float | None = None
    slowest: float | None = None

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        return self.flops / self.seconds


def roofline(roofs: Sequence[Roof], points: Sequence[Point] = (), *, trail: bool = False, title: str | None = None) -> Figure:
    """Attainable FLOP/s against FLOP per byte (Williams et al. 2009), with measured points and their spread.

    The first roof is the learner's machine. ``trail`` joins the points in their order and stresses the last one.
    """
    if not roofs:
        raise ValueError("a roofline needs at least one roof")
    fig, ax = figure(7.0, 3.7 + 0.17 * len(roofs))
    xs = [r.ridge for r in roofs] + [p.intensity for p in points]
    rates = [r.flops for r in roofs] + [p.rate for p in points]
    left, right = min([0.1, *(x / 3 for x in xs)]), max([100.0, *(x * 8 for x in xs)])
    grid = np.geomspace(left, right, 200)
    for i, roof in enumerate(roofs):
        colour = INK if i == 0 else COLOURS[(i - 1) % 6]
        name = f"{roof.label}: {si(roof.bandwidth, 'B/s')}, {si(roof.flops, 'FLOP/s')}, ridge {roof.ridge:.3g}"
        heights = np.minimum(roof.flops, roof.bandwidth * grid)
        ax.plot(grid, heights, color=colour, linestyle=LINES[i % 6], linewidth=2.2 if i == 0 else 1.4, label=name)
        ax.plot([roof.ridge], [roof.flops], marker="|", markersize=11, color=colour)
    labels = [(roofs[0].ridge, roofs[0].flops, f"ridge {roofs[0].ridge:.3g}", INK)]
    if trail and len(points) > 1:
        ax.plot([p.intensity for p in points], [p.rate for p in points], color=COLOURS[1], linewidth=1.0, linestyle=":")
    for i, p in enumerate(points):
        last = not trail or i == len(points) - 1
        spread = None
        if p.fastest is not None and p.slowest is not None:
            spread = [[max(0.0, p.rate - p.flops / p.slowest)], [max(0.0, p.flops / p.fastest - p.rate)]]
        kind = 0 if trail else i % 6
        ax.errorbar(
            [p.intensity], [p.rate], yerr=spread, fmt=MARKERS[kind], color=COLOURS[(kind + 1) % 6], markersize=8 if last else 5,
            markeredgecolor="white", ecolor=INK, elinewidth=1, capsize=3, zorder=5,
        )
        if p.label and last:
            roof_here = min(roofs[0].flops, roofs[0].bandwidth * p.intensity)
            labels.append((p.intensity, p.rate, f"{p.label}: {p.rate / roof_here:.0%} of roof", INK))
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(left, right)
    ax.set_ylim(min(min(rates), roofs[0].bandwidth * left) / 2, max(rates) * 5)
    power_ticks(ax.xaxis, prefixes=False)
    power_ticks(ax.yaxis)
    titled(ax, title, "arithmetic intensity (FLOP per byte)", "attainable FLOP/s")
    legend(ax, "below")
    covered = [(x, min(r.flops, r.bandwidth * x)) for r in roofs for x in grid]
    place_labels(ax, labels, covered + [(p.intensity, p.rate) for p in points] * 3)
    return fig


def bars(
    values: Mapping[str, float], unit: str, *, spread: Mapping[str, tuple[float, float]] | None = None,
    baseline: str | None = None, title: str | None = None,
) -> Figure:
    """Horizontal bars with their values. ``spread``: (low, high) per bar. ``baseline``: others show their factor to it."""
    if not values or (baseline is not None and baseline not in values):
        raise ValueError(f"bars need values, and a baseline among them, got {list(values)} and {baseline!r}")
    fig, ax = figure(7.0, 1.1 + 0.42 * len(values))
    largest = max([*values.values(), *(high for _, high in (spread or {}).values())]) or 1.0
    for i, (name, value) in enumerate(values.items()):
        colour = SOFT if name == baseline else COLOURS[0]
        ax.barh(i, value, height=0.62, color=colour, hatch="////" if name == baseline else "", edgecolor="white", linewidth=0)
        edge = value
        if spread and name in spread:
            low, high = spread[name]
            reach = [[max(0.0, value - low)], [max(0.0, high - value)]]
            ax.errorbar([value], [i], xerr=reach, ecolor=INK, elinewidth=1.2, capsize=4)
            edge = max(value, high)
        base = values[baseline] if baseline is not None else 0.0
        factor = ""
        if base > 0 and value > 0 and name != baseline:
            factor = f"  (×{value / base:.3g})" if value >= base else f"  (÷{base / value:.3g})"
        ax.text(edge + largest * 0.012, i, f"{si(value, unit)}{factor}", va="center", fontsize=SMALL, color=INK)
    ax.set_yticks(range(len(values)), list(values))
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.set_xlim(0, largest * 1.25)
    ax.xaxis.set_major_formatter(lambda v, _: si(v, unit))
    ax.grid(False, axis="y")
    titled(ax, title)
    return fig


def timings(
    seen: Mapping[str, Mapping[int, Timing]], xlabel: str, ylabel: str = "ms per step", *, logy: bool = False,
    here: int | None = None,
) -> Figure:
    """Milliseconds with the spread of the runs, a line for each name; seen: {name: {place: timing}}. here: a place to mark."""
    series = {
        name: [(n, t.median * 1e3, t.p10 * 1e3, t.p90 * 1e3) for n, t in sorted(places.items())] for name, places in seen.items()
    }
    measured = {name: points for name, points in series.items() if points}
    return lines(measured, xlabel, ylabel, logx=bool(measured), logy=logy and bool(measured),
                 marks={} if here is None or not measured else {"here": float(here)})  # fmt: skip


def lines(
    series: Mapping[str, Sequence[Sequence[float]]], xlabel: str, ylabel: str, *, logx: bool = False, logy: bool = False,
    marks: Mapping[str, float] | None = None, title: str | None = None,
) -> Figure:
    """Curves against position, context or batch. A point is (x, y) or (x, y, low, high). ``marks``: named vertical lines."""
    fig, ax = figure()
    for i, (name, points) in enumerate(series.items()):
        data = np.array([list(p) + [p[1], p[1]] if len(p) == 2 else list(p) for p in points], dtype=float)
        colour, line, marker = COLOURS[i % 6], LINES[i % 6], MARKERS[i % 6]
        ax.plot(data[:, 0], data[:, 1], color=colour, linestyle=line, marker=marker, markersize=4.5, linewidth=1.6, label=name)
        ax.fill_between(data[:, 0], data[:, 2], data[:, 3], color=colour, alpha=0.18, linewidth=0)
    if logx:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    if logy:
        ax.set_yscale("log")
        power_ticks(ax.yaxis)
    else:
        ax.set_ylim(bottom=0)
    for name, x in (marks or {}).items():
        ax.axvline(x, color=SOFT, linestyle=(0, (2, 2)), linewidth=1.2)
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
        ax.annotate(name, (x, 1.0), (3, -2), fontsize=SMALL, color=SOFT, **place)
    titled(ax, title, xlabel, ylabel)
    if series:
        legend(ax, "right" if len(series) > 3 else "best")
    return fig
