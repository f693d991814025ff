"""Lesson 3.3: KV in few bits: when it outweighs the weights, a row's grid, what is retrieved, and the time of a step."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
import torch
from matplotlib.figure import Figure
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention
from minillm.bench.decode import DecodeBench, Step, Steps, timing_of
from minillm.bench.decode import sweep as taking_turns
from minillm.bench.needles import Haystack, ask, divergence
from minillm.bench.quality import KVKind, make_kv
from minillm.cache.kv_store import PlainKVStore
from minillm.cache.quantised_kv import bytes_per_element
from minillm.course.panel import Panel
from minillm.course.plots import lines, timings
from minillm.course.predictions import short
from minillm.course.style import COLOURS, DPI, INK, SMALL, SOFT, Drawing, figure, styled, titled
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware
from minillm.perf.roofline import predict
from minillm.perf.units import format_bytes, format_time

CONTEXTS = (64, 256, 1024)
BATCH = 4
KINDS = {"16 bits": "auto", "int8": "int8", "fp8": "fp8"}
Rounding = Callable[[Tensor], Tensor]


# When KV outweighs the weights ------------------------------------------------------------------------------------------------


def kv_bytes(config: ModelConfig, tokens: int, kv_dtype: str = "auto") -> float:
    """Bytes of KV that a decode step of a model in 16 bits reads when its rows have ``tokens`` tokens together."""
    return tokens * config.kv_bytes_per_token(bytes_per_element(kv_dtype, torch.bfloat16, config.head_dim))


def balance(config: ModelConfig, bits: float = 16, kv_dtype: str = "auto") -> float:
    """Tokens in flight, context times batch, at which a step reads as many bytes of KV as of weights in that many bits."""
    return config.matmul_params * bits / 8 / kv_bytes(config, 1, kv_dtype)


def step_gain(config: ModelConfig, tokens: int, bits: float = 16, kv_dtype: str = "auto") -> float:
    """Bytes of weights and KV of a step in 16 bits over those with weights of other bits and KV of another kind."""
    weights = 2 * config.matmul_params
    return (weights + kv_bytes(config, tokens)) / (weights * bits / 16 + kv_bytes(config, tokens, kv_dtype))


def balance_figure(config: ModelConfig) -> Figure:
    """Bytes of weights and of KV in a decode step, against the tokens of all its rows."""
    tokens = [2**n for n in range(6, 19)]
    series: dict[str, list[tuple[float, float]]] = {"weights in 16 bits": [(n, config.matmul_params * 2 / 1e6) for n in tokens]}
    for name, kind in (("KV in 16 bits", "auto"), ("KV in int8", "int8")):
        series[name] = [(n, kv_bytes(config, n, kind) / 1e6) for n in tokens]
    marks = {f"equal at {balance(config):,.0f}": balance(config)}
    return lines(series, "tokens in flight: context times batch", "MB read by a decode step", logx=True, logy=True, marks=marks)


# A row and its grid -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def real_kv(model: Transformer, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """K after its rotation and V of a text, per layer: float32 [tokens, kv_heads, head_dim] each."""
    store = make_kv("auto", model, len(tokens) * 2)
    batch = ForwardBatch.build([Row(tokens, 0, [1])], len(tokens), device=model.device)
    backend = TorchAttention(model.config.sliding_window)
    model.hidden(batch, store, backend, backend.plan(batch, model.dtype))
    found = (store.read(layer, batch.slots[None]) for layer in range(model.config.num_layers))
    return [(k[0].float(), v[0].float()) for k, v in found]


def symmetric(bits: int, axes: Sequence[int] = (-1,)) -> Rounding:
    """Round to 2^bits − 1 levels around 0; the values along ``axes`` of [tokens, kv_heads, head_dim] share the largest."""
    largest = 2 ** (bits - 1) - 1

    def rounded(x: Tensor) -> Tensor:
        step = x.float().abs().amax(tuple(axes), keepdim=True).clamp(min=1e-30) / largest
        return ((x.float() / step).round() * step).to(x.dtype)

    return rounded


def lopsided(bits: int, axes: Sequence[int] = (-1,)) -> Rounding:
    """Round to 2^bits levels from the smallest to the largest value along ``axes``."""

    def rounded(x: Tensor) -> Tensor:
        values = x.float()
        low, high = (f(values, tuple(axes), keepdim=True) for f in (torch.amin, torch.amax))
        step = ((high - low) / (2**bits - 1)).clamp(min=1e-30)
        return (((values - low) / step).round() * step + low).to(x.dtype)

    return rounded


class RoundedKV(PlainKVStore):
    """Keeps 16-bit numbers that fewer bits could have held: what they cost in quality, without the saving."""

    rounding: Rounding

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        super().write(layer, slots, self.rounding(k), self.rounding(v))


def rounded_kv(rounding: Rounding) -> KVKind:
    """A store of RoundedKV, as ``kv_store`` takes it."""

    def make(config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str) -> RoundedKV:
        store = RoundedKV(PlainKVStore.allocate(config, num_slots, dtype, device).layers)
        store.rounding = rounding
        return store

    return make


def row_figure(row: Tensor, bits: Sequence[int] = (8, 4)) -> Figure:
    """One token's row of one head, and where each number lies after rounding to few bits."""
    fig = Drawing(figsize=(7.0, 3.2), dpi=DPI, layout="constrained", facecolor="white")
    for ax, n in zip(fig.subplots(1, len(bits), sharey=True), bits, strict=True):
        styled(ax)
        after = symmetric(n)(row)
        ax.vlines(range(len(row)), row.tolist(), after.tolist(), color=COLOURS[1], linewidth=1.4)
        ax.plot(row.tolist(), "o", color=COLOURS[0], markersize=3, label="K")
        ax.plot(after.tolist(), "_", color=INK, markersize=6, label="rounded")
        step = float(row.abs().max()) / (2 ** (n - 1) - 1)
        titled(ax, f"{n} bits: step {step:.3g}", "dimension of the head")
    fig.axes[0].set_ylabel("value", fontsize=SMALL)
    fig.axes[0].legend(fontsize=SMALL, frameon=False, ncols=2, loc="upper left")
    return fig


