"""Lesson 2.3: three models of one shape, the experts that a step touches, who gets how much, and one layer on the clock."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
import torch
from matplotlib.figure import Figure
from torch import Tensor

from minillm.bench.studies.moe import Layers
from minillm.checking import check_whole
from minillm.course.panel import Panel
from minillm.course.plots import bars, lines
from minillm.model.config import ModelConfig
from minillm.model.moe import route
from minillm.model.moe_config import MoEConfig
from minillm.perf.roofline import decode_work
from minillm.perf.timing import Timing
from minillm.perf.units import format_time

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
EXPERTS = (8, 16, 32, 64)
TOP_K = (1, 2, 4, 8)
WAYS = {"grouped": "mixture, rows grouped", "loop": "mixture, token by token", "dense": "dense of equal active size"}
LOOPED = 32
"""Beyond, the loop over tokens only takes longer."""


# Shapes -----------------------------------------------------------------------------------------------------------------------


def dense_twins(config: ModelConfig) -> dict[str, ModelConfig]:
    """The mixture, and the dense models whose MLP is as wide as the experts of one token together, and as all experts."""
    moe = config.moe
    if moe is None:
        raise ValueError(f"{config.name} has no experts")
    plain = {"moe": None, "family": "llama"}
    active, total = (n * moe.expert_size + moe.shared_size for n in (moe.top_k, moe.num_experts))
    return {
        "mixture": config,
        "dense of equal active size": dataclasses.replace(config, intermediate_size=active, **plain),  # type: ignore[arg-type]
        "dense of equal total size": dataclasses.replace(config, intermediate_size=total, **plain),  # type: ignore[arg-type]
    }


def step_bytes(config: ModelConfig, batch: int, context: int = 1) -> int:
    """Bytes of weights that a decode step reads in 16 bits, experts as many as are chosen on average."""
    return decode_work(config, batch, context).weight_bytes


def bytes_figure(configs: Mapping[str, ModelConfig], batches: Sequence[int] = BATCHES) -> Figure:
    """Gigabytes of weights of a decode step against the batch."""
    series = {name: [(b, step_bytes(c, b) / 1e9) for b in batches] for name, c in configs.items()}
    return lines(series, "requests that decode together", "GB of weights in a step", logx=True, logy=True)


# Who is chosen ----------------------------------------------------------------------------------------------------------------


def count_distinct(moe: MoEConfig, tokens: int, trials: int = 20, seed: int = 0) -> float:
    """Distinct experts of a step, counted: independent random tokens, averaged over trials."""
    generator = torch.Generator().manual_seed(seed)
    found = 0
    for _ in range(trials):
        found += len(route(torch.randn(tokens, moe.num_experts, generator=generator), moe)[0].unique())
    return found / trials


def distinct_figure(shapes: Mapping[str, MoEConfig], counted: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Share of the experts that a step touches, by formula; and what was counted."""
    series: dict[str, Any] = {n: [(b, m.distinct_experts(b) / m.num_experts) for b in BATCHES] for n, m in shapes.items()}
    series |= {name: [(b, share) for b, share in points] for name, points in counted.items()}
    return lines(series, "tokens in a step", "share of the experts touched", logx=True)


def imbalance(rows: Sequence[int]) -> float:
    """The busiest expert's rows by the mean: 1 is even."""
    return max(rows) * len(rows) / max(sum(rows), 1)


def skewed_logits(tokens: int, experts: int, skew: float, seed: int = 0) -> Tensor:
    """Scores [tokens, experts] of a router that likes some experts better, whoever comes."""
    generator = torch.Generator().manual_seed(seed)
    liked = skew * torch.randn(experts, generator=torch.Generator().manual_seed(1))
    return torch.randn(tokens, experts, generator=generator) + liked


def balance(moe: MoEConfig, skew: float, steps: int, rate: float, tokens: int = 256) -> tuple[list[float], Tensor]:
    """Imbalance in each step, and the last bias [experts]: after a step the bias of each expert above the mean load falls by
    ``rate``, that of the others rises by it (Wang et al. 2024, arXiv 2408.15664). Nothing is trained; the scores stay."""
    bias, seen = torch.zeros(moe.num_experts), []
    for step in range(steps):
        experts, _ = route(skewed_logits(tokens, moe.num_experts, skew, step), moe, bias)
        counts = torch.bincount(experts.flatten(), minlength=moe.num_experts)
        seen.append(imbalance(counts.tolist()))
        bias = bias + rate * torch.sign(counts.float().mean() - counts)
    return seen, bias


