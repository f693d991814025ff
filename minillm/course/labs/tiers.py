"""Lesson 1.3: a prefix computed again or loaded from a tier: pictures, the live panel, and the rule as a table."""

from __future__ import annotations

import time
from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import LogLocator, NullLocator

from minillm import LLM, SamplingParams
from minillm.bench.tiers import LENGTHS, TIERS, WAYS, Prices, TierBench
from minillm.course.panel import Panel
from minillm.course.predictions import short
from minillm.course.style import COLOURS, INK, LINES, MARKERS, SMALL, SOFT, figure, titled
from minillm.perf.timing import Timing
from minillm.perf.transfer import Link, LoadOffer, load_or_recompute
from minillm.perf.units import format_bytes, format_rate, format_time

# Pictures ---------------------------------------------------------------------------------------------------------------------


def tier_picture() -> Figure:
    """The three tiers, with what moves between them and when."""
    fig, ax = figure(7.0, 2.5)
    places = ("KV pool", "host memory", "disk")
    says = ("attention reads here", "what the pool evicted", "what memory pushed out")
    for i, (place, say) in enumerate(zip(places, says, strict=True)):
        box = FancyBboxPatch((3 * i, 0), 2, 1, boxstyle="round,pad=0.05", facecolor=COLOURS[i], edgecolor=INK, alpha=0.4)
        ax.add_patch(box)
        ax.text(3 * i + 1, 0.62, place, ha="center", va="center", color=INK, weight="bold")
        ax.text(3 * i + 1, 0.3, say, ha="center", va="center", color=INK, fontsize=SMALL - 0.5)
    for i, (down, up) in enumerate((("evicted", "hit: load"), ("pushed out", "hit: load"))):
        ax.annotate("", (3 * i + 2.9, 0.72), (3 * i + 2.1, 0.72), arrowprops={"arrowstyle": "->", "color": INK})
        ax.text(3 * i + 2.5, 0.86, down, ha="center", fontsize=SMALL, color=INK)
        ax.annotate("", (3 * i + 2.1, 0.28), (3 * i + 2.9, 0.28), arrowprops={"arrowstyle": "->", "color": INK})
        ax.text(3 * i + 2.5, 0.05, up, ha="center", fontsize=SMALL, color=INK)
    ax.text(4, -0.42, "to the right: larger and slower; the oldest blocks go first", ha="center", fontsize=SMALL, color=SOFT)
    ax.set_xlim(-0.2, 8.2)
    ax.set_ylim(-0.6, 1.2)
    ax.axis("off")
    return fig


# The live panel ---------------------------------------------------------------------------------------------------------------


def time_figure(prices: Prices, way: str, seen: Mapping[str, Mapping[int, Timing]], here: int | None = None) -> Figure:
    """Time to the first token against the prefix's length: predictions as lines, measurements as points."""
    fig, ax = figure(7.0, 3.7)
    grid = [16 * 2 ** (i / 4) for i in range(27)]
    for i, one in enumerate(("recompute", way)):
        colour = COLOURS[1 - i]
        values = [prices.seconds(one, round(n)) for n in grid]
        ax.plot(grid, values, color=colour, linestyle=LINES[1 - i], linewidth=1.6, label=f"{WAYS[one]}, predicted")
        points = sorted(seen.get(one, {}).items())
        if points:
            ax.plot(
                [n for n, _ in points], [t.median for _, t in points], MARKERS[i], color=colour, markersize=7,
                markeredgecolor="white", zorder=5, label=f"{WAYS[one]}, measured",
            )  # fmt: skip
    cross = prices.crossover(way)
    if cross is not None and cross > grid[0]:
        ax.axvline(cross, color=SOFT, linewidth=1)
        said = f"break-even, predicted: {cross}"
        ax.annotate(said, (cross, ax.get_ylim()[1]), (4, -10), textcoords="offset points", fontsize=SMALL)
    if here is not None:
        ax.axvline(here, color=SOFT, linestyle=(0, (2, 2)), linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks([16, 32, *LENGTHS], [str(n) for n in (16, 32, *LENGTHS)])
    ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0), numticks=12))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda v, _: format_time(v).replace(".00", "").replace(".0 ", " "))
    titled(ax, None, "tokens of the prefix", "time to the first token")
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=SMALL, frameon=False, labelcolor=INK)
    return fig


