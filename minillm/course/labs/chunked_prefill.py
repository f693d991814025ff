"""Lesson 5.2: a long prompt among decoding requests. Pictures of it, what chunks cost by formula, the panel, and two pools."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import ipywidgets as w
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullLocator

from minillm.attention.torch_backend import precision_name
from minillm.bench.interference import Interference, meet
from minillm.checking import check_whole
from minillm.course.panel import Panel
from minillm.course.predictions import short
from minillm.course.style import COLOURS, DPI, INK, LINES, MARKERS, SMALL, SOFT, Drawing, figure, titled
from minillm.llm import LLM
from minillm.model.config import ModelConfig
from minillm.perf.hardware import Hardware
from minillm.perf.roofline import predict, step_work
from minillm.perf.units import format_time
from minillm.perf.work import Work
from minillm.traffic.simulate import SplitRun, simulate, simulate_split
from minillm.traffic.step_time import Roofline
from minillm.traffic.trace import Trace, make_trace, poisson, uniform_lengths

CHUNKS = (16, 32, 64, 128, 256, 512)
RUNNING, CONTEXT, LATE = 8, 32, 512
BLOCK = 16


# What a chunk costs, by formula -----------------------------------------------------------------------------------------------


def chunks_of(prompt: int, chunk: int) -> list[tuple[int, int]]:
    """(past, new) of every step that a prompt takes."""
    check_whole("prompt", prompt)
    check_whole("chunk", chunk)
    return [(past, min(chunk, prompt - past)) for past in range(0, prompt, chunk)]


def prompt_steps(
    config: ModelConfig, prompt: int, chunk: int, decodes: int = 0, context: int = CONTEXT, dtype: str = "bfloat16",
    size: float = 2.0,
) -> list[Work]:
    """The work of each step of a prompt, ``decodes`` others taking one token each in every step; size: bytes of a number."""
    kinds: dict[str, Any] = {"dtype": dtype, "bytes_per_weight": size, "kv_bytes_per_element": size}
    cut = chunks_of(prompt, chunk)
    return [
        step_work(config, [(context + i, 1)] * decodes + [part], logits=decodes + (i == len(cut) - 1), **kinds)
        for i, part in enumerate(cut)
    ]


def kv_reads(prompt: int, chunk: int) -> int:
    """Tokens whose KV is read while a prompt is computed: each chunk reads itself and everything before it."""
    return sum(past + new for past, new in chunks_of(prompt, chunk))


def floor(work: Work, hardware: Hardware) -> float:
    """Seconds that a step takes at least."""
    return predict(work, hardware).seconds


def trade_off(bench: "Bench", hardware: Hardware, chunk: int) -> tuple[float, float]:
    """Predicted seconds: the longest step while the prompt is computed, and the prompt's time to first token."""
    steps = prompt_steps(bench.config, bench.late_len, chunk, bench.running, bench.context, bench.precision, bench.element)
    seconds = [floor(step, hardware) for step in steps]
    return max(seconds), sum(seconds)


# The measurement --------------------------------------------------------------------------------------------------------------


