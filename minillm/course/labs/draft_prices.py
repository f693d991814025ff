"""Lesson 6.1: what checking drafts costs here, and the speed-up that acceptance and cost make; pictures and the panel."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import ipywidgets as w
import numpy as np
import torch
from matplotlib.figure import Figure

from minillm.course.panel import Panel
from minillm.course.predictions import short
from minillm.course.style import COLOURS, INK, LINES, MARKERS, SMALL, SOFT, figure, titled
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.runner import ModelRunner
from minillm.llm import LLM
from minillm.perf.timing import compare
from minillm.spec.length import tokens_per_pass
from minillm.spec.ngram import NgramProposer

GAMMAS, BATCHES = (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 4, 8, 16)
CONTEXT = 64


class Bench:
    """Times steps of the engine's model: some requests with CONTEXT tokens each that compute one token, or gamma + 1."""

    def __init__(self, llm: LLM, context: int = CONTEXT):
        self.llm, self.context, self.size = llm, context, llm.engine.runner.block_size
        self.kept: dict[tuple[int, int], float] = {}

    def batch(self, batch: int, tokens: int) -> ForwardBatch:
        """Every row with blocks of its own; the engine must have as many."""
        each = -(-(self.context + tokens) // self.size)
        if batch * each > self.llm.engine.pool_size.num_blocks:
            raise ValueError(f"{batch} rows need {batch * each} blocks, the pool has {self.llm.engine.pool_size.num_blocks}")
        vocab = self.llm.model.config.vocab_size
        ids = [[(7 * i + 11 * r + 3) % vocab for i in range(tokens)] for r in range(batch)]
        rows = [Row(ids[r], self.context, range(1 + r * each, 1 + (r + 1) * each), num_drafts=tokens - 1) for r in range(batch)]
        return ForwardBatch.build(rows, self.size, device=self.llm.model.device)

    def v(self, batch: int, gamma: int, rounds: int = 3) -> float:
        """Seconds of a step in which ``batch`` requests check gamma drafted tokens, in seconds of one in which they decode."""
        if (batch, gamma) not in self.kept:
            runner = self.llm.engine.runner
            steps = {name: self.batch(batch, n) for name, n in (("one", 1), ("several", gamma + 1))}
            fns = {name: (lambda b=b: runner.forward(b)) for name, b in steps.items()}
            with torch.inference_mode():
                found = compare(fns, rounds)
            self.kept[batch, gamma] = found.timings["several"].median / found.timings["one"].median
        return self.kept[batch, gamma]

    def costs(self, layers: Sequence[int], ids: Sequence[int], rounds: int = 5) -> dict[str, float]:
        """c of two drafters, in target steps for one drafted token: a lookup in ids, and some of the target's layers."""
        runner, model = self.llm.engine.runner, self.llm.model
        small = ModelRunner(model.skipping(layers), runner.store, runner.backend, self.size)
        one, lookup = self.batch(1, 1), NgramProposer()
        fns = {
            "step": lambda: runner.forward(one), "layers": lambda: small.forward(one),
            "lookup": lambda: lookup.continuation(ids, 4),
        }  # fmt: skip
        with torch.inference_mode():
            found = compare(fns, rounds)
        step = found.timings["step"].median
        return {"lookup": found.timings["lookup"].median / 4 / step, "layers": found.timings["layers"].median / step}


def speedup(alpha: float, gamma: int, c: float, v: float) -> float:
    """S = E / (gamma c + v): tokens of a pass against what the pass and its draft cost, in steps."""
    return tokens_per_pass(alpha, gamma) / (gamma * c + v)


def v_between(points: Mapping[int, float], gamma: float) -> float:
    """v at any gamma: straight lines between measured points and (0, 1), the last one continued."""
    xs, ys = zip(*sorted({0: 1.0, **points}.items()))
    if gamma <= xs[-1]:
        return float(np.interp(gamma, xs, ys))
    slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0]) if xs[-1] else 0.0
    return float(ys[-1] + slope * (gamma - xs[-1]))