def explain(prices: Prices, tokens: int, way: str, found: Mapping[str, Timing] | None) -> str:
    """The verdict under the picture: the rule's choice, and what was measured."""
    size = tokens * prices.bytes_per_token
    choice = "load" if prices.seconds(way, tokens) < prices.seconds("recompute", tokens) else "compute"
    said = f"{tokens} tokens, {format_bytes(size)}, {WAYS[way]} at {format_rate(prices.links[way].bandwidth, 'B/s')}"
    said += f" after {format_time(prices.links[way].latency)}" if prices.links[way].latency else ""
    said += f": the rule says <b>{choice}</b>"
    if found is None:
        return f"<span class='verdict'>{said}; measuring …</span>"
    gain = found["recompute"].median / found[way].median
    better = f"loading was {short(gain)} times as fast" if gain > 1 else f"computing was {short(1 / gain)} times as fast"
    return f"<span class='verdict'>{said}; measured: {better}, {found['recompute']} against {found[way]}.</span>"


def tier_panel(bench: TierBench, seen: Mapping[str, Mapping[int, Timing]] | None = None, tokens: int = 256) -> Panel:
    """Sliders for the prefix's length and the tier; each place is measured anew, computed and loaded."""
    kept: dict[str, dict[int, Timing]] = {way: dict((seen or {}).get(way, {})) for way in WAYS}

    def run(job: Any, tokens: int, tier: str) -> dict[str, Timing]:
        job.progress(0.0)
        again = bench.measure("recompute", tokens, job.check)
        job.progress(0.6)
        return {"recompute": again, tier: bench.measure(tier, tokens, job.check)}

    def draw(values: dict[str, Any], found: dict[str, Timing] | None) -> tuple[Figure, str]:
        n, tier = values["tokens"], values["tier"]
        for way, timing in (found or {}).items():
            kept[way][n] = timing
        return time_figure(bench.prices, tier, kept, here=n), explain(bench.prices, n, tier, found)

    places = [n for n in (16, 32, *LENGTHS) if n <= bench.most]
    controls = {
        "tokens": w.SelectionSlider(options=places, value=min(tokens, places[-1]), description="prefix"),
        "tier": w.SelectionSlider(options=[(WAYS[t], t) for t in TIERS], value="host", description="tier"),
    }
    return Panel("a prefix computed or loaded", controls, run, draw)


# What the lesson asks the engine ----------------------------------------------------------------------------------------------


def time_prompt(llm: LLM, prompt: Sequence[int]) -> tuple[Any, float]:
    """The output of one greedy token, and the seconds that it took."""
    before = time.perf_counter()
    (out,) = llm.generate([list(prompt)], SamplingParams(max_tokens=1, ignore_eos=True))
    return out, time.perf_counter() - before


def decisions(links: Mapping[str, Link], lengths: Sequence[int], prefill: Callable[[int, int], float], token_bytes: int) -> str:
    """A table: what the rule does with a prefix of each length behind each link, and one token more."""
    rows = [f"{'':24}" + "".join(f"{n:>9}" for n in lengths)]
    for name, link in links.items():
        said = []
        for n in lengths:
            loaded = load_or_recompute(LoadOffer(0, 1, (name,) * (n // 16), 16, 16 * token_bytes, {name: link}, prefill)) * 16
            said.append("load" if loaded == n else "compute" if loaded == 0 else f"load {loaded}")
        rows.append(f"{name:24}" + "".join(f"{word:>9}" for word in said))
    return "\n".join(rows)
