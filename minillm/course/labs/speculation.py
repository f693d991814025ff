"""Lesson 6.1: drafts on real texts, pass by pass, and the test of a distribution. What they cost: draft_prices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.checking import check_whole
from minillm.course.stepper import Stepper
from minillm.course.style import COLOURS, DPI, INK, SMALL, SOFT, Drawing
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.request import RequestOutput
from minillm.engine.runner import ModelRunner
from minillm.engine.sampler import most_likely
from minillm.llm import LLM
from minillm.model.transformer import Transformer
from minillm.sampling_params import SamplingParams
from minillm.spec.ngram import NgramProposer
from minillm.spec.stats import DraftStats
from minillm.spec.texts import PROMPTS

FIX = PROMPTS["fix text"][0]
PEOPLE = (
    "Anna is 31 years old and lives in Rome. Ben is 45 years old and lives in Oslo. Carla is 28 years old and lives in Paris. "
    "David is 52 years old and lives in Berlin."
)
KINDS = {
    "code": PROMPTS["edit code"][0],
    "JSON": f'Give this as a JSON list of objects with the keys "name", "age" and "city":\n\n{PEOPLE}',
    "chat": PROMPTS["chat"][1],
    "story": PROMPTS["story"][0],
}
TEMPERATURES = (0.0, 0.5, 1.0)


# One pass over some tokens ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def logits(model: Transformer, ids: Sequence[int], n: int = 1) -> Tensor:
    """What the model says after each of the last n tokens, [n, vocab], from one pass over all of them without a cache."""
    check_whole("n", n)
    store = PlainKVStore.allocate(model.config, len(ids) + 1, model.dtype, model.device)
    runner = ModelRunner(model, store, TorchAttention(model.config.sliding_window), len(ids) + 1)
    row = Row(list(ids), 0, [0], num_drafts=n - 1)
    return runner.forward(ForwardBatch.build([row], len(ids) + 1, device=model.device))[0]


def next_tokens(model: Transformer, ids: Sequence[int], n: int = 1) -> list[int]:
    """The most likely token after each of the last n tokens, all from one pass."""
    return most_likely(logits(model, ids, n))


def distributions(model: Transformer, other: Transformer, ids: Sequence[int], keep: int) -> tuple[np.ndarray, np.ndarray]:
    """Both models' distributions of the next token over the ``keep`` tokens that the first finds most likely, renormalised."""
    first, second = (torch.softmax(logits(m, ids)[0].double(), -1) for m in (model, other))
    best = first.topk(keep).indices
    p, q = first[best].numpy(), second[best].numpy()
    return p / p.sum(), q / q.sum()


# Counting on a text that is there ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """One pass of the target: the text it started from has ``start`` tokens; of its draft, ``accepted`` tokens stood."""

    start: int
    draft: tuple[int, ...]
    accepted: int


def replay(ids: Sequence[int], prompt: int, gamma: int, longest: int = 4) -> list[Pass]:
    """The passes that would have written ids[prompt:] with prompt lookup and up to gamma drafted tokens a pass.

    A lookup changes no token of the answer, so acceptance can be counted on the answer afterwards. The prompt's own pass is the
    first, and drafts nothing."""
    check_whole("gamma", gamma)
    ids, lookup = list(ids), NgramProposer(longest)
    passes, at = [Pass(prompt, (), 0)], prompt + 1
    while at < len(ids):
        draft = lookup.continuation(ids[:at], min(gamma, len(ids) - at - 1))
        accepted = next((i for i, t in enumerate(draft) if ids[at + i] != t), len(draft))
        passes.append(Pass(at, draft, accepted))
        at += accepted + 1
    return passes


def stats(passes: Sequence[Pass]) -> DraftStats:
    """Counts of a replay, as the engine keeps them for a request."""
    found = DraftStats()
    for p in passes:
        found = found.plus(len(p.draft), p.accepted)
    return found


def write(llm: LLM, tokens: int) -> dict[tuple[str, float], RequestOutput]:
    """Every kind of prompt answered at every temperature, all in one batch and without drafts."""
    keys = [(kind, t) for kind in KINDS for t in TEMPERATURES]
    params = [SamplingParams(max_tokens=tokens, temperature=t, seed=1) for _, t in keys]
    return dict(zip(keys, llm.chat([[{"role": "user", "content": KINDS[kind]}] for kind, _ in keys], params), strict=True))