def channel_figure(kv: Sequence[tuple[Tensor, Tensor]], layer: int, head: int) -> Figure:
    """Mean magnitude of each dimension of one head over all tokens, K beside V, each relative to its median dimension."""
    fig, ax = figure(7.0, 3.0)
    for i, (name, x) in enumerate(zip(("K", "V"), kv[layer], strict=True)):
        magnitude = x[:, head].abs().mean(0)
        places = torch.arange(len(magnitude)) + 0.4 * i
        ax.bar(places.tolist(), (magnitude / magnitude.median()).tolist(), width=0.4, color=COLOURS[i], label=name,
               hatch=("", "////")[i], edgecolor="white", linewidth=0)  # fmt: skip
    ax.axhline(1, color=SOFT, linestyle=(0, (2, 2)), linewidth=1.0)
    titled(ax, None, "dimension of the head")
    ax.set_ylabel("mean magnitude / the median's", fontsize=SMALL)
    ax.legend(fontsize=SMALL, frameon=False, ncols=2)
    return fig


def errors(kv: Sequence[tuple[Tensor, Tensor]], roundings: Mapping[str, Rounding]) -> str:
    """Relative error of K and of V over all layers: the norm of what rounding changed over the norm of what was there."""
    rows = [f"{'':34}{'K':>9}{'V':>9}"]
    for name, rounding in roundings.items():
        found = []
        for part in (0, 1):
            lost = sum(float((rounding(x[part]) - x[part]).square().sum()) for x in kv)
            found.append((lost / sum(float(x[part].square().sum()) for x in kv)) ** 0.5)
        rows.append(f"{name:34}{found[0]:9.2%}{found[1]:9.2%}")
    return "\n".join(rows)


# Needles ----------------------------------------------------------------------------------------------------------------------


