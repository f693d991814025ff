"""Lesson 6.2: four ways to draft on the same prompts: how often they are right, what they cost, and what that makes."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import ipywidgets as w
import torch
from matplotlib.figure import Figure
from torch import Tensor

from minillm.bench.studies.drafts import drafting, run, summary
from minillm.course.panel import Panel
from minillm.course.plots import lines
from minillm.course.style import COLOURS, MARKERS, SMALL, SOFT, figure, legend, titled
from minillm.llm import LLM
from minillm.model.transformer import Transformer
from minillm.perf.meter import Needles
from minillm.spec.choice import step_bytes
from minillm.spec.choose_layers import KEPT
from minillm.spec.length import tokens_per_pass
from minillm.spec.texts import LETTER, PROMPTS

NAMES = {"ngram": "prompt lookup", "int4": "copy in 4 bits", "layers": "25 of 30 layers", "mtp": "trained head"}
COPY = "Correct the spelling mistakes in this letter:\n\n" + ". ".join(LETTER.split(". ")[:2]) + "."
KINDS = {"fix text": COPY, "chat": PROMPTS["chat"][1], "story": PROMPTS["story"][0]}
LENGTHS = (1, 2, 3, 4, 6, 8)
RIGHT = {25: 388, 20: 287, 16: 208}
JUDGED = 534
"""Tokens that the sets of layers in KEPT named correctly, of so many: counted by ``minillm.spec.choose_layers``."""


# Counted ----------------------------------------------------------------------------------------------------------------------


def layers_counted(model: Transformer) -> dict[int, tuple[float, float]]:
    """For each number of layers kept: (share of weight bytes that a drafted token reads, acceptance)."""
    whole = step_bytes(model)
    return {n: (step_bytes(model.skipping(kept)) / whole, RIGHT[n] / JUDGED) for n, kept in KEPT.items()}


def speedup(alpha: float, c: float, v: float, length: int) -> float:
    """S = E / (γ c + v): tokens per time against none, where all drafts have this length."""
    return tokens_per_pass(alpha, length) / (length * c + v)


def prices(engines: Mapping[str, LLM]) -> dict[str, float]:
    """c in bytes: what a drafted token reads of weights, in passes of the target."""
    found = {}
    for who, llm in engines.items():
        if llm.engine.speculation:
            found[who] = float(getattr(llm.engine.speculation.proposer, "price", 0.0))
    return found


@torch.inference_mode()
def right_by_depth(head: Any, states: Tensor, ids: Sequence[int], embedding: Tensor, output: Tensor, depth: int) -> list[int]:
    """How often the first 1, 2, … guesses of a head are all what the text goes on with. states [n, hidden]: of tokens 0 … n - 1;
    each guess is fed back, as in decoding. output [words, hidden] over head.vocab."""
    n, vocab = len(ids) - depth - 1, head.get_buffer("vocab")
    text = torch.tensor(ids)
    state, token, good = states[:n], text[1 : n + 1], torch.ones(n, dtype=torch.bool)
    found = []
    for k in range(depth):
        state = head(state, embedding[token])
        token = vocab[(state @ output.T).argmax(-1)]
        good &= token == text[k + 2 : n + k + 2]
        found.append(int(good.sum()))
    return found


# Pictures ---------------------------------------------------------------------------------------------------------------------


def price_figure(points: Mapping[str, tuple[float, float]], title: str | None = None) -> Figure:
    """Drafters by price c and acceptance α, and the line below which nobody can gain."""
    fig, ax = figure()
    far = max([1.0, *(1.1 * c for c, _ in points.values())])
    ax.fill_between([0, 1, far], [0, 1, 1], color=SOFT, alpha=0.15, linewidth=0)
    ax.plot([0, 1], [0, 1], color=SOFT, linestyle="--", linewidth=1.2)
    ax.text(0.97 * far, 0.05, "α < c: no draft length gains", ha="right", fontsize=SMALL, color=SOFT)
    for i, (name, (c, alpha)) in enumerate(points.items()):
        ax.plot([c], [alpha], MARKERS[i % 6], color=COLOURS[i % 6], markersize=8, label=name)
    ax.set_xlim(-0.03, far)
    ax.set_ylim(0, 1.03)
    titled(ax, title, "price of a drafted token c, in passes of the target", "acceptance α")
    legend(ax, "right")
    return fig


def length_figure(parts: Mapping[str, tuple[float, float]], slope: float) -> Figure:
    """S against the draft length. parts: {name: (α, c)}; slope: what each checked token adds to a pass."""
    series = {
        name: [(n, speedup(alpha, c, 1 + slope * n, n) if n else 1.0) for n in range(9)] for name, (alpha, c) in parts.items()
    }
    return lines({**series, "none": [(0, 1.0), (8, 1.0)]}, "drafted tokens γ", "speed, against none")


# Measured ---------------------------------------------------------------------------------------------------------------------


class Race:
    """Engines over one model, one for each way to draft, on prompts by kind. answers, counts: what each said last, and its
    needles meanwhile, by (kind, way)."""

    def __init__(self, base: LLM, tokens: int = 32, **options: Any):
        self.engines = drafting(base.model, base.tokenizer, **options)
        self.tokens, self.prompts = tokens, {kind: self.encode(text) for kind, text in KINDS.items()}
        self.answers: dict[tuple[str, str], tuple[int, ...]] = {}
        self.counts: dict[tuple[str, str], Needles] = {}

    def encode(self, text: str) -> list[int]:
        return self.engines["none"].encode([{"role": "user", "content": text}])

    def measure(self, kind: str, who: str, length: int | None = None, tokens: int | None = None) -> dict[str, float]:
        """One answer with one way to draft; length: tokens of a draft, where it is not the study's."""
        llm = self.engines[who]
        ids, speculation = self.prompts[kind], llm.engine.speculation
        llm.meter.reset()
        if length is None or speculation is None:
            found = run(llm, ids, tokens or self.tokens)
        else:
            before, speculation.longest = speculation.longest, length
            try:
                found = run(llm, ids, tokens or self.tokens)
            finally:
                speculation.longest = before
        self.answers[kind, who], self.counts[kind, who] = found.token_ids, llm.meter.snapshot()
        return summary([found])


