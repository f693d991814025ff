"""Lesson 2.1: weights and activations in 8 bits: outliers and where they go, time against tokens per step, and what it costs."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import ipywidgets as w
from matplotlib.figure import Figure
from torch import Tensor

from minillm.bench.decode import DecodeBench, Step, Steps, timing_of
from minillm.bench.decode import sweep as taking_turns
from minillm.bench.quality import Evaluation
from minillm.course.labs.int4_weights import task_table
from minillm.course.panel import Panel
from minillm.course.plots import lines, timings
from minillm.course.predictions import short
from minillm.course.style import COLOURS, DPI, SMALL, Drawing, styled, titled
from minillm.engine.admission import TokenizerLike
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware
from minillm.quant.calibrate import LINEARS, Seen
from minillm.quant.config import QuantConfig
from minillm.quant.grid import quantise
from minillm.quant.linear import Linear
from minillm.quant.quantise import quantise_model
from minillm.quant.smooth import STRENGTHS, migration, product_loss
from minillm.quant.w8a8 import quantise_rows

TOKENS = (1, 2, 4, 8, 16, 64, 256, 512)
PACKED_MOST = 16
"""Tokens beyond which the weight-only format is not measured: its kernel takes a few of them at a time, and loses."""
PLAIN, BOTH, WEIGHTS = "16 bits", "W8A8", "8-bit weights"
FORMATS = {
    PLAIN: None,
    BOTH: QuantConfig("w8a8", migration=None, dense_from=None),
    WEIGHTS: QuantConfig("rtn", 8, -1, True, dense_from=None),
}
"""Without migration, which changes no shape and so no time; the packed weight alone, without a 16-bit copy for many rows."""
IDEAL: dict[str, tuple[str, int]] = {PLAIN: ("bfloat16", 2), BOTH: ("int8", 1), WEIGHTS: ("bfloat16", 1)}
"""Precision of the arithmetic and bytes of a weight."""


def in_formats(model: Transformer) -> dict[str, Transformer]:
    """A model in 16 bits and in the two kinds of 8."""
    return {name: model if config is None else quantise_model(model, config) for name, config in FORMATS.items()}


# What is easy to round and what is not ----------------------------------------------------------------------------------------


def peaks_figure(weight: Tensor, seen: Seen, strength: float) -> Figure:
    """The largest number of every channel of activations and weights, before and after migration; channels sorted by their
    activations."""
    scales = migration(weight, seen.peak, strength)
    order = seen.peak.argsort(descending=True)
    fig = Drawing(figsize=(7.0, 3.0), dpi=DPI, layout="constrained", facecolor="white")
    columns = weight.abs().amax(0)
    sides = (("as they are", seen.peak, columns), (f"migrated, α = {strength:g}", seen.peak / scales, columns * scales))
    for ax, (title, activations, weights) in zip(fig.subplots(1, 2, sharey=True), sides, strict=True):
        styled(ax)
        for i, (name, values) in enumerate((("activations", activations), ("weights", weights))):
            ax.plot(values[order].tolist(), "ox"[i], color=COLOURS[i], markersize=2.6, label=name)
        ax.set_yscale("log")
        titled(ax, title, "input channel, largest activation first", "largest |value|")
    fig.axes[0].legend(fontsize=SMALL, frameon=False)
    return fig


def levels_used(x: Tensor) -> Tensor:
    """For each token, the share of its numbers that round to 0: [rows]."""
    return (quantise_rows(x)[0] == 0).float().mean(1)


def one_scale_for_all(x: Tensor, weight: Tensor) -> float:
    """Loss of the product if all tokens shared one scale, like ``product_loss``."""
    scale = x.abs().amax() / 127
    rounded = (x / scale).round() * scale
    return float((rounded @ quantise(weight, 8, -1, True).dequantise().t() - x @ weight.t()).square().sum(1).mean())


def strength_losses(weight: Tensor, seen: Seen) -> dict[float, float]:
    """{α: loss of the product in 8 bits, as a share of that without migration}."""
    plain = product_loss(weight, seen.sample)
    return {s: product_loss(weight, seen.sample, migration(weight, seen.peak, s)) / plain for s in (0.0, *STRENGTHS, 1.0)}


def strength_figure(linears: Mapping[str, Linear], seen: Mapping[str, Seen]) -> Figure:
    """Loss against migration strength, one line for each layer."""
    series = {
        name.removeprefix("model.layers."): list(strength_losses(linear.weight, seen[name]).items())
        for name, linear in linears.items()
    }
    return lines(series, "migration strength α", "loss, without migration = 1", logy=True)


def quality(evaluation: Evaluation, model: Transformer, tokenizer: TokenizerLike, variants: Mapping[str, QuantConfig]) -> str:
    """KL and agreement by task of a model quantised in several ways, one after another: one copy is held at a time."""
    tables = [task_table(evaluation, {name: quantise_model(model, q, tokenizer)}).splitlines() for name, q in variants.items()]
    return "\n".join(tables[0][:1] + [line for table in tables for line in table[1:]])


# The two crossovers -----------------------------------------------------------------------------------------------------------


def ideal_seconds(card: Hardware, weights: int, tokens: int, kind: str) -> float:
    """The least time of a step's products: ``weights`` parameters read once, 2 operations for each and token."""
    precision, size = IDEAL[kind]
    return max(2 * weights * tokens / card.rate(precision), weights * size / card.bandwidth)