def acceptance_table(texts: Mapping[tuple[str, float], RequestOutput], gamma: int) -> list[str]:
    """Lines: for each kind and temperature the two rates, how often something was drafted at all, and tokens per pass."""
    lines = [f"{'':8}{'temperature':>12}{'passes that draft':>19}{'alpha':>8}{'accepted/drafted':>18}{'tokens per pass':>17}"]
    for (kind, t), out in texts.items():
        passes = replay([*out.prompt_token_ids, *out.token_ids], len(out.prompt_token_ids), gamma)
        found, drafting = stats(passes), sum(bool(p.draft) for p in passes) / len(passes)
        name = kind if t == TEMPERATURES[0] else ""
        counts = f"{found.alpha:8.2f}{found.accepted_share:18.2f}{found.tokens_per_pass:17.2f}"
        lines.append(f"{name:8}{t:12g}{100 * drafting:17.0f} %{counts}")
    return lines


def trace(llm: LLM, out: RequestOutput, gamma: int) -> Stepper:
    """The passes of a replay, frame by frame."""
    ids = [*out.prompt_token_ids, *out.token_ids]
    passes = replay(ids, len(out.prompt_token_ids), gamma)
    still = max(range(len(passes)), key=lambda i: (0 < passes[i].accepted < len(passes[i].draft), passes[i].accepted))

    def draw(p: Pass, i: int) -> tuple[Figure, str]:
        given = passes[: i + 1]
        told = sum(q.accepted + 1 for q in given)
        said = f"pass {i + 1}: {len(p.draft)} drafted, {p.accepted} accepted, 1 from the model; {told} tokens in {i + 1} passes"
        return pass_figure(llm, ids, p), f"<span class='verdict'>{said}</span>"

    return Stepper("drafts, pass by pass", passes, draw, still)


def pass_figure(llm: LLM, ids: Sequence[int], p: Pass) -> Figure:
    """The end of the text, the drafted tokens (accepted or refused), and the token that the pass gave itself."""
    fig = Drawing(figsize=(7.0, 1.9), dpi=DPI, layout="constrained", facecolor="white")
    ax = fig.add_subplot()
    decode = llm.tokenizer.decode if llm.tokenizer is not None else str
    own = ids[p.start + p.accepted]
    looks = [("#F2F2F2", INK, t) for t in ids[max(0, p.start - 6) : p.start]]
    looks += [(COLOURS[0] if i < p.accepted else "white", "white" if i < p.accepted else SOFT, t) for i, t in enumerate(p.draft)]
    rows = [looks, [(COLOURS[1], "white", own)]]
    for y, row in enumerate(rows):
        x = 0.0 if y == 0 else sum(_width(decode([t])) for *_, t in looks[: min(6, p.start) + p.accepted])
        for face, ink, token in row:
            text, refused = _shown(decode([token])), face == "white"
            width = _width(decode([token]))
            look: dict[str, Any] = {"facecolor": face, "edgecolor": SOFT, "linestyle": "--" if refused else "-", "linewidth": 0.8}
            ax.add_patch(FancyBboxPatch((x + 0.1, -y), width - 0.2, 0.6, boxstyle="round,pad=0,rounding_size=0.1", **look))
            ax.text(x + width / 2, 0.3 - y, text, ha="center", va="center", fontsize=SMALL, color=ink, family="monospace")
            x += width
    ax.set_xlim(0, max(60.0, sum(_width(decode([t])) for *_, t in looks) + _width(decode([own]))))
    ax.set_ylim(-1.3, 0.9)
    ax.axis("off")
    kinds = {"text so far": "#F2F2F2", "drafted, accepted": COLOURS[0], "drafted, refused": "white"}
    kinds["the model's own"] = COLOURS[1]
    handles = [
        Patch(facecolor=c, edgecolor=SOFT, label=n, linestyle="--" if c == "white" else "-") for n, c in kinds.items()
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=SMALL, frameon=False)
    return fig


def _shown(text: str) -> str:
    return text.replace("\n", "⏎").replace(" ", "·")


def _width(text: str) -> float:
    return len(_shown(text)) + 1.4


# A test of a distribution -----------------------------------------------------------------------------------------------------


def pick(weights: np.ndarray, u: float) -> int:
    """The first index whose cumulative share of the weights is above u in [0, 1)."""
    shares = np.cumsum(weights)
    return int(np.searchsorted(shares, u * shares[-1], side="right"))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Sum of (count - expected)² / expected."""
    return float((((counts - expected) ** 2) / expected).sum())


def limit(degrees: int) -> float:
    """A chi-square of so many degrees of freedom is above this once in about a thousand times (Wilson and Hilferty 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