class Bench:
    """One model, eight short requests that decode, and a long prompt; each measurement makes an engine of its own.

    chunk: tokens of the long prompt in a step in which everybody else decodes one; None is prefill first, the prompt whole.
    """

    def __init__(self, llm: LLM, running: int = RUNNING, context: int = CONTEXT, late: int = LATE) -> None:
        self.llm, self.config = llm, llm.model.config
        self.running, self.context, self.late_len = running, context, late
        self.prompts = [[(7 * i + 11 * r + 3) % self.config.vocab_size for i in range(context)] for r in range(running)]
        self.late = [(5 * i + 1) % self.config.vocab_size for i in range(late)]
        self.precision, self.element = precision_name(llm.model.dtype), float(llm.model.dtype.itemsize)

    def engine(self, chunk: int | None) -> LLM:
        answer = 8 + -(-self.late_len // (chunk or self.late_len))
        blocks = self.running * -(-(self.context + answer) // BLOCK) + -(-self.late_len // BLOCK)
        budget = self.running + (chunk or self.late_len)
        return LLM(
            self.llm.model, max_num_seqs=self.running + 1, num_blocks=blocks, block_size=BLOCK, max_num_batched_tokens=budget,
            prefill="first" if chunk is None else "chunked",
        )  # fmt: skip

    def measure(self, chunk: int | None, job: Any = None) -> Interference:
        """One meeting; ``job`` of a panel can end it between two steps."""
        return meet(self.engine(chunk), self.prompts, self.late, check=job.check if job else lambda: None)


def describe(name: str, seen: Interference) -> str:
    """A line: how the others fared before and meanwhile, and the prompt's own wait."""
    usual = sorted(seen.before)[len(seen.before) // 2]
    worst = max(seen.gaps)
    pauses = f"pauses of {format_time(usual)} before, up to {format_time(worst)} meanwhile (×{worst / usual:.1f})"
    return f"{name:14} {pauses}; first token of the prompt after {format_time(seen.ttft)}"


# Pictures ---------------------------------------------------------------------------------------------------------------------


def timeline(config: ModelConfig, hardware: Hardware, prompt: int, chunk: int, decodes: int = RUNNING) -> Figure:
    """Two rows of steps, as wide as the roofline says they take: prefill first, and in chunks. Ticks: the others' tokens."""
    ways = {
        "prefill first": [*prompt_steps(config, prompt, prompt), *_decode_steps(config, decodes, 4)],
        f"chunks of {chunk}": prompt_steps(config, prompt, chunk, decodes),
    }
    fig = Drawing(figsize=(7.0, 2.4), dpi=DPI, layout="constrained", facecolor="white")
    ax = fig.add_subplot()
    end = 0.0
    for y, steps in enumerate(ways.values()):
        at = 0.0
        for i, step in enumerate(steps):
            seconds = floor(step, hardware)
            has_prompt = y == 1 or i == 0
            look: dict[str, Any] = {"facecolor": COLOURS[0] if has_prompt else "#F2F2F2", "hatch": "" if has_prompt else "////"}
            ax.add_patch(Rectangle((at, y - 0.28), seconds, 0.56, edgecolor="white", linewidth=0.8, **look))
            at += seconds
            if y == 1 or i > 0:
                ax.plot([at, at], [y + 0.32, y + 0.45], color=COLOURS[1], linewidth=2)
        end = max(end, at)
    ax.set_yticks(range(len(ways)), list(ways))
    ax.set_ylim(len(ways) - 0.4, -0.6)
    ax.set_xlim(0, end * 1.02)
    ax.xaxis.set_major_formatter(lambda v, _: format_time(v) if v else "0")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    titled(ax, None, f"time since the prompt arrived ({hardware.name}, predicted)")
    shown: dict[str, dict[str, Any]] = {
        "step with a part of the prompt": {"facecolor": COLOURS[0]},
        "step of the others only": {"facecolor": "#F2F2F2", "hatch": "////"},
        "every other request gets a token": {"facecolor": COLOURS[1]},
    }  # fmt: skip
    handles = [Patch(edgecolor=SOFT, label=label, **look) for label, look in shown.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=SMALL, frameon=False)
    return fig


def _decode_steps(config: ModelConfig, decodes: int, n: int) -> list[Work]:
    return [step_work(config, [(CONTEXT + i, 1)] * decodes, logits=decodes) for i in range(n)]


def trade_off_figure(
    bench: Bench, hardware: Hardware, seen: Mapping[int, Interference], base: Interference | None = None, here: int | None = None
) -> Figure:
    """Seconds against chunk size: the others' longest pause and the prompt's first token; lines predicted, points measured."""
    fig, ax = figure(7.0, 3.9)
    places = [c for c in CHUNKS if c <= bench.late_len]
    predicted = [trade_off(bench, hardware, c) for c in places]
    shown = {"longest pause": lambda s: max(s.gaps), "first token of the prompt": lambda s: s.ttft}
    for i, (name, of) in enumerate(shown.items()):
        floors = [p[i] for p in predicted]
        ax.plot(places, floors, color=COLOURS[i], linestyle=LINES[i], linewidth=1.6, label=f"{name}, predicted")
        points = sorted(seen.items())
        if points:
            ax.plot(
                [c for c, _ in points], [of(s) for _, s in points], MARKERS[i], color=COLOURS[i], markersize=7,
                markeredgecolor="white", zorder=5, label=f"{name}, measured",
            )  # fmt: skip
        if base is not None:
            ax.axhline(of(base), color=COLOURS[i], linestyle=(0, (1, 2)), linewidth=1.2, label=f"{name}, prefill first")
    if here is not None:
        ax.axvline(here, color=SOFT, linestyle=(0, (2, 2)), linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(places, [str(c) for c in places])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda v, _: format_time(v))
    titled(ax, None, "tokens of the prompt per step", f"time, {bench.running} others decode")
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=SMALL, frameon=False, labelcolor=INK)
    return fig


def explain(chunk: int, predicted: tuple[float, float], found: Interference | None, base: Interference) -> str:
    """The verdict under the picture."""
    said = f"chunks of {chunk}: longest pause predicted {format_time(predicted[0])}, first token {format_time(predicted[1])};"
    if found is None:
        return f"<span class='verdict'>{said} measuring …</span>"
    pause, first = max(found.gaps) / max(base.gaps), found.ttft / base.ttft
    measured = f"measured {format_time(max(found.gaps))} and {format_time(found.ttft)} in {found.needles.steps} steps."
    against = f"Against prefill first: <b>pause ×{short(pause)}, first token ×{short(first)}</b>."
    return f"<span class='verdict'>{said} {measured} {against}</span>"


def chunk_panel(
    bench: Bench, hardware: Hardware, base: Interference, seen: Mapping[int, Interference] | None = None, chunk: int = 128
) -> Panel:
    """A slider for the chunk; every place is measured anew and leaves its points on the picture. base: prefill first."""
    kept: dict[int, Interference] = dict(seen or {})

    def run(job: Any, chunk: int) -> Interference:
        job.progress(0.0)
        return bench.measure(chunk, job)

    def draw(values: dict[str, Any], found: Interference | None) -> tuple[Figure, str]:
        chunk = values["chunk"]
        if found is not None:
            kept[chunk] = found
        picture = trade_off_figure(bench, hardware, kept, base, here=chunk)
        return picture, explain(chunk, trade_off(bench, hardware, chunk), found, base)

    places = [c for c in CHUNKS if c <= bench.late_len]
    slider = w.SelectionSlider(options=places, value=min(chunk, places[-1]), description="chunk")
    return Panel("a long prompt among decoding requests", {"chunk": slider}, run, draw)


# Two pools --------------------------------------------------------------------------------------------------------------------


def traffic(n: int = 64, rate: float = 6.0, seed: int = 0) -> Trace:
    """Long prompts and medium answers that arrive at random: the load on which mixing the two phases hurts."""
    prompts, answers = uniform_lengths(n, 1000, 3000, seed), uniform_lengths(n, 64, 256, seed + 1)
    return make_trace("long prompts", poisson(n, rate, seed), prompts, answers, vocab_size=1000, seed=seed)


def together(trace: Trace, config: ModelConfig, card: Hardware, cards: int = 2, **options: Any) -> dict[str, float]:
    """Replicas that do both phases; requests go to them in turn. Seconds: TTFT and gaps between tokens."""
    options = {"max_num_seqs": 64} | options
    shares = [Trace(trace.name, tuple(trace.arrivals[i::cards])) for i in range(cards)]
    runs = [simulate(share, Roofline(config, card), **options) for share in shares]
    requests = [r for run in runs for r in run.requests]
    return _numbers([r.ttft for r in requests], [gap for r in requests for gap in r.gaps])


def apart(trace: Trace, config: ModelConfig, card: Hardware, link: float, **options: Any) -> tuple[dict[str, float], SplitRun]:
    """One card for prompts and one for decoding, KV over a link of so many bytes/s between them."""
    time = Roofline(config, card)
    options = {"max_num_seqs": 64} | options
    split = simulate_split(
        trace, time, time, kv_bytes_per_token=config.kv_bytes_per_token(), link=link, prefill=options, decode=options
    )
    return _numbers([r.ttft for r in split.run.requests], [gap for r in split.run.requests for gap in r.gaps]), split


def _numbers(ttft: Sequence[float], gaps: Sequence[float]) -> dict[str, float]:
    def at(values: Sequence[float], q: float) -> float:
        return sorted(values)[min(len(values) - 1, int(q * len(values)))]

    found = {"TTFT p50": at(ttft, 0.5), "TTFT p99": at(ttft, 0.99), "gap p50": at(gaps, 0.5), "gap p99": at(gaps, 0.99)}
    return found | {"longest": max(gaps)}
