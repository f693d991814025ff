"""Lesson 3.2: weights in few bits: a group's grid, the bytes of a step, its time by rows and bits, and what rounding costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Mapping, Sequence

import ipywidgets as w
import torch
from matplotlib.figure import Figure
from torch import Tensor

from minillm.bench.decode import DecodeBench, Step, Steps, timing_of
from minillm.bench.decode import sweep as taking_turns
from minillm.bench.quality import Evaluation
from minillm.course.panel import Panel
from minillm.course.plots import lines, timings
from minillm.course.predictions import short
from minillm.course.style import COLOURS, DPI, INK, SMALL, SOFT, Drawing, figure, si, styled, titled
from minillm.engine.admission import TokenizerLike
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware
from minillm.perf.roofline import predict, step_work
from minillm.perf.units import format_bytes, format_time
from minillm.quant.calibrate import Seen, calibration_rows, layer_by_layer
from minillm.quant.config import QuantConfig
from minillm.quant.grid import group_size, quantise, round_trip
from minillm.quant.linear import LinearMethod, PlainLinear, default_method
from minillm.quant.quantise import Fitted, QuantMethods, fit

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 128
BITS = {"16 bits": None, "8 bits": QuantConfig("rtn", 8, -1, True), "4 bits": QuantConfig("rtn", 4, 64)}
LAYERS = 2
"""Layers that the comparison of methods fits: enough to see the difference, few enough for a lesson."""


# Pictures of the mechanism ----------------------------------------------------------------------------------------------------


def grid_figure(weights: Tensor, bits: int = 4) -> Figure:
    """One group of weights, the levels of its two grids, and where each weight goes."""
    fig = Drawing(figsize=(7.0, 3.4), dpi=DPI, layout="constrained", facecolor="white")
    for ax, symmetric in zip(fig.subplots(1, 2, sharey=True), (False, True), strict=True):
        styled(ax)
        q = quantise(weights[None], bits, -1, symmetric)
        codes = torch.arange(2**bits) - float(q.zeros)
        for level in (codes * float(q.scales)).tolist():
            ax.axhline(level, color=SOFT, linewidth=0.5)
        after = q.dequantise()[0]
        ax.vlines(range(len(weights)), weights.tolist(), after.tolist(), color=COLOURS[1], linewidth=1.4)
        ax.plot(weights.tolist(), "o", color=COLOURS[0], markersize=3.5, label="weight")
        ax.plot(after.tolist(), "_", color=INK, markersize=7, label="on the grid")
        titled(ax, f"{'symmetric' if symmetric else 'with a zero point'}: step {float(q.scales):.3g}", "weight of the group")
    fig.axes[0].legend(fontsize=SMALL, frameon=False, ncols=2, loc="lower left")
    return fig


def step_bytes(config: ModelConfig, batch: int, context: int, layer_bits: float, head_bits: float) -> dict[str, float]:
    """What one decode step reads, from shapes: bytes of the layers' weights, of the head, of KV in 16 bits."""
    layers = config.layers_matmul_params
    return {
        "layers": layers * layer_bits / 8, "head": config.vocab_size * config.hidden_size * head_bits / 8,
        "KV": step_work(config, [(context - 1, 1)] * batch, logits=batch).kv_read_bytes,
    }  # fmt: skip


STORED = {"16 bits": (16.0, 16.0), "8 bits": (8.0, 8.0), "4 bits": (4 + 32 / 64, 8.0), "4 bits, head in 16": (4 + 32 / 64, 16.0)}
"""Bits per weight of layers and head; a group of 64 adds two numbers of 16 bits."""


def bytes_figure(config: ModelConfig, places: Sequence[tuple[int, int]]) -> Figure:
    """Stacked bytes of a decode step at some (batch, context), by format."""
    fig = Drawing(figsize=(7.0, 1.2 + 1.15 * len(places)), dpi=DPI, layout="constrained", facecolor="white")
    for ax, (batch, context) in zip(fig.subplots(len(places), 1, squeeze=False)[:, 0], places, strict=True):
        styled(ax)
        whole = sum(step_bytes(config, batch, context, 16, 16).values())
        for row, bits in enumerate(STORED.values()):
            left = 0.0
            for i, (part, size) in enumerate(step_bytes(config, batch, context, *bits).items()):
                label = part if row == 0 else None
                hatch = ("", "////", "....")[i]
                ax.barh(row, size, left=left, color=COLOURS[i], hatch=hatch, edgecolor="white", height=0.68, label=label)
                left += size
            ax.text(left, row, f" {si(left, 'B')} (÷{whole / left:.2f})" if row else f" {si(left, 'B')}",
                    va="center", fontsize=SMALL, color=INK)  # fmt: skip
        ax.set_yticks(range(len(STORED)), list(STORED), fontsize=SMALL)
        ax.set_ylim(len(STORED) - 0.4, -0.6)
        ax.set_xlim(0, whole * 1.25)
        ax.xaxis.set_major_formatter(lambda v, _: si(v, "B"))
        ax.grid(False, axis="y")
        titled(ax, f"batch {batch}, context {context:,}")
    handles, labels = fig.axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper right", ncols=3, fontsize=SMALL, frameon=False)
    return fig


