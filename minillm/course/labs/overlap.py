"""Lesson 5.3: where a small step's time goes, what can be hidden of it, and what padding to fixed sizes costs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.checking import check_whole
from minillm.course.panel import Panel
from minillm.course.plots import lines
from minillm.course.style import COLOURS, INK, LINES, MARKERS, SMALL, SOFT, figure, titled
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.graphs import PowersOfTwo
from minillm.llm import LLM
from minillm.model.transformer import Transformer
from minillm.perf.timing import Comparison, Timing, compare
from minillm.perf.units import format_time
from minillm.sampling_params import SamplingParams

# Where a step's time goes: the same step with more and more of it left out ----------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """One decoding step of ``rows`` requests, timed whole, without the host's work, and as bare matrix products."""

    rows: int
    timing: Comparison

    def seconds(self, name: str) -> float:
        return self.timing.timings[name].median

    @property
    def host(self) -> float:
        """Share of the step that is scheduling, building the batch, sampling and detokenising."""
        return max(1 - 1 / self.timing.ratio("step", "forward"), 0.0)

    @property
    def operators(self) -> float:
        """Share that is the forward pass without its products: small operators, Python, and starting them all."""
        return max(1 - self.host - self.products, 0.0)

    @property
    def products(self) -> float:
        return min(1 / self.timing.ratio("step", "products"), 1.0)

    def __str__(self) -> str:
        rows = "1 row " if self.rows == 1 else f"{self.rows} rows"
        return (
            f"{rows:8} step {format_time(self.seconds('step'))}: products {self.products:.0%}, other operators "
            f"{self.operators:.0%}, host {self.host:.0%}"
        )


class Bare:
    """A model's forward pass over keys and values that are noise: no engine around it."""

    def __init__(self, model: Transformer, context: int = 64, most: int = 32, block_size: int = 16):
        blocks = -(-context // block_size)
        self.model, self.context, self.most, self.block_size, self.blocks = model, context, most, block_size, blocks
        self.store = PlainKVStore.allocate(model.config, (1 + most * blocks) * block_size, model.dtype, model.device)
        self.backend = TorchAttention(model.config.sliding_window)
        for kv in self.store.layers:
            kv.copy_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(0)))

    def batch(self, rows: int) -> ForwardBatch:
        """``rows`` requests that decode one token each."""
        check_whole("rows", rows)
        if rows > self.most:
            raise ValueError(f"rows must be at most {self.most}, got {rows}")
        tables = [range(1 + r * self.blocks, 1 + (r + 1) * self.blocks) for r in range(rows)]
        return ForwardBatch.build([Row([3 + r], self.context - 1, table) for r, table in enumerate(tables)], self.block_size)

    def forward(self, rows: int) -> Callable[[], Any]:
        """A call that computes the logits of one step."""
        batch = self.batch(rows)
        plan = self.backend.plan(batch, self.model.dtype)
        return torch.inference_mode()(lambda: self.model(batch, self.store, self.backend, plan))

    def products(self, rows: int) -> Callable[[], Any]:
        """A call that computes the step's matrix products, all weights once, and nothing else."""
        c, layers = self.model.config, list(self.model.layers)
        x, q, inner = (torch.randn(rows, n).to(self.model.dtype) for n in (c.hidden_size, c.q_size, c.intermediate_size))

        def run() -> None:
            for layer in layers:
                layer.attention.qkv(x), layer.attention.out(q), layer.mlp.gate_up(x), layer.mlp.down(inner)  # type: ignore[operator,union-attr]
            self.model.head(x)

        return torch.inference_mode()(run)


