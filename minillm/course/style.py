"""One look for every figure: readable in grey and by the colour-blind, drawn without pyplot, the same bytes every time."""

from __future__ import annotations

import io
import textwrap
from typing import Any, Iterable

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# Okabe and Ito's palette, ordered so that neighbours also differ in grey; line, marker and hatch say the same thing again.
COLOURS = ("#0072B2", "#D55E00", "#56B4E9", "#8A6D00", "#CC79A7", "#009E73")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1.5, 1, 1.5, 1, 1.5)), (0, (1, 1)))
MARKERS = ("o", "s", "D", "^", "v", "P")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++")
INK, SOFT, FAINT = "#1A1A1A", "#5F5F5F", "#DDDDDD"
FONT, SMALL = 10.0, 8.5
DPI = 110


class Drawing(Figure):
    """A figure that a notebook shows as a picture although pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        return png(self)


def figure(width: float = 7.0, height: float = 3.8) -> tuple[Figure, Axes]:
    """A figure in inches with one styled axes. It belongs to nobody but the caller: pyplot does not know it."""
    fig = Drawing(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    return fig, styled(fig.add_subplot())


def styled(ax: Axes) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(SOFT)
    ax.tick_params(labelsize=SMALL, colors=INK, color=SOFT)
    ax.tick_params(which="minor", length=0)
    ax.grid(True, color=FAINT, linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def titled(ax: Axes, title: str | None, xlabel: str = "", ylabel: str = "") -> None:
    if title:
        ax.set_title(title, fontsize=FONT + 1, loc="left", color=INK)
    ax.set_xlabel(xlabel, fontsize=FONT, color=INK)
    ax.set_ylabel(ylabel, fontsize=FONT, color=INK)


def legend(ax: Axes, place: str = "best", **options: Any) -> None:
    """A frameless legend: "best" inside the axes, "right" of them or "below" them."""
    places: dict[str, dict[str, Any]] = {
        "best": {"loc": "best"},
        "right": {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)},
        "below": {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.16)},
    }
    ax.legend(fontsize=SMALL, frameon=False, labelcolor=INK, **places[place], **options)


def png(fig: Figure, caption: str | None = None) -> bytes:
    """The figure as PNG bytes, equal for equal figures: no date and no version inside. ``caption`` is written below it."""
    if caption:
        wrapped = textwrap.fill(caption, width=int(fig.get_figwidth() * 13))
        fig.supxlabel(wrapped, fontsize=FONT, color=INK, x=0.01, ha="left")
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def si(x: float, unit: str = "") -> str:
    """3.35e12, "B/s" → "3.35 TB/s": three significant digits and the prefix that keeps them short."""
    if x == 0:
        return f"0 {unit}".rstrip()
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
    for scale, prefix in prefixes:
        if abs(x) >= scale * 0.9995 or scale == 1e-9:
            return f"{float(f'{x / scale:.3g}'):g} {prefix}{unit}".rstrip()
    raise AssertionError("unreachable: the last prefix takes everything")


def power_ticks(axis: Axis, unit: str = "", prefixes: bool = True) -> None:
    """Plain words on a logarithmic axis: "10 G", but "0.1" without a unit or prefixes. A short axis is also marked at 2 and 5."""
    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high / low < 30 else (1.0,)
    axis.set_major_locator(LogLocator(10, subs=steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda v, _: si(v, unit) if prefixes and (unit or v >= 1) else f"{v:g}"))
    axis.set_minor_locator(NullLocator())


MARKER = 6.0  # pixels from the middle of a point to its edge
OFFSETS = ((7, 6), (7, -13), (-7, 6), (-7, -13), (7, 18), (7, -25), (-7, 18), (-7, -25), (7, 30), (-7, 30))


def place_labels(ax: Axes, labels: Iterable[tuple[float, float, str, str]], avoid: Iterable[tuple[float, float]] = ()) -> None:
    """Write (x, y, text, colour) beside its point, at the offset where it covers the fewest labels, edges and points to avoid."""
    fig = ax.figure.get_figure(root=True)
    FigureCanvasAgg(fig)
    fig.draw_without_rendering()  # settles the layout, so that extents are final
    frame = ax.get_window_extent()
    taken: list[Any] = []
    dots = [tuple(ax.transData.transform(p)) for p in avoid]
    for x, y, text, colour in labels:
        tried = []
        for dx, dy in OFFSETS:
            note = ax.annotate(text, (x, y), (dx, dy), textcoords="offset points", fontsize=SMALL, color=colour,
                               ha="left" if dx > 0 else "right", zorder=6)
            note.set_in_layout(False)
            box, reach = (note.get_window_extent().padded(by) for by in (1.5, MARKER))
            outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
            cost = 99 * outside + 9 * sum(box.overlaps(t) for t in taken) + sum(reach.contains(*d) for d in dots)
            tried.append((cost, note, box))
            if cost == 0:
                break
        best = min(tried, key=lambda t: t[0])
        for _, note, _ in tried:
            if note is not best[1]:
                note.remove()
        taken.append(best[2])