# The measurement --------------------------------------------------------------------------------------------------------------


def benches(models: Mapping[str, Transformer]) -> dict[str, DecodeBench]:
    """A bench for decode steps of up to 32 rows for each model."""
    return {name: DecodeBench(model, most=CONTEXT, batch=ROWS[-1]) for name, model in models.items()}


def sweep(made: Mapping[str, DecodeBench], rows: Sequence[int], repeats: int = 5) -> Steps:
    """{format: {rows: step}}, formats taking turns at each number of rows."""
    return taking_turns(made, rows, lambda name, n: made[name].measure(CONTEXT, n, True, repeats=repeats))


def crossover(found: Steps, name: str, base: str = "16 bits") -> str:
    """Where fewer bits stop paying among the rows that were measured, in words."""
    rows = sorted(set(found[name]) & set(found[base]))
    gains = [found[base][n].timing.median / found[name][n].timing.median for n in rows]
    first = next((n for n, gain in zip(rows, gains, strict=True) if gain <= 1.05), None)
    said = ", ".join(f"{n}: {gain:.2f}×" for n, gain in zip(rows, gains, strict=True))
    return f"{name} against {base} by rows: {said}; " + (f"no gain from {first} rows on" if first else "a gain at each of them")


def time_figure(found: Steps, here: int | None = None) -> Figure:
    """Milliseconds of a step against rows, one line per format, with the spread of the runs."""
    return timings(timing_of(found), "rows (requests that decode together)", here=here)


def rows_panel(made: Mapping[str, DecodeBench], hardware: Hardware, seen: Steps | None = None) -> Panel:
    """Rows and bits; each place is measured anew, and leaves its point on the picture."""
    kept: Steps = {name: dict((seen or {}).get(name, {})) for name in made}
    first = next(iter(made))

    def run(job: Any, rows: int, bits: str) -> dict[str, Step]:
        job.progress(0.0)
        found = {bits: made[bits].measure(CONTEXT, rows, True, job.check)}
        if rows not in kept[first]:
            job.progress(0.5)
            found[first] = made[first].measure(CONTEXT, rows, True, job.check)
        return found

    def draw(values: dict[str, Any], found: dict[str, Step] | None) -> tuple[Figure, str]:
        rows, bits = values["rows"], values["bits"]
        for name, step in (found or {}).items():
            kept[name][rows] = step
        return time_figure(kept, here=rows), explain(made[bits], hardware, rows, bits, kept, first, found is not None)

    controls = {
        "rows": w.SelectionSlider(options=list(ROWS), value=1, description="rows"),
        "bits": w.SelectionSlider(options=list(made), value=list(made)[-1], description="bits"),
    }
    return Panel("a step by rows and bits", controls, run, draw)


def explain(
    bench: DecodeBench, hardware: Hardware, rows: int, bits: str, kept: Steps, base: str, measured: bool
) -> str:  # fmt: skip
    work = bench.work(CONTEXT, rows, True)
    floor = predict(work, hardware)
    said = f"{rows} row{'s' if rows > 1 else ''}, {bits}: reads {format_bytes(work.weight_bytes)} of weights, "
    said += f"floor {format_time(floor.seconds)} ({floor.bound})"
    if not measured:
        return f"<span class='verdict'>{said}; measuring …</span>"
    here, there = kept[bits][rows].timing, kept[base][rows].timing
    factor = short(there.median / here.median)
    return f"<span class='verdict'>{said}; <b>measured {here}, {factor} times as fast as {base}</b>.</span>"


# What rounding costs ----------------------------------------------------------------------------------------------------------


def beginning(model: Transformer, layers: int = LAYERS) -> Transformer:
    """The first layers of a model, as a model of their own."""
    config = replace(model.config, num_layers=layers)
    return Transformer(config, model.dense_weights(), PlainLinear()).eval()


def inputs_seen(model: Transformer, tokenizer: TokenizerLike, rows: int = 2) -> dict[str, Seen]:
    """What the linear layers of a model are fed by some of the calibration text, by name."""
    found: dict[str, Seen] = {}
    work = Transformer(model.config, model.dense_weights(), PlainLinear()).eval()
    layer_by_layer(work, calibration_rows(None, tokenizer, work)[:rows], lambda prefix, layer, seen: found.update(
        {f"{prefix}.{name}": s for name, s in seen.items()}
    ))  # fmt: skip
    return found


