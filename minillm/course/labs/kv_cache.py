"""Lesson 1.1: one decoding step at any position, with a KV cache and without: pictures of it, timings, and the live panel."""

from __future__ import annotations

import time
from typing import Any, Mapping, Sequence

import ipywidgets as w
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention
from minillm.bench.decode import DecodeBench, Step
from minillm.cache.kv_store import PlainKVStore
from minillm.checking import check_whole
from minillm.course.panel import Panel
from minillm.course.plots import Point, Roof, lines, roofline
from minillm.course.predictions import short
from minillm.course.style import COLOURS, DPI, INK, LINES, MARKERS, SMALL, SOFT, Drawing, figure, titled
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.runner import ModelRunner
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware
from minillm.perf.roofline import predict, step_work
from minillm.perf.units import format_time

POSITIONS = (16, 32, 64, 128, 256, 512)
BATCHES = (1, 2, 4)
WAYS = {"recompute": "without a cache", "cache": "with a cache"}


# Pictures of the mechanism, derived from shapes alone -------------------------------------------------------------------------


def work_grid(prompt: int, new: int) -> Figure:
    """Rows are steps, columns positions: what each step computes, and what it reads from the cache instead."""
    check_whole("prompt", prompt)
    check_whole("new", new)
    total = prompt + new - 1
    fig = Drawing(figsize=(7.0, 1.5 + 0.26 * new), dpi=DPI, layout="constrained", facecolor="white")
    axes = fig.subplots(1, 2)
    computed: dict[str, Any] = {"facecolor": COLOURS[0]}
    kept: dict[str, Any] = {"facecolor": "#F2F2F2", "hatch": "////"}
    for ax, cached in zip(axes, (False, True), strict=True):
        count = 0
        for step in range(new):
            for position in range(prompt + step):
                old = cached and position < prompt + step - 1 and step > 0
                count += not old
                ax.add_patch(Rectangle((position, step), 0.9, 0.9, edgecolor=SOFT, linewidth=0.5, **(kept if old else computed)))
        ax.set_xlim(-0.2, total + 0.2)
        ax.set_ylim(new + 0.1, -0.2)
        ax.set_yticks([s + 0.45 for s in range(new)], [f"step {s + 1}" for s in range(new)], fontsize=SMALL)
        ax.set_xticks([0.45, prompt - 0.55, total - 0.55], ["1", str(prompt), str(total)], fontsize=SMALL)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        titled(ax, f"{'with' if cached else 'without'} a cache: {count} token-forwards", "position")
    looks = {"computed in this step": computed, "K and V read": kept}
    handles = [Patch(edgecolor=SOFT, label=label, **look) for label, look in looks.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    return fig


def growth_figure(config: ModelConfig, most: int) -> Figure:
    """FLOPs of one step against position: the whole text again, one token, and attention's share of that one token."""
    positions = [2**i for i in range(most.bit_length()) if 2**i <= most]
    series: dict[str, list[tuple[float, float]]] = {"the whole text again": [], "one token": [], "of it: attention": []}
    for n in positions:
        series["the whole text again"].append((n, step_work(config, [(0, n)], logits=1).total_flops))
        series["one token"].append((n, step_work(config, [(n - 1, 1)], logits=1).total_flops))
        series["of it: attention"].append((n, attention_flops(config, n)))
    return lines(series, "position of the new token", "FLOP per step", logx=True, logy=True)


def attention_flops(config: ModelConfig, position: int) -> int:
    """Arithmetic of one new query over ``position`` keys in all layers: scores and weighted sum, two FLOP a multiply-add."""
    return 4 * config.num_layers * config.q_size * position


def crossing(config: ModelConfig) -> int:
    """The first position at which attention is at least half of a cached step's arithmetic."""
    return -(-2 * config.matmul_params // (4 * config.num_layers * config.q_size))


# The measurement --------------------------------------------------------------------------------------------------------------


def ratio(found: Mapping[str, Step]) -> float:
    """How many times as long the step takes without a cache."""
    return found["recompute"].timing.median / found["cache"].timing.median


def explain(position: int, batch: int, floors: Mapping[str, Any], found: Mapping[str, Step] | None) -> str:
    """The verdict under the picture: what each way was predicted to take and took, and the two factors."""
    said = [f"position {position}, batch {batch}:"]
    for way, name in WAYS.items():
        measured = f", measured {found[way].timing}" if found else ""
        said.append(f"{name} predicted {format_time(floors[way].seconds)}, <b>{floors[way].bound}</b>-bound{measured};")
    factor = f"factor predicted {short(floors['recompute'].seconds / floors['cache'].seconds)}"
    said.append(f"{factor}, <b>measured {short(ratio(found))}</b>." if found else f"{factor}; measuring …")
    return f"<span class='verdict'>{' '.join(said)}</span>"


def time_figure(
    bench: DecodeBench, hardware: Hardware, batch: int, seen: Mapping[int, Mapping[str, Step]],
    positions: Sequence[int] = POSITIONS, here: int | None = None,
) -> Figure:
    """Seconds per step against position: the roofline's prediction as lines, what was measured as points with their spread."""
    fig, ax = figure(7.0, 3.7)
    for i, (way, name) in enumerate(WAYS.items()):
        colour = COLOURS[1 - i]
        floors = [predict(bench.work(n, batch, way == "cache"), hardware).seconds for n in positions]
        ax.plot(positions, floors, color=colour, linestyle=LINES[1 - i], linewidth=1.6, label=f"{name}, predicted")
        points = [(n, found[way].timing) for n, found in sorted(seen.items())]
        if points:
            spread = [[t.median - t.p10 for _, t in points], [t.p90 - t.median for _, t in points]]
            ax.errorbar(
                [n for n, _ in points], [t.median for _, t in points], yerr=spread, fmt=MARKERS[i], color=colour, markersize=7,
                markeredgecolor="white", ecolor=INK, elinewidth=1, capsize=3, zorder=5, label=f"{name}, measured",
            )  # fmt: skip
    if here is not None:
        ax.axvline(here, color=SOFT, linestyle=(0, (2, 2)), linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(list(positions), [str(n) for n in positions])
    ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0), numticks=12))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda v, _: format_time(v).replace(".00", "").replace(".0 ", " "))
    titled(ax, None, "position of the new token", f"time of one step, batch {batch}")
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=SMALL, frameon=False, labelcolor=INK)
    return fig


