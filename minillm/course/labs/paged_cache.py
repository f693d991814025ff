"""Lesson 4.1: strips and pages in the same memory, block tables recorded step by step, and what reading through them costs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from minillm.attention.strip_backend import StripAttention
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.cache.snapshot import CacheSnapshot
from minillm.checking import check_whole
from minillm.course.diagrams import block_table
from minillm.course.panel import Panel
from minillm.course.plots import bars, lines
from minillm.course.style import COLOURS, DPI, FAINT, Drawing, legend, styled, titled
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.transformer import Transformer
from minillm.perf.timing import Timing
from minillm.perf.units import format_time
from minillm.traffic.occupancy import Held, last_block_waste, occupancy, waste

SIZES = (1, 4, 16, 64, 256)
CONTEXTS = (64, 128, 256, 512, 1024)
WAYS = {"strip": "strip, read in place", "pages": "pages, gathered"}


# Memory, counted --------------------------------------------------------------------------------------------------------------


def serve(mix: Sequence[tuple[int, int]], pool: int, longest: int) -> dict[str, list[Held]]:
    """What every way to allocate holds, step by step, when it serves the same requests from the same pool."""
    ways: dict[str, dict[str, Any]] = {"reserved strips": {"allocation": "reserve"}, "exact strips": {"allocation": "exact"}}
    ways |= {f"pages of {b}": {"block_size": b} for b in SIZES}
    return {name: occupancy(mix, pool, longest, max_num_seqs=len(mix), **options) for name, options in ways.items()}


def memory_figure(held: Mapping[str, Sequence[Held]], pool: int) -> Figure:
    """Share of the pool that is allocated, and that holds keys and values, step by step: one strip for each way to allocate."""
    shown = ("reserved strips", "exact strips", "pages of 16")
    fig = Drawing(figsize=(7.0, 4.6), dpi=DPI, layout="constrained", facecolor="white")
    rows = fig.subplots(len(shown), 1, sharex=True, sharey=True)
    for ax, name in zip(rows, shown):
        steps = range(len(held[name]))
        for what, look in (("allocated", {"color": FAINT}), ("live", {"color": COLOURS[0]})):
            ax.fill_between(steps, [getattr(s, what) / pool for s in held[name]], label=what, linewidth=0, **look)
        titled(styled(ax), name)
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    titled(rows[1], shown[1], ylabel="share of the pool")
    titled(rows[-1], shown[-1], "step")
    legend(rows[0], "right")
    return fig


def waste_figure(held: Mapping[str, Sequence[Held]]) -> Figure:
    """Empty share of the allocated slots against the block size: counted, and the formula of the last block."""
    length = mean_length(held["pages of 1"])
    series = {
        "counted": [(b, waste(held[f"pages of {b}"])) for b in SIZES],
        "(B - 1) / 2 slots a request": [(b, last_block_waste(b, length)) for b in SIZES],
    }
    return lines(series, "tokens per block", "empty share of allocated slots", logx=True)


def mean_length(steps: Sequence[Held]) -> float:
    """Live tokens of a running request, over all steps and requests."""
    return sum(s.live for s in steps) / sum(s.running for s in steps)


def rows_figure(rows: Mapping[str, int]) -> Figure:
    return bars({name: float(n) for name, n in rows.items()}, "", baseline="reserved strips", title="requests at once")


# Samples, recorded ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """The cache after a step, and the (source, target) blocks that this step copied."""

    cache: CacheSnapshot
    copies: tuple[tuple[int, int], ...]


def record(engine: Any, limit: int = 100) -> list[Moment]:
    """Run an engine to its end and keep what its cache held after every step."""
    copies: list[tuple[int, int]] = []
    watch = lambda plan: copies.extend(plan.copies)  # noqa: E731
    engine.scheduler.observers.append(watch)
    moments: list[Moment] = []
    try:
        while engine.has_work and len(moments) < limit:
            copies.clear()
            engine.step()
            moments.append(Moment(engine.cache_snapshot(), tuple(copies)))
    finally:
        engine.scheduler.observers.remove(watch)
    return moments


def moment_figure(moment: Moment, i: int) -> tuple[Figure, str]:
    """Pool and block tables after step i, and a sentence about it. Block 0 is the null block."""
    cache = moment.cache
    said = [f"step {i + 1}: {len(cache.tables)} running"]
    said += [f"block {source} copied to {target}" for source, target in moment.copies]
    counts = dict(enumerate(cache.ref_counts))
    return block_table(cache.num_blocks + 1, dict(cache.tables), ref_counts=counts, cached=cache.cached), "; ".join(said)


# Time, measured ---------------------------------------------------------------------------------------------------------------


class AttentionBench:
    """One layer's decode attention for a few rows: keys gathered through block tables, or read where a strip lies."""

    def __init__(self, model: Transformer, most: int = CONTEXTS[-1], rows: int = 4) -> None:
        self.config, self.dtype, self.most, self.rows = model.config, model.dtype, most, rows
        self.store = PlainKVStore.allocate(model.config, (rows + 1) * most, model.dtype)
        generator = torch.Generator().manual_seed(0)
        self.store.layers[0].copy_(torch.randn(self.store.layers[0].shape, generator=generator))
        self.q = torch.randn(rows, model.config.num_heads, model.config.head_dim, generator=generator).to(model.dtype)

    def batch(self, context: int, block_size: int, scattered: bool) -> ForwardBatch:
        """Rows that decode the token at ``context``, in strips or in blocks that lie in a random order."""
        for name, value in (("context", context), ("block_size", block_size)):
            check_whole(name, value)
            if value > self.most:
                raise ValueError(f"{name} must be at most {self.most}, got {value}")
        each = -(-context // block_size)
        first = -(-self.most // block_size) if block_size > 1 else 1
        blocks = list(range(first, first + self.rows * each))
        if scattered:
            blocks = [blocks[i] for i in torch.randperm(len(blocks), generator=torch.Generator().manual_seed(1)).tolist()]
        tables = [blocks[r * each : (r + 1) * each] for r in range(self.rows)]
        return ForwardBatch.build([Row([0], context - 1, table) for table in tables], block_size)

    @torch.inference_mode()
    def output(self, context: int, block_size: int, way: str, scattered: bool = False) -> torch.Tensor:
        """What one layer gives, [rows, heads, head_dim]."""
        made = self.batch(context, block_size, scattered)
        backend: Any = StripAttention() if way == "strip" else TorchAttention()
        return backend.forward(self.q, 0, self.store, backend.plan(made, self.dtype))

    @torch.inference_mode()
    def measure(
        self, context: int, block_size: int, tick: Callable[[], None] = lambda: None, repeats: int = 30
    ) -> dict[str, Timing]:
        """Both ways in turns: the attention of one layer, its plan made beforehand as in a step."""
        runs: dict[str, tuple[Any, Any]] = {}
        backends: tuple[tuple[str, Any], ...] = ("strip", StripAttention()), ("pages", TorchAttention())
        for way, backend in backends:
            runs[way] = backend, backend.plan(self.batch(context, block_size, way == "pages"), self.dtype)
        samples: dict[str, list[float]] = {way: [] for way in WAYS}
        for i in range(repeats + 3):
            tick()
            for way, (backend, plan) in runs.items():
                before = time.perf_counter()
                backend.forward(self.q, 0, self.store, plan)
                if i >= 3:
                    samples[way].append(time.perf_counter() - before)
        return {way: Timing(tuple(times)) for way, times in samples.items()}


def slower(found: Mapping[str, Timing]) -> float:
    """How many times as long gathering pages takes."""
    return found["pages"].median / found["strip"].median


def attention_figure(seen: Mapping[int, Mapping[str, Timing]]) -> Figure:
    """Seconds against context, both ways, with the spread."""
    series = {
        name: [(n, found[way].median * 1e6, found[way].p10 * 1e6, found[way].p90 * 1e6) for n, found in sorted(seen.items())]
        for way, name in WAYS.items()
    }
    return lines(series, "context of each row", "µs of one layer's attention", logx=True)


def attention_panel(bench: AttentionBench, seen: Mapping[int, Mapping[str, Timing]]) -> Panel:
    """Sliders for context and block size; each place is measured anew, both ways."""
    kept: dict[int, dict[int, Mapping[str, Timing]]] = {16: dict(seen)}

    def run(job: Any, context: int, block: int) -> dict[str, Timing]:
        job.progress(0.0)
        return bench.measure(context, block, job.check, repeats=10)

    def draw(values: dict[str, Any], found: dict[str, Timing] | None) -> tuple[Figure, str]:
        context, block = values["context"], values["block"]
        if found is not None:
            kept.setdefault(block, {})[context] = found
        picture = attention_figure(kept.get(block) or seen)
        where = f"context {context}, blocks of {block}:"
        if found is None:
            return picture, f"<span class='verdict'>{where} measuring …</span>"
        times = f"strip {format_time(found['strip'].median)}, pages {format_time(found['pages'].median)}"
        return picture, f"<span class='verdict'>{where} {times}; pages take <b>{slower(found):.2f} times</b> as long.</span>"

    places = [n for n in CONTEXTS if n <= bench.most]
    controls = {
        "context": w.SelectionSlider(options=places, value=places[-1], description="context"),
        "block": w.SelectionSlider(options=[b for b in SIZES if b <= bench.most], value=16, description="block size"),
    }
    return Panel("attention over strips and pages", controls, run, draw)