def take_apart(llm: LLM, rows: int, context: int = 64, rounds: int = 8) -> Parts:
    """Time a step of the engine in which ``rows`` requests decode, its forward pass alone, and its matrix products alone."""
    bare = Bare(llm.model, context, rows)
    names = [llm.engine.add_request([3 + r] * (context - 4), endless(rounds + 8)) for r in range(rows)]
    while llm.engine.scheduler.waiting or any(r.num_output_tokens < 2 for r in llm.engine.scheduler.running):
        llm.engine.step()
    calls = {"step": llm.engine.step, "forward": bare.forward(rows), "products": bare.products(rows)}
    found = Parts(rows, compare(calls, rounds))
    for name in names:
        llm.engine.abort(name)
    return found


def launches_of(llm: LLM, rows: int) -> int:
    """Operators that one decoding step of ``rows`` requests starts, by the meter: a count, not a timing."""
    names = [llm.engine.add_request([3 + r], endless(4)) for r in range(rows)]
    llm.engine.step()
    before = llm.meter.launches
    llm.engine.step()
    for name in names:
        llm.engine.abort(name)
    return int(llm.meter.launches - before)


def take_turns(llms: Mapping[str, LLM], prompts: Sequence[Any], steps: int = 4, rounds: int = 4) -> Comparison:
    """Seconds of a decoding step of each engine. An engine has ``steps`` in a row and waits idle, whatever it has in flight done,
    while the others have theirs; the first step of a turn fills the pipeline again and does not count."""
    samples: dict[str, list[float]] = {name: [] for name in llms}
    ids = {name: [llm.engine.add_request(p, endless(rounds * (steps + 1) + 8)) for p in prompts] for name, llm in llms.items()}
    for llm in llms.values():
        while llm.engine.scheduler.waiting or any(r.num_output_tokens < 2 for r in llm.engine.scheduler.running):
            llm.engine.step()
    names = list(llms)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            step = llms[name].engine.step
            step()
            started = time.perf_counter()
            for _ in range(steps):
                step()
            samples[name].append((time.perf_counter() - started) / steps)
    for name, llm in llms.items():
        for request in ids[name]:
            llm.engine.abort(request)
    return Comparison({name: Timing(tuple(taken)) for name, taken in samples.items()})


def endless(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def parts_figure(parts: Sequence[Parts]) -> Figure:
    """One bar a batch size, the whole step as 100 %."""
    fig, ax = figure(7.0, 1.2 + 0.42 * len(parts))
    kinds = {"products": (COLOURS[0], ""), "operators": (COLOURS[2], "...."), "host": (COLOURS[1], "////")}
    names = {"products": "matrix products", "operators": "other operators, and starting them", "host": "host"}
    for y, p in enumerate(parts):
        left = 0.0
        for kind, (colour, hatch) in kinds.items():
            share = 100 * getattr(p, kind)
            ax.barh(y, share, left=left, height=0.7, color=colour, hatch=hatch, edgecolor="white", linewidth=0.8)
            left += share
        ax.text(101, y, format_time(p.seconds("step")), va="center", fontsize=SMALL, color=INK)
    ax.set_yticks(range(len(parts)), ["1 row" if p.rows == 1 else f"{p.rows} rows" for p in parts])
    ax.invert_yaxis()
    ax.set_xlim(0, 118)
    ax.grid(False, axis="y")
    titled(ax, None, "share of one decoding step (%)")
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=names[k]) for k, (c, h) in kinds.items()]
    fig.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=SMALL, frameon=False)
    return fig


# What can be hidden: arithmetic -----------------------------------------------------------------------------------------------


def overlap_factor(host: float, device: float) -> float:
    """How many times as fast a step is when the host's part runs beside the device's: (h + d) / max(h, d), never above 2."""
    return (host + device) / max(host, device)


def replay_factor(share: float) -> float:
    """Amdahl's bound: a step is 1 / (1 - share) times as fast when that share of it, Python and launches, takes no time."""
    return 1 / (1 - share)