def ideal_figure(card: Hardware, weights: int) -> Figure:
    """Time against tokens per step as a card's data sheet has it, one line for each format."""
    places = [2**i for i in range(12)]
    series = {kind: [(n, ideal_seconds(card, weights, n, kind) * 1e6) for n in places] for kind in IDEAL}
    return lines(series, "tokens per step", f"µs at least, {card.name}", logx=True, logy=True)


def benches(models: Mapping[str, Transformer], most: int = TOKENS[-1]) -> dict[str, DecodeBench]:
    return {name: DecodeBench(model, most=most, batch=1) for name, model in models.items()}


def step_at(made: Mapping[str, DecodeBench], name: str, tokens: int, tick: Any = lambda: None) -> Step | None:
    """One step of so many tokens of one prompt; None where it is not measured."""
    if name == WEIGHTS and tokens > PACKED_MOST:
        return None
    return made[name].measure(tokens, 1, False, tick)


def sweep(made: Mapping[str, DecodeBench], tokens: Sequence[int]) -> Steps:
    """{format: {tokens: step}}; formats take turns at each number of tokens."""
    return taking_turns(made, tokens, lambda name, n: step_at(made, name, n))


def crossing(found: Steps, name: str, base: str) -> str:
    """From or up to how many tokens ``name`` is faster than ``base``, among those where both were measured, in words."""
    both = sorted(set(found[name]) & set(found[base]))
    gains = {n: found[base][n].timing.median / found[name][n].timing.median for n in both}
    said = ", ".join(f"{n}: {gain:.2f}×" for n, gain in gains.items())
    first = next((n for n in both if all(gains[m] > 1.0 for m in both if m >= n)), None)
    last = next((n for n in reversed(both) if all(gains[m] > 1.0 for m in both if m <= n)), None)
    from_here = "at each of them" if both and first == both[0] else f"from {first} on"
    up_to = "nowhere among these" if last is None else f"up to {last}"
    verdict = f"faster {up_to if first is None else from_here}"
    return f"{name} against {base} by tokens: {said}; {verdict}"


def time_figure(found: Steps, here: int | None = None) -> Figure:
    """Milliseconds of a step against its tokens, with the spread of the runs."""
    return timings(timing_of(found), "tokens per step", logy=True, here=here)


def tokens_panel(made: Mapping[str, DecodeBench], seen: Steps | None = None) -> Panel:
    """Tokens per step; all formats are measured anew where the slider stops, and leave their points on the picture."""
    kept: Steps = {name: dict((seen or {}).get(name, {})) for name in made}

    def run(job: Any, tokens: int) -> dict[str, Step]:
        found = {}
        for i, name in enumerate(made):
            job.progress(i / len(made))
            if (step := step_at(made, name, tokens, job.check)) is not None:
                found[name] = step
        return found

    def draw(values: dict[str, Any], found: dict[str, Step] | None) -> tuple[Figure, str]:
        tokens = values["tokens"]
        for name, step in (found or {}).items():
            kept[name][tokens] = step
        return time_figure(kept, here=tokens), explain(tokens, found)

    controls = {"tokens": w.SelectionSlider(options=list(TOKENS), value=1, description="tokens")}
    return Panel("a step by tokens, in two kinds of 8 bits", controls, run, draw)


def explain(tokens: int, found: Mapping[str, Step] | None) -> str:
    """The verdict under the picture."""
    said = f"{tokens} token{'s' if tokens > 1 else ''} in the step: "
    if found is None:
        return f"<span class='verdict'>{said}measuring …</span>"
    plain = found[PLAIN].timing.median
    others = {name: step.timing for name, step in found.items() if name != PLAIN}
    parts = [f"{name} {timing}, {short(plain / timing.median)} times as fast" for name, timing in others.items()]
    missing = "" if WEIGHTS in found else f"; {WEIGHTS}: measured up to {PACKED_MOST} tokens"
    return f"<span class='verdict'>{said}16 bits {found[PLAIN].timing}; <b>{'; '.join(parts)}</b>{missing}.</span>"


def linears_of(model: Transformer, layer: int) -> dict[str, Linear]:
    """The products of one layer by name, as ``inputs_seen`` names what they are fed."""
    return {f"model.layers.{layer}.{name}": find(model.layers[layer]) for name, find in LINEARS.items()}