def needle_table(model: Transformer, hays: Sequence[Haystack], kinds: Mapping[str, KVKind]) -> str:
    """Passwords found by context and kind of KV, and KL at the answers against the first kind."""
    rows = [f"{'':26}" + "".join(f"{f'context {len(hay.tokens):,}':>22}" for hay in hays)]
    answers = [{name: ask(model, hay, kv) for name, kv in kinds.items()} for hay in hays]
    first = next(iter(kinds))
    for name in kinds:
        cells = (
            f"{hay.found(found[name]):>6} of {len(hay.answers)}  KL {divergence(found[first], found[name]):6.3f}"
            for hay, found in zip(hays, answers, strict=True)
        )
        rows.append(f"{name:26}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(rows)


# The measurement --------------------------------------------------------------------------------------------------------------


def benches(model: Transformer, most: int = CONTEXTS[-1], batch: int = BATCH) -> dict[str, DecodeBench]:
    """A bench for decode steps over each kind of KV."""
    return {name: DecodeBench(model, most, batch, kv_dtype=kind) for name, kind in KINDS.items()}


def sweep(made: Mapping[str, DecodeBench], contexts: Sequence[int], batch: int = BATCH, repeats: int = 3) -> Steps:
    """{kind: {context: step}}, kinds taking turns at each context."""
    return taking_turns(made, contexts, lambda name, n: made[name].measure(n, batch, True, repeats=repeats))


def compared(found: Steps, name: str, base: str = "16 bits") -> str:
    """The factor in time by context, and the factor in bytes of KV, in words."""
    said = []
    for context in sorted(set(found[name]) & set(found[base])):
        here, there = found[name][context], found[base][context]
        gain, bytes_ = there.timing.median / here.timing.median, there.work.kv_read_bytes / here.work.kv_read_bytes
        said.append(f"{context}: {gain:.2f}× as fast with {bytes_:.2f}× fewer bytes of KV")
    return f"{name} against {base} by context: " + "; ".join(said)


def accounts(found: Steps, context: int, hardware: Hardware, base: str = "16 bits") -> str:
    """What each kind's step reads, moves and takes, and whether fewer bytes made it faster."""
    lines_, times = [], {name: steps[context].timing for name, steps in found.items()}
    for name, timing in times.items():
        work = found[name][context].work
        share = predict(work, hardware).seconds / timing.median
        said = f"reads {work.kv_read_bytes / 1e6:4.0f} MB of KV, moves {work.activation_bytes / 1e6:4.0f} MB of intermediates"
        lines_.append(f"{name:8} {said}; measured {timing}, {share:.0%} of it is the floor")
    for name in [n for n in times if n != base]:
        gain = times[base].median / times[name].median
        verdict = "is faster here" if gain > 1.05 else "is no faster here: converting codes costs what their bytes save, or more"
        lines_.append(f"verdict: {name} {verdict}")
    return "\n".join(lines_)


def time_figure(found: Steps, here: int | None = None) -> Figure:
    """Milliseconds of a step against context, one line per kind, with the spread of the runs."""
    return timings(timing_of(found), "context of each row", here=here)


def context_panel(made: Mapping[str, DecodeBench], hardware: Hardware, seen: Steps | None = None) -> Panel:
    """Context, rows and kind of KV; each place is measured anew against 16 bits. The picture keeps the points of these rows."""
    first = next(iter(made))
    kept: dict[int, Steps] = {BATCH: {name: dict((seen or {}).get(name, {})) for name in made}}

    def run(job: Any, context: int, rows: int, kind: str) -> dict[str, Step]:
        found = {}
        for i, name in enumerate(dict.fromkeys((kind, first))):
            job.progress(i / 2)
            found[name] = made[name].measure(context, rows, True, job.check)
        return found

    def draw(values: dict[str, Any], found: dict[str, Step] | None) -> tuple[Figure, str]:
        points = kept.setdefault(values["rows"], {name: {} for name in made})
        for name, step in (found or {}).items():
            points[name][values["context"]] = step
        return time_figure(points, here=values["context"]), explain(made, hardware, found, first, **values)

    most, batch = made[first].most, made[first].batch
    controls = {
        "context": w.SelectionSlider(options=[n for n in CONTEXTS if n <= most], value=CONTEXTS[0], description="context"),
        "rows": w.SelectionSlider(options=[n for n in (1, 2, 4) if n <= batch], value=batch, description="rows"),
        "kind": w.SelectionSlider(options=list(made), value=list(made)[1], description="KV in"),
    }
    return Panel("a step by context and KV", controls, run, draw)


def explain(
    made: Mapping[str, DecodeBench], hardware: Hardware, found: dict[str, Step] | None, base: str,
    context: int, rows: int, kind: str,
) -> str:  # fmt: skip
    work = made[kind].work(context, rows, True)
    floor, share = predict(work, hardware), work.kv_read_bytes / (work.kv_read_bytes + work.weight_bytes)
    said = f"context {context:,}, {rows} row{'s' if rows > 1 else ''}, {kind}: reads {format_bytes(work.kv_read_bytes)} of KV, "
    said += f"{share:.0%} of what it reads besides intermediates; floor {format_time(floor.seconds)} ({floor.bound})"
    if found is None:
        return f"<span class='verdict'>{said}; measuring …</span>"
    here, there = found[kind].timing, found[base].timing
    factor = short(there.median / here.median)
    return f"<span class='verdict'>{said}; <b>measured {here}, {factor} times as fast as {base}</b>.</span>"