def hiding_figure(host: float) -> Figure:
    """Step time of a host that needs ``host`` seconds, over devices from much faster to much slower than it."""
    device = [host * 2 ** (i / 2) for i in range(-6, 9)]
    series = {
        "one after the other: host + device": [(1e3 * d, 1e3 * (host + d)) for d in device],
        "overlapped: the longer of the two": [(1e3 * d, 1e3 * max(host, d)) for d in device],
        "no host at all": [(1e3 * d, 1e3 * d) for d in device],
    }
    return lines(series, "device time of a step (ms)", "step (ms)", logx=True, logy=True, marks={"host = device": 1e3 * host})


# What padding costs -----------------------------------------------------------------------------------------------------------


def padding_share(rows: int, most: int) -> float:
    """Share of a replayed batch that is computed for nobody."""
    size = PowersOfTwo().bucket(rows, most)
    return (size - rows) / size


def padding_figure(most: int, seen: Mapping[int, Timing] | None = None, here: int | None = None) -> Figure:
    """Rows that are computed against rows that are wanted, and, on the right axis, the measured time of a step of either."""
    rule, rows = PowersOfTwo(), range(1, most + 1)
    fig, ax = figure(7.0, 3.4)
    ax.step(rows, [rule.bucket(n, most) for n in rows], where="mid", color=COLOURS[0], linewidth=1.8, label="rows computed")
    ax.plot(rows, rows, color=SOFT, linestyle=LINES[1], linewidth=1.2, label="rows wanted")
    if here is not None:
        ax.plot([here, here], [here, rule.bucket(here, most)], color=COLOURS[1], linewidth=4, alpha=0.6, label="padding")
    ax.set_xlim(0, most + 1)
    ax.set_ylim(0, most + 2)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    titled(ax, None, "requests that decode", "rows")
    if seen:
        other = ax.twinx()
        points = sorted(seen.items())
        other.plot(
            [n for n, _ in points], [1e3 * t.median for _, t in points], MARKERS[1], color=COLOURS[3], markeredgecolor="white",
            markersize=7, label="a step of so many rows, measured (ms, right)",
        )  # fmt: skip
        other.set_ylim(0, 1.25e3 * max(t.median for _, t in points))
        other.set_ylabel("time of a step (ms)", fontsize=SMALL, color=INK)
        other.tick_params(labelsize=SMALL, colors=INK)
    fig.legend(loc="outside upper left", ncols=2, fontsize=SMALL, frameon=False)
    return fig


def padding_panel(bare: Bare, most: int = 32, rows: int = 9) -> Panel:
    """A slider for the requests that decode; a step of that many rows and one of its padded size are measured."""
    kept: dict[int, Timing] = {}
    samples: dict[tuple[int, str], list[float]] = {}
    sizes = [n for n in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32) if n <= min(most, bare.most)]

    def run(job: Any, rows: int) -> Comparison:
        size = PowersOfTwo().bucket(rows, most)
        calls = {"wanted": bare.forward(rows), "padded": bare.forward(size)}
        for i in range(4):  # in pieces, so that a newer place of the slider can stop it
            job.progress(i / 4)
            found = compare(calls, 2)
            for name in calls:
                samples.setdefault((rows, name), []).extend(found.timings[name].samples)
        return Comparison({name: Timing(tuple(samples[rows, name])) for name in calls})

    def draw(values: dict[str, Any], found: Comparison | None) -> tuple[Figure, str]:
        rows = values["rows"]
        size = PowersOfTwo().bucket(rows, most)
        said = f"{rows} rows are computed as {size}: {size - rows} are padding, {padding_share(rows, most):.0%} of the batch"
        if found is None:
            return padding_figure(most, kept, rows), f"{said}; measuring …"
        kept[rows], kept[size] = found.timings["wanted"], found.timings["padded"]
        said += f". On this machine the padded step takes <b>{found.ratio('padded', 'wanted'):.2f} times</b> as long"
        said += f" ({format_time(kept[rows].median)} and {format_time(kept[size].median)})."
        return padding_figure(most, kept, rows), said

    return Panel("padding to fixed sizes", {"rows": w.SelectionSlider(options=sizes, value=rows, description="rows")}, run, draw)