def outlier_figure(seen: Mapping[str, Seen]) -> Figure:
    """Mean |x| of every input channel, sorted, for the layers of one block."""
    series = {}
    for name, s in seen.items():
        magnitudes = s.magnitude.sort(descending=True).values
        relative = (magnitudes / magnitudes.median()).tolist()
        places = [i for i in range(len(relative)) if i & (i + 1) == 0 or i == len(relative) - 1]  # 0, 1, 3, 7, …
        series[name.split(".")[-1]] = [(i + 1, relative[i]) for i in places]
    return lines(series, "input channel, largest first", "mean |x| / the median channel's", logx=True, logy=True)


@dataclass(frozen=True)
class Compared:
    """Fits of the first layers by each method, on one grid."""

    grid: QuantConfig
    fits: Mapping[str, Fitted]

    @property
    def losses(self) -> dict[str, dict[str, float]]:
        """{layer: {method: mean squared error of its output on calibration inputs, relative to rounding to nearest}}."""
        found: dict[str, dict[str, float]] = {}
        for method, fitted in self.fits.items():
            for loss in fitted.losses:
                found.setdefault(loss.name.removeprefix("model.layers."), {})[method] = loss.chosen / loss.nearest
        return found


def compare_methods(model: Transformer, tokenizer: TokenizerLike, grid: QuantConfig, rows: int = 4) -> Compared:
    """RTN, AWQ and GPTQ for the first layers, on a part of the calibration text."""
    part = beginning(model)
    texts = calibration_rows(None, tokenizer, part)[:rows]
    made = {m: fit(part, replace(grid, method=m, calibration=texts)) for m in ("rtn", "awq", "gptq")}
    return Compared(grid, made)


def loss_figure(compared: Compared) -> Figure:
    """Each layer's loss with AWQ and GPTQ as a share of rounding to nearest's."""
    losses = compared.losses
    fig, ax = figure(7.0, 0.9 + 0.42 * len(losses))
    for i, method in enumerate(("awq", "gptq")):
        places = [row + 0.2 * (2 * i - 1) for row in range(len(losses))]
        shares = [by_method[method] for by_method in losses.values()]
        ax.barh(places, shares, height=0.36, color=COLOURS[i], hatch=("", "////")[i], edgecolor="white", label=method.upper())
    ax.axvline(1, color=SOFT, linestyle=(0, (2, 2)), linewidth=1.2)
    ax.set_yticks(range(len(losses)), list(losses), fontsize=SMALL)
    ax.set_ylim(len(losses) - 0.5, -0.5)
    ax.grid(False, axis="y")
    titled(ax, None, "mean squared error of the output, rounding to nearest = 1")
    ax.legend(fontsize=SMALL, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return fig


class OnGrid(PlainLinear):
    """The weight on a grid, kept in full: what a layer of codes multiplies by, ready sooner than its codes."""

    def __init__(self, bits: int, group: int, symmetric: bool):
        self.bits, self.group, self.symmetric = bits, group, symmetric

    def pack(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
        size = group_size(weight.shape[1], self.group)
        return super().pack(round_trip(weight, self.bits, size, self.symmetric), bias)


@dataclass(frozen=True)
class Rounded:
    """Every layer on the grid of a config, the head on its own."""

    config: QuantConfig

    def for_layer(self, name: str) -> LinearMethod:
        c = self.config
        if name != "lm_head":
            return OnGrid(c.bits, c.group, c.symmetric)
        return PlainLinear() if c.head_bits is None else OnGrid(c.head_bits, -1, True)


def rounded(model: Transformer, config: QuantConfig) -> Transformer:
    """A model whose weights are those that ``quantise_model`` gives by rounding to nearest."""
    return Transformer(model.config, model.dense_weights(), Rounded(config)).eval()


class SomeLayers:
    """Codes for the layers that have them, plain weights for all others."""

    def __init__(self, methods: QuantMethods, names: Sequence[str], model: Transformer):
        self.methods, self.names, self.other = methods, set(names), default_method(model.dtype, model.device)

    def for_layer(self, name: str) -> LinearMethod:
        return self.methods.for_layer(name) if name in self.names else self.other


def with_fitted(model: Transformer, compared: Compared, method: str) -> Transformer:
    """The whole model with its first layers as a method left them; the rest is as it was."""
    fitted = compared.fits[method]
    weights = {**model.dense_weights(), **{n: t for n, t in fitted.weights.items() if n.startswith("model.layers.")}}
    methods = QuantMethods(replace(compared.grid, dense_from=1), model.dtype, model.device, fitted.codes)
    return Transformer(model.config, weights, SomeLayers(methods, list(fitted.codes), model)).eval()


def task_table(evaluation: Evaluation, models: Mapping[str, Transformer]) -> str:
    """KL in thousandths of a nat and agreement of the most likely token, by task."""
    rows = [f"{'':26}" + "".join(f"{task:>17}" for task in evaluation.rows)]
    for name, model in models.items():
        scores = evaluation.text_scores(model).values()
        rows.append(f"{name:26}" + "".join(f"{1e3 * s.kl:10.1f} {s.agreement:5.0%} " for s in scores))
    return "\n".join(row.rstrip() for row in rows)