def balance_figure(runs: Mapping[str, Sequence[float]]) -> Figure:
    series = {name: list(enumerate(seen, start=1)) for name, seen in runs.items()}
    return lines(series, "step", "busiest expert / mean")


def rows_figure(rows: Sequence[int], most: int = 12) -> Figure:
    """The experts with most rows of one layer, and the one with fewest."""
    ranked = sorted(enumerate(rows), key=lambda pair: -pair[1])
    shown = [*ranked[:most], ranked[-1]] if len(ranked) > most else ranked
    return bars(
        {f"expert {e}": float(n) for e, n in shown}, "rows", title=f"rows by expert; the mean is {sum(rows) / len(rows):.1f}"
    )


# One layer, measured ----------------------------------------------------------------------------------------------------------


class LayerBench:
    """Layers of one width and as many experts as asked for, made once and timed."""

    def __init__(self, hidden: int = 256, expert_size: int = 128, dtype: torch.dtype = torch.float32) -> None:
        self.hidden, self.expert_size, self.dtype = hidden, expert_size, dtype
        self._made: dict[tuple[int, int], Layers] = {}

    def layers(self, experts: int, top_k: int) -> Layers:
        if (experts, top_k) not in self._made:
            self._made[experts, top_k] = Layers.random(MoEConfig(experts, top_k, self.expert_size), self.hidden, self.dtype)
        return self._made[experts, top_k]

    @torch.inference_mode()
    def measure(
        self, tokens: int, experts: int, top_k: int, tick: Callable[[], None] = lambda: None, repeats: int = 5
    ) -> dict[str, Timing]:
        """Each way in turns; the loop over tokens up to ``LOOPED`` tokens."""
        check_whole("tokens", tokens)
        layers = self.layers(experts, top_k)
        x = layers.inputs(tokens)
        ways = {name: run for name, run in layers.ways().items() if name != "loop" or tokens <= LOOPED}
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(repeats + 1):
            for name, run in ways.items():
                tick()
                before = time.perf_counter()
                run(x)
                if i:
                    samples[name].append(time.perf_counter() - before)
        return {name: Timing(tuple(times)) for name, times in samples.items()}


def layer_figure(seen: Mapping[int, Mapping[str, Timing]]) -> Figure:
    """Milliseconds of one layer against the tokens of the step, with the spread."""
    series = {
        label: [
            (n, t[way].median * 1e3, t[way].p10 * 1e3, t[way].p90 * 1e3) for n, t in sorted(seen.items()) if way in t
        ]
        for way, label in WAYS.items()
    }  # fmt: skip
    return lines(
        {name: points for name, points in series.items() if points}, "tokens in the step", "ms of one layer", logx=True, logy=True
    )


def verdict(bench: LayerBench, tokens: int, experts: int, top_k: int, found: Mapping[str, Timing] | None) -> str:
    layers = bench.layers(experts, top_k)
    said = f"{tokens} tokens, top {top_k} of {experts}: <b>{layers.touched(tokens)} experts</b> touched"
    if found is None:
        return f"<span class='verdict'>{said}; measuring …</span>"
    times = ", ".join(f"{WAYS[name]} {format_time(t.median)}" for name, t in found.items())
    against = found["grouped"].median / found["dense"].median
    return (
        f"<span class='verdict'>{said}; {times}. The mixture takes <b>{against:.1f} times</b> as long as the dense layer.</span>"
    )


def layer_panel(bench: LayerBench, seen: Mapping[int, Mapping[str, Timing]]) -> Panel:
    """Sliders for tokens, experts and top-k; each place is measured anew."""
    kept: dict[tuple[int, int], dict[int, Mapping[str, Timing]]] = {(64, 8): dict(seen)}

    def run(job: Any, tokens: int, experts: int, top_k: int) -> dict[str, Timing]:
        job.progress(0.0)
        return bench.measure(tokens, experts, top_k, job.check)

    def draw(values: dict[str, Any], found: dict[str, Timing] | None) -> tuple[Figure, str]:
        place = values["experts"], values["top_k"]
        if found is not None:
            kept.setdefault(place, {})[values["tokens"]] = found
        return layer_figure(kept.get(place) or seen), verdict(bench, values["tokens"], *place, found)

    controls = {
        "tokens": w.SelectionSlider(options=TOKENS, value=32, description="tokens"),
        "experts": w.SelectionSlider(options=EXPERTS, value=64, description="experts"),
        "top_k": w.SelectionSlider(options=TOP_K, value=8, description="top-k"),
    }
    return Panel("one layer of experts", controls, run, draw)
