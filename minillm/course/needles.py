"""The six needles before and after: one small figure and one exact table of counts."""

from __future__ import annotations

import base64
import math
from typing import Any, Mapping

from matplotlib.figure import Figure

from minillm.course.style import COLOURS, FONT, INK, SMALL, SOFT, figure, png, titled
from minillm.perf import meter

VERBS = ("skip", "compute less", "move less", "occupy less", "saturate", "break serial")
Counts = Mapping[str, Mapping[str, int | float]]


class Needles:
    """``before`` and ``after``: snapshots of the engine's meter, or {verb: {counter: count}} of one's own.

    The figure shows each counter's factor; ``print(needles)`` gives the exact table, equal on every machine.
    """

    def __init__(
        self, before: Counts | meter.Needles, after: Counts | meter.Needles, labels: tuple[str, str] = ("before", "after")
    ) -> None:
        before, after = _by_verb(before), _by_verb(after)
        for name, counts in zip(labels, (before, after), strict=True):
            unknown = [verb for verb in counts if verb not in VERBS]
            if unknown:
                raise ValueError(f"{name}: unknown verb {unknown[0]!r}; the six are {', '.join(VERBS)}")
        self.labels = labels
        self.rows: list[tuple[str, str, int | float, int | float]] = []
        for verb in VERBS:
            b, a = before.get(verb, {}), after.get(verb, {})
            for counter in dict.fromkeys([*b, *a]):
                self.rows.append((verb, counter.replace("_", " "), b.get(counter, 0), a.get(counter, 0)))
        if not self.rows:
            raise ValueError("there is nothing to show: neither side has a counter")

    def __str__(self) -> str:
        """verb, counter, before, after, change; a verb is named once."""
        cells = [("", "", *self.labels, "change")]
        seen = ""
        for verb, counter, b, a in self.rows:
            cells.append((verb if verb != seen else "", counter, _count(b), _count(a), change(b, a)))
            seen = verb
        widths = [max(len(row[i]) for row in cells) for i in range(5)]
        lines = []
        for row in cells:
            left = "  ".join(row[i].ljust(widths[i]) for i in range(2))
            lines.append((left + "  " + "  ".join(row[i].rjust(widths[i]) for i in range(2, 5))).rstrip())
        return "\n".join(lines)

    __repr__ = __str__

    def figure(self, title: str | None = None) -> Figure:
        """One bar per counter that is not zero on both sides, from ×1 to its factor on a logarithmic scale."""
        moved = [(verb, counter, _log_factor(b, a), change(b, a)) for verb, counter, b, a in self.rows if b or a]
        reach = max([1.0, *(abs(f) for *_, f, _ in moved if math.isfinite(f))]) * 1.1
        fig, ax = figure(7.0, 0.7 + 0.235 * len(moved))
        labels, previous = [], ""
        for y, (verb, counter, factor, text) in enumerate(moved):
            width = max(-reach, min(reach, factor))
            colour = COLOURS[VERBS.index(verb)]
            ax.barh(y, width, height=0.62, color=colour, hatch="////" if width > 0 else "", edgecolor="white", linewidth=0)
            ax.plot([0, 0], [y - 0.31, y + 0.31], color=INK, linewidth=1.6)
            ax.annotate(text, (width, y), (4 if width >= 0 else -4, 0), textcoords="offset points", va="center",
                        ha="left" if width >= 0 else "right", fontsize=SMALL, color=INK if factor else SOFT)
            labels.append(f"{verb}:  {counter}" if verb != previous else counter)
            if previous and verb != previous:
                ax.axhline(y - 0.5, color=SOFT, linewidth=0.5)
            previous = verb
        ax.set_yticks(range(len(moved)), labels)
        ax.set_ylim(len(moved) - 0.4, -0.6)
        ax.set_xlim(-reach * 1.35, reach * 1.35)
        ax.set_xticks([])
        ax.grid(False)
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
        titled(ax, title)
        scale = f"less  ←   {self.labels[1]} against {self.labels[0]} (logarithmic)   →  more"
        ax.set_xlabel(scale, fontsize=FONT - 0.5, color=SOFT)
        return fig

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"text/plain": str(self), "image/png": base64.b64encode(png(self.figure())).decode()}


def _by_verb(counts: Counts | meter.Needles) -> Counts:
    return counts.by_verb() if isinstance(counts, meter.Needles) else counts


def change(before: int | float, after: int | float) -> str:
    """ "=", "new", "gone", "×12" (more) or "÷3.4" (less)."""
    if before == after:
        return "="
    if before == 0 or after == 0:
        return "new" if before == 0 else "gone"
    factor = after / before
    return f"×{_three(factor)}" if factor > 1 else f"÷{_three(1 / factor)}"


def _three(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"


def _log_factor(before: int | float, after: int | float) -> float:
    if before == after:
        return 0.0
    if before <= 0 or after <= 0:
        return math.inf if after > before else -math.inf
    return math.log10(after / before)


def _count(n: int | float) -> str:
    return f"{n:,}" if isinstance(n, int) else f"{n:,.6g}"