def roofline_figure(bench: DecodeBench, hardware: Hardware, found: Mapping[str, Step], position: int) -> Figure:
    """Both ways of making one token, on the machine's roofline."""
    roof = Roof(f"{hardware.name}, {bench.precision}", hardware.rate(bench.precision), hardware.bandwidth)
    points = []
    for way, name in WAYS.items():
        work, timing = found[way].work, found[way].timing
        where = f"{name}, position {position}"
        points.append(Point(where, work.total_flops, work.total_bytes, timing.median, timing.p10, timing.p90))
    return roofline([roof], points)


def decode_panel(
    bench: DecodeBench, hardware: Hardware, seen: dict[int, dict[int, dict[str, Step]]] | None = None, position: int = 128
) -> Panel:
    """Sliders for position and batch; every place is measured anew, both ways, and leaves its points on the picture.

    seen: {batch: {position: both steps}} measured before.
    """
    kept: dict[int, dict[int, dict[str, Step]]] = {b: dict(points) for b, points in (seen or {}).items()}

    def run(job: Any, position: int, batch: int) -> dict[str, Step]:
        job.progress(0.0)
        cached = bench.measure(position, batch, True, job.check)
        job.progress(0.3)
        return {"cache": cached, "recompute": bench.measure(position, batch, False, job.check)}

    def draw(values: dict[str, Any], found: dict[str, Step] | None) -> tuple[Figure, str]:
        position, batch = values["position"], values["batch"]
        if found is not None:
            kept.setdefault(batch, {})[position] = found
        floors = {way: predict(bench.work(position, batch, way == "cache"), hardware) for way in WAYS}
        places = [n for n in POSITIONS if n <= bench.most]
        picture = time_figure(bench, hardware, batch, kept.get(batch, {}), places, here=position)
        return picture, explain(position, batch, floors, found)

    places = [n for n in POSITIONS if n <= bench.most]
    controls = {
        "position": w.SelectionSlider(options=places, value=min(position, places[-1]), description="position"),
        "batch": w.SelectionSlider(options=[b for b in BATCHES if b <= bench.batch], value=1, description="batch"),
    }
    return Panel("a step with and without a KV cache", controls, run, draw)


# What the lesson asks the engine ----------------------------------------------------------------------------------------------


def time_tokens(llm: Any, prompt: str, tokens: int) -> tuple[str, list[float]]:
    """The text that an engine writes greedily and the seconds that each step took, the prompt's first."""
    from minillm import SamplingParams

    name = llm.engine.add_request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    seconds, text = [], ""
    while llm.engine.has_work:
        before = time.perf_counter()
        outputs = llm.engine.step()
        seconds.append(time.perf_counter() - before)
        text = next((o.text for o in outputs if o.request_id == name), text)
    return text, seconds


@torch.inference_mode()
def last_logits(model: Transformer, ids: Sequence[int], cached: bool) -> Tensor:
    """Logits [vocab] after the last of ``ids``: all tokens in one pass, or all but one first and then that one."""
    store = PlainKVStore.allocate(model.config, len(ids) + 1, model.dtype, model.device)
    runner = ModelRunner(model, store, TorchAttention(model.config.sliding_window), len(ids) + 1)
    done, logits = 0, torch.empty(0)
    for stop in (len(ids) - 1, len(ids)) if cached else (len(ids),):
        logits = runner.forward(ForwardBatch.build([Row(ids[done:stop], done, [0])], len(ids) + 1, device=model.device))[0]
        done = stop
    return logits[0].float()


def describe_times(name: str, seconds: Sequence[float]) -> str:
    """One line: how many steps, how long the prompt's took and how long the last."""
    return f"{name}: {len(seconds)} steps; the prompt's took {format_time(seconds[0])}, the last {format_time(seconds[-1])}"
