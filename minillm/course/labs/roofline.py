"""Lesson 0.1: one matrix product on the roofline, as its rows, size and dtype change."""

from __future__ import annotations

from typing import Any, Callable

import ipywidgets as w
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from minillm.config import DTYPES
from minillm.course.panel import Panel
from minillm.course.plots import Point, Roof, lines, roofline
from minillm.perf.hardware import Hardware
from minillm.perf.roofline import Prediction, predict
from minillm.perf.timing import Timing, measure
from minillm.perf.units import format_time
from minillm.perf.work import Work

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WEIGHTS_SWEPT = 64 * 2**20
"""Bytes of different weights that one measurement goes through, so that none is found in a small cache."""


def linear_work(rows: int, n_in: int, n_out: int, dtype: str) -> Work:
    """x [rows, n_in] times a weight [n_out, n_in]: the weight is read once, x read, the result written."""
    element = DTYPES[dtype].itemsize
    return Work(
        flops={dtype: 2 * rows * n_in * n_out}, weight_bytes=n_in * n_out * element,
        activation_bytes=rows * (n_in + n_out) * element, launches=1,
    )  # fmt: skip


def make_linear(n_in: int, n_out: int, dtype: str, swept: int = WEIGHTS_SWEPT) -> Callable[[int], Callable[[], Any]]:
    """rows → a call that multiplies that many rows by the next weight of a set which fills ``swept`` bytes."""
    bytes_each = n_in * n_out * DTYPES[dtype].itemsize
    weights = [torch.randn(n_out, n_in).to(DTYPES[dtype]) for _ in range(max(1, swept // bytes_each))]
    turn = 0

    def with_rows(rows: int) -> Callable[[], Any]:
        x = torch.randn(rows, n_in).to(DTYPES[dtype])

        def call() -> Any:
            nonlocal turn
            turn = (turn + 1) % len(weights)
            return F.linear(x, weights[turn])

        return call

    return with_rows


def time_linear(rows: int, n_in: int, n_out: int, dtype: str, repeats: int = 15) -> Timing:
    """One product of this shape, timed with fresh weights each time."""
    return measure(make_linear(n_in, n_out, dtype)(rows), warmup=3, repeats=repeats)


def point(label: str, work: Work, timing: Timing) -> Point:
    return Point(label, work.total_flops, work.total_bytes, timing.median, timing.p10, timing.p90)


def roof_of(hardware: Hardware, dtype: str) -> Roof:
    return Roof(f"{hardware.name}, {dtype}", hardware.rate(dtype), hardware.bandwidth)


def explain(rows: int, found: Timing | None, floor: Prediction) -> str:
    """The verdict under the picture: prediction, then measurement, then what was left over."""
    said = f"{rows} row{'s' if rows > 1 else ''}: the roofline predicts {format_time(floor.seconds)}, <b>{floor.bound}</b>-bound"
    if found is None:
        return f"<span class='verdict'>{said}; measuring …</span>"
    share = floor.seconds / found.median
    overhead = " Most of the time is overhead." if share < 0.3 else ""
    return f"<span class='verdict'>{said}; measured {found}, {share:.0%} of the roof.{overhead}</span>"


def roofline_panel(hardware: Hardware, sizes: tuple[int, ...] = (64, 576, 1536, 4096), repeats: int = 15) -> Panel:
    """Sliders for rows and size, a choice of dtype; every position is measured anew and leaves its point on the picture."""
    seen: dict[tuple[str, int], dict[int, Point]] = {}

    def run(job: Any, rows: int, size: int, dtype: str) -> Timing:
        call = make_linear(size, size, dtype)(rows)
        samples: list[float] = []
        for i in range(repeats):
            job.progress(i / repeats)
            samples += measure(call, warmup=2 if i == 0 else 0, repeats=1).samples
        return Timing(tuple(samples))

    def draw(values: dict[str, Any], found: Timing | None) -> tuple[Figure, str]:
        rows, size, dtype = values["rows"], values["size"], values["dtype"]
        work = linear_work(rows, size, size, dtype)
        trail = seen.setdefault((dtype, size), {})
        if found is not None:
            trail.pop(rows, None)
            trail[rows] = point(f"{rows} × {size} × {size}", work, found)
        picture = roofline([roof_of(hardware, dtype)], list(trail.values()), trail=True)
        return picture, explain(rows, found, predict(work, hardware))

    dtypes = [d for d in ("float32", "bfloat16", "float16") if d in hardware.flops]
    controls = {
        "rows": w.SelectionSlider(options=ROWS, value=1, description="rows"),
        "size": w.SelectionSlider(options=sizes, value=1536 if 1536 in sizes else sizes[0], description="size"),
        "dtype": w.Dropdown(options=dtypes, value="bfloat16" if "bfloat16" in dtypes else dtypes[0], description="dtype"),
    }
    return Panel("roofline of one product", controls, run, draw)


def sweep(n_in: int, n_out: int, dtype: str, rows: tuple[int, ...] = ROWS, repeats: int = 9) -> dict[int, Timing]:
    """The product timed at every row count, round-robin over fresh weights."""
    make = make_linear(n_in, n_out, dtype)
    return {m: measure(make(m), warmup=2, repeats=repeats) for m in rows}


def sweep_figure(found: dict[int, Timing], n_in: int, n_out: int, dtype: str, hardware: Hardware) -> Figure:
    """Measured and predicted time against rows: flat, then growing."""
    floors = {m: predict(linear_work(m, n_in, n_out, dtype), hardware).seconds for m in found}
    bounds = {m: predict(linear_work(m, n_in, n_out, dtype), hardware).bound for m in range(1, max(found) + 1)}
    ridge_rows = next((m for m, bound in bounds.items() if bound == "compute"), None)
    return lines(
        {"measured": [(m, t.median * 1e3, t.p10 * 1e3, t.p90 * 1e3) for m, t in found.items()],
         "roofline": [(m, s * 1e3) for m, s in floors.items()]},
        "rows of x (log scale)", "ms per product", logx=True,
        marks={f"compute-bound from {ridge_rows} rows": ridge_rows} if ridge_rows else None,
    )  # fmt: skip