def acceptance_figure(gammas: Sequence[int] = (1, 2, 4, 8)) -> Figure:
    """Tokens of a pass against alpha, for some draft lengths."""
    fig, ax = figure(7.0, 3.2)
    alphas = np.linspace(0, 1, 101)
    for i, gamma in enumerate(gammas):
        curve = [tokens_per_pass(a, gamma) for a in alphas]
        ax.plot(alphas, curve, color=COLOURS[i], linestyle=LINES[i], linewidth=1.6)
        ax.annotate(f"γ = {gamma}", (1.0, gamma + 1), (5, -3), textcoords="offset points", fontsize=SMALL, color=COLOURS[i])
    ax.set_xlim(0, 1.08)
    titled(ax, None, "α, how likely a drafted token stands when those before it did", "tokens per pass, E")
    return fig


def speedup_figure(alpha: float, c: float, points: Mapping[int, float], gamma: int, batch: int) -> Figure:
    """S against the draft length: with the measured cost of checking, and as if checking were free."""
    fig, ax = figure(7.0, 3.6)
    xs = list(range(0, GAMMAS[-1] + 1))
    ax.plot(xs, [speedup(alpha, g, c, 1.0) for g in xs], color=COLOURS[0], linestyle=LINES[1], linewidth=1.4, label="if v were 1")
    if points:
        curve = [speedup(alpha, g, c, v_between(points, g)) for g in xs]
        ax.plot(xs, curve, color=COLOURS[1], linewidth=1.6, label=f"with v of this machine, {batch} at once")
        known = sorted(points)
        at = [speedup(alpha, g, c, points[g]) for g in known]
        ax.plot(known, at, MARKERS[1], color=COLOURS[1], markersize=6, markeredgecolor="white", label="v measured here")
    ax.axhline(1.0, color=SOFT, linewidth=1.0)
    ax.axvline(gamma, color=SOFT, linestyle=(0, (2, 2)), linewidth=1.2)
    ax.set_ylim(bottom=0)
    titled(ax, None, "γ, drafted tokens per pass", "speed-up S")
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, fontsize=SMALL, frameon=False, labelcolor=INK)
    return fig


def explain(alpha: float, gamma: int, c: float, v: float | None) -> str:
    """The verdict under the picture."""
    e = tokens_per_pass(alpha, gamma)
    if v is None:
        return f"<span class='verdict'>E = {e:.2f} tokens per pass; measuring v …</span>"
    s = speedup(alpha, gamma, c, v)
    name = "faster" if s >= 1 else "slower"
    said = f"E = {e:.2f} tokens per pass, v = {v:.2f}, γ·c = {gamma * c:.2f}"
    return f"<span class='verdict'>{said}: <b>S = {short(s)}, {name} than without drafts</b></span>"


def speedup_panel(bench: Bench, alpha: float, c: float) -> Panel:
    """Sliders for acceptance, draft length, the draft's cost and the batch; v is measured where the sliders stop."""

    def run(job: Any, alpha: float, gamma: int, c: float, batch: int) -> float:
        job.progress(0.0)
        return bench.v(batch, gamma)

    def draw(values: dict[str, Any], v: float | None) -> tuple[Figure, str]:
        points = {g: x for (b, g), x in bench.kept.items() if b == values["batch"]}
        picture = speedup_figure(values["alpha"], values["c"], points, values["gamma"], values["batch"])
        return picture, explain(values["alpha"], values["gamma"], values["c"], v)

    controls = {
        "alpha": w.FloatSlider(value=round(alpha, 2), min=0, max=1, step=0.05, description="α"),
        "gamma": w.SelectionSlider(options=GAMMAS, value=4, description="γ"),
        "c": w.FloatSlider(value=round(c, 2), min=0, max=1, step=0.05, description="c"),
        "batch": w.SelectionSlider(options=BATCHES, value=1, description="batch"),
    }
    return Panel("the speed-up of drafts", controls, run, draw)
