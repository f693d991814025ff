"""Diagrams of the engine's state: what each slot did over time, and who owns which block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.course.style import COLOURS, DPI, FONT, HATCHES, INK, SMALL, SOFT, Drawing, figure, legend, titled


@dataclass(frozen=True)
class Span:
    """What one slot did from ``start`` to ``stop`` (steps or seconds)."""

    slot: int
    start: float
    stop: float
    kind: str = "decode"
    label: str = ""


PALE = "#F2F2F2"
KINDS = {  # kind: colour, hatch
    "prefill": (COLOURS[1], ""), "decode": ("#9CCFF0", ""), "padding": (PALE, "...."), "idle": ("white", ""),
    "draft": (COLOURS[4], "////"), "wasted": (PALE, "xxxx"), "stalled": (PALE, "////"), "transfer": (COLOURS[5], "...."),
}


def timeline(spans: Sequence[Span], *, unit: str = "step", title: str | None = None) -> Figure:
    """Slots from top to bottom, time from left to right. The kinds of span are those of ``KINDS``."""
    if not spans:
        raise ValueError("a timeline needs at least one span")
    unknown = sorted({s.kind for s in spans} - set(KINDS))
    if unknown:
        raise ValueError(f"unknown span kind {unknown[0]!r}; known are {', '.join(KINDS)}")
    slots, end = max(s.slot for s in spans) + 1, max(s.stop for s in spans)
    fig, ax = figure(7.0, 1.3 + 0.38 * slots)
    for s in spans:
        colour, hatch = KINDS[s.kind]
        ax.barh(s.slot, s.stop - s.start, left=s.start, height=0.78, color=colour, hatch=hatch, edgecolor=SOFT, linewidth=0.6)
        room = (s.stop - s.start) / end * 6.2 * 72  # points on the page
        if s.label and room > 0.62 * SMALL * len(s.label):
            note = ax.text((s.start + s.stop) / 2, s.slot, s.label, ha="center", va="center", fontsize=SMALL, color=INK)
            if hatch:
                note.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 1.5})
    used = [k for k in KINDS if any(s.kind == k for s in spans)]
    handles = [Patch(facecolor=KINDS[k][0], hatch=KINDS[k][1], edgecolor=SOFT, label=k) for k in used]
    ax.set_ylim(slots - 0.45, -0.55)
    ax.set_yticks(range(slots), [f"slot {i}" for i in range(slots)])
    ax.set_xlim(0, end)
    ax.grid(False, axis="y")
    titled(ax, title, unit)
    legend(ax, "right", handles=handles)
    return fig


def block_table(
    num_blocks: int, tables: Mapping[str, Sequence[int]], *, ref_counts: Mapping[int, int] | None = None,
    cached: Sequence[int] = (), columns: int = 8, title: str | None = None,
) -> Figure:
    """The block pool beside the requests' block tables: who owns which block, and how many refer to it.

    ref_counts default to the number of tables that hold a block. ``cached``: blocks without an owner that keep their content.
    """
    bad = [b for table in (*tables.values(), cached) for b in table if not 0 <= b < num_blocks]
    if bad:
        raise ValueError(f"block {bad[0]} is outside the pool of {num_blocks}")
    owners = {b: [name for name, table in tables.items() if b in table] for b in range(num_blocks)}
    counts = {b: len(owners[b]) if ref_counts is None else ref_counts.get(b, 0) for b in range(num_blocks)}
    style = {name: (COLOURS[(0, 2, 5, 4, 1, 3)[i % 6]], HATCHES[i // 6 % 6]) for i, name in enumerate(tables)}
    columns = min(columns, max(num_blocks, 5))
    rows, longest = -(-num_blocks // columns), max([1, *(len(t) for t in tables.values())])
    left = columns + 0.8 + 0.22 * max([4, *(len(name) for name in tables)])  # where the tables' boxes begin
    width, height = left + longest + 0.2, max(rows, len(tables)) + 1.9
    fig = Drawing(figsize=(0.42 * width, 0.42 * height + (0.3 if title else 0.0)), dpi=DPI, facecolor="white")
    ax = fig.add_axes((0, 0, 1, 1))
    ax.axis("off")
    ax.set_xlim(-0.1, width - 0.1)
    ax.set_ylim(height - 1.0, -0.95 - (0.72 if title else 0.0))

    def box(x: float, y: float, block: int, owned_by: Sequence[str]) -> None:
        """A shared block is striped in its owners' colours and has a thick frame."""
        empty = [("#E6E6E6", "....") if block in cached else ("white", "")]
        parts = [style[name] for name in owned_by] or empty
        for i, (colour, hatch) in enumerate(parts):
            step = 0.88 / len(parts)
            look: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": SOFT, "linewidth": 0.4, "alpha": 0.55}
            ax.add_patch(Rectangle((x + 0.06 + i * step, y + 0.06), step, 0.88, **look))
        frame = 2.2 if counts[block] > 1 else 0.8
        ax.add_patch(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, fill=False, edgecolor=INK, linewidth=frame))

    for b in range(num_blocks):
        x, y = b % columns, b // columns
        box(x, y, b, owners[b])
        ax.text(x + 0.15, y + 0.14, str(b), fontsize=SMALL - 2, color=INK, va="top")
        if counts[b]:
            ax.text(x + 0.54, y + 0.6, f"×{counts[b]}", fontsize=SMALL, color=INK, ha="center", va="center", weight="bold")
    for y, (name, table) in enumerate(tables.items()):
        ax.text(left - 0.15, y + 0.5, name, fontsize=SMALL, color=INK, ha="right", va="center")
        for x, b in enumerate(table):
            box(left + x, y, b, [name])
            ax.text(left + x + 0.5, y + 0.5, str(b), fontsize=SMALL, color=INK, ha="center", va="center")
    free = sum(not count and b not in cached for b, count in counts.items())
    shared = sum(count > 1 for count in counts.values())
    ax.text(0, -0.25, f"pool of {num_blocks} blocks (×references)", fontsize=SMALL + 0.5, color=INK)
    ax.text(left, -0.25, "block tables" if tables else "", fontsize=SMALL + 0.5, color=INK)
    ax.text(0, rows + 0.5, f"{free} free, {len(set(cached))} cached, {shared} shared", fontsize=SMALL, color=SOFT)
    if title:
        ax.text(0, -1.1, title, fontsize=FONT + 1, color=INK)
    return fig