def parts(found: Mapping[str, float], none: Mapping[str, float]) -> tuple[float, float, float]:
    """(α, c, v) of a measurement, against one without drafts."""
    return found["alpha"], found["draft s"] / none["pass s"], found["pass s"] / none["pass s"]


def table(found: Mapping[str, Mapping[str, float]], lengths: Mapping[str, int]) -> str:
    """α, c, v, tokens per pass, and the speed that they predict beside the one that was measured."""
    none = found["none"]
    rows = [f"{'':16} {'γ':>2} {'α':>6} {'c':>6} {'v':>6} {'per pass':>9} {'predicted':>10} {'measured':>9}"]
    for who, seen in found.items():
        if who == "none":
            continue
        alpha, c, v = parts(seen, none)
        said = f"{speedup(alpha, c, v, lengths[who]):10.2f}" if who != "ngram" else f"{'':10}"
        speed = seen["tok/s"] / none["tok/s"]
        rows.append(
            f"{NAMES[who]:16} {lengths[who]:2} {alpha:6.2f} {c:6.2f} {v:6.2f} {seen['per pass']:9.2f} {said} {speed:9.2f}"
        )
    return "\n".join(rows)


def draft_panel(race: Race, seen: Mapping[str, Mapping[str, Mapping[str, float]]], lengths: Mapping[str, int]) -> Panel:
    """Choose a drafter, a text and a length; each place is measured anew, with the engine without drafts beside it."""
    start = "chat", "mtp", lengths["mtp"]
    kept = {start: (seen["chat"]["none"], seen["chat"]["mtp"])}

    def measure(job: Any, kind: str, who: str, length: int) -> tuple[Any, Any]:
        if (kind, who, length) not in kept:
            job.progress(0.1)
            none = race.measure(kind, "none")
            job.progress(0.5)
            kept[kind, who, length] = none, race.measure(kind, who, length)
        return kept[kind, who, length]

    def draw(values: dict[str, Any], result: tuple[Any, Any] | None) -> tuple[Figure, str]:
        kind, who, length = values["kind"], values["who"], values["length"]
        points = {f"{NAMES[k[1]]}, {k[0]}, γ = {k[2]}": parts(b, a)[1::-1] for k, (a, b) in list(kept.items())[-6:]}
        where = f"{NAMES[who]}, {kind}, γ = {length}:"
        if result is None:
            return price_figure(points), f"<span class='verdict'>{where} measuring …</span>"
        none, drafted = result
        alpha, c, v = parts(drafted, none)
        speed = drafted["tok/s"] / none["tok/s"]
        said = (
            f"α {alpha:.2f}, c {c:.2f}, v {v:.2f}; {drafted['per pass']:.2f} tokens a pass, <b>{speed:.2f} times</b> the speed."
        )
        return price_figure(points), f"<span class='verdict'>{where} {said}</span>"

    controls = {
        "who": w.Dropdown(options=[(name, who) for who, name in NAMES.items()], value="mtp", description="drafter"),
        "kind": w.Dropdown(options=list(race.prompts), value="chat", description="text"),
        "length": w.SelectionSlider(options=LENGTHS, value=lengths["mtp"], description="γ"),
    }
    return Panel("four ways to draft", controls, measure, draw)
