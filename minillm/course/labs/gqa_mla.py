"""Lesson 4.2: one cache bill for four structures, and one layer's decode attention over what each of them caches."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
import torch
from matplotlib.figure import Figure

from minillm.attention.choice import torch_attention
from minillm.cache.choice import plain_store
from minillm.checking import check_whole
from minillm.course.panel import Panel
from minillm.course.plots import bars, timings
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.config import ModelConfig
from minillm.model.layers import PLAIN
from minillm.model.mla_config import MLAConfig
from minillm.model.presets import PRESETS
from minillm.model.transformer import Transformer
from minillm.perf.roofline import attention_intensity
from minillm.perf.timing import Timing
from minillm.perf.units import format_bytes, format_time
from minillm.perf.work import Work

CONTEXTS = (256, 1024, 4096, 8192)
BLOCK = 16


# The bill, from shapes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """What one token leaves in the caches of a model: elements of one layer, layers, where the shape is from."""

    structure: str
    elements: int
    layers: int
    source: str

    def bytes_per_token(self, element: float = 2) -> float:
        return self.elements * self.layers * element


def real_models() -> dict[str, Entry]:
    """Published models, one or two of each structure. Falcon-7B is a shape only: the engine has no such family."""
    mla = "MLA, latent 512 + 64"
    chosen = {
        "llama-7b": "MHA, 32 heads", "llama-2-70b": "GQA, 64 heads : 8", "qwen3-32b": "GQA, 64 heads : 8",
        "deepseek-v2-lite": mla, "deepseek-v3": mla,
    }  # fmt: skip
    found = {
        name: Entry(structure, PRESETS[name].kv_width, PRESETS[name].num_layers, "minillm.model.presets")
        for name, structure in chosen.items()
    }
    found["falcon-7b"] = Entry("MQA, 71 heads : 1", 2 * 64, 32, "config.json of tiiuae/falcon-7b; arXiv 2311.16867")
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes_per_token()))


def bill(element: float = 2, context: int = 4096) -> str:
    """The bill of the published models as a table."""
    lines = [f"{'model':18}{'structure':24}{'KiB a token':>12}{f'GiB for {context:,}':>16}"]
    for name, entry in real_models().items():
        size = entry.bytes_per_token(element)
        lines.append(f"{name:18}{entry.structure:24}{size / 2**10:12.2f}{size * context / 2**30:16.3f}")
    return "\n".join(lines)


def same_heads(heads: int = 128, dim: int = 128, shape: MLAConfig | None = None) -> dict[str, int]:
    """Elements per token and layer with one and the same number of heads: those of DeepSeek-V3 unless said."""
    latent = shape or PRESETS["deepseek-v3"].mla
    assert latent is not None
    return {"MHA": 2 * heads * dim, "GQA, 8 KV heads": 2 * 8 * dim, "MLA": latent.cache_width, "MQA": 2 * dim}


def same_heads_figure() -> Figure:
    return bars({name: float(n) for name, n in same_heads().items()}, "", baseline="MHA", title="elements per token and layer")


# Models of one width ----------------------------------------------------------------------------------------------------------


def structures(hidden: int = 512, heads: int = 16, dim: int = 64) -> dict[str, ModelConfig]:
    """One layer of each structure, equal in width and in the number of heads; random weights, nothing trained."""
    base = ModelConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=64, num_layers=1, num_heads=heads, num_kv_heads=heads, head_dim=dim,
        max_position=CONTEXTS[-1], name="MHA",
    )  # fmt: skip
    latent = MLAConfig(kv_rank=2 * dim, q_rank=None, nope_dim=dim, rope_dim=dim // 2, v_dim=dim)
    return {
        "MHA": base, "GQA": replace(base, num_kv_heads=max(1, heads // 4), name="GQA"),
        "MQA": replace(base, num_kv_heads=1, name="MQA"),
        "MLA": replace(base, mla=latent, head_dim=latent.head_dim, name="MLA"),
    }  # fmt: skip


class LayerBench:
    """The attention of one layer, its products included, when one request decodes the token at some context.

    form: of latent attention. The cache holds noise; dtype is float32.
    """

    def __init__(self, config: ModelConfig, most: int = CONTEXTS[-1], form: str = "auto") -> None:
        self.model, self.most = Transformer.random(replace(config, num_layers=1)), most
        store: Any = plain_store(self.model.config, most + BLOCK, torch.float32)
        generator = torch.Generator().manual_seed(0)
        for tensor in store.layers:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.store = store
        self.backend = torch_attention(self.model.config, form=form)
        self.x = torch.randn(1, config.hidden_size, generator=generator)

    def batch(self, context: int) -> ForwardBatch:
        check_whole("context", context)
        if context > self.most:
            raise ValueError(f"context must be at most {self.most}, got {context}")
        return ForwardBatch.build([Row([0], context - 1, range(1, -(-context // BLOCK) + 1))], BLOCK)

    def prepared(self, context: int) -> Callable[[], torch.Tensor]:
        """A call that computes [1, hidden], its plan made beforehand as in a step."""
        batch = self.batch(context)
        cos, sin = self.model.rope[batch.positions].unsqueeze(2).unbind(1)
        plan, attention = self.backend.plan(batch, torch.float32), self.model.layers[0].attention
        args = self.x, PLAIN, 0, cos, sin, batch.slots, self.store, self.backend, plan
        return lambda: attention(*args)  # type: ignore[operator]

    @torch.inference_mode()
    def output(self, context: int) -> torch.Tensor:
        return self.prepared(context)()

    def work(self, context: int) -> Work:
        """What the backend counts for one layer: the attention without the products around it."""
        batch = self.batch(context)
        return self.backend.work(batch, self.backend.plan(batch, torch.float32), self.model.config, torch.float32)


def benches(configs: Mapping[str, ModelConfig]) -> dict[str, LayerBench]:
    """One for each structure; latent attention twice, in its two forms."""
    made = {name: LayerBench(config) for name, config in configs.items() if config.mla is None}
    latent = next(config for config in configs.values() if config.mla is not None)
    return made | {f"MLA {form}": LayerBench(latent, form=form) for form in ("absorbed", "naive")}


@torch.inference_mode()
def measure(
    made: Mapping[str, LayerBench], context: int, tick: Callable[[], None] = lambda: None, repeats: int = 8
) -> dict[str, Timing]:
    """Every structure at one context, in turns."""
    calls = {name: bench.prepared(context) for name, bench in made.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 2):
        tick()
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            if i >= 2:
                samples[name].append(time.perf_counter() - before)
    return {name: Timing(tuple(times)) for name, times in samples.items()}


Seen = Mapping[int, Mapping[str, Timing]]


def time_figure(seen: Seen) -> Figure:
    """Milliseconds of a layer's attention against context, with the spread of the runs."""
    names = list(next(iter(seen.values())))
    found = {name: {n: t[name] for n, t in seen.items()} for name in names}
    return timings(found, "context", "ms of one layer's attention", logy=True)


def verdict(found: Mapping[str, Timing]) -> str:
    """Who is fastest at a place, and what absorbing is worth."""
    fastest = min(found, key=lambda name: found[name].median)
    gain = found["MLA naive"].median / found["MLA absorbed"].median
    return f"fastest: {fastest}, {format_time(found[fastest].median)}; absorbed is {gain:.3g} times as fast as naive"


def context_panel(made: Mapping[str, LayerBench], seen: Seen) -> Panel:
    """A slider for the context; each place is measured anew."""
    kept = dict(seen)

    def run(job: Any, context: int) -> dict[str, Timing]:
        job.progress(0.0)
        return measure(made, context, job.check, repeats=6)

    def draw(values: dict[str, Any], found: dict[str, Timing] | None) -> tuple[Figure, str]:
        context = values["context"]
        if found is not None:
            kept[context] = found
        cached = ", ".join(f"{n} {format_bytes(b.work(context).kv_read_bytes)}" for n, b in made.items() if n != "MLA naive")
        said = verdict(found) if found is not None else "measuring …"
        return time_figure(kept), f"<span class='verdict'>context {context}: reads {cached}; <b>{said}</b>.</span>"

    places = [n for n in CONTEXTS if n <= min(b.most for b in made.values())]
    controls = {"context": w.SelectionSlider(options=places, value=places[-1], description="context")}
    return Panel("attention of four structures", controls, run, draw)


# Intensity --------------------------------------------------------------------------------------------------------------------


def intensities(context: int = 4096) -> dict[str, float]:
    """FLOP per byte of decode attention in 16 bits, of published models."""
    chosen = {"llama-7b": "MHA", "qwen3-32b": "GQA 8:1", "deepseek-v2-lite": "MLA, 16 heads", "deepseek-v3": "MLA, 128 heads"}
    return {f"{name} ({what})": attention_intensity(PRESETS[name], 1, context) for name, what in chosen.items()}


def intensity_figure(ridges: Mapping[str, float], context: int = 4096) -> Figure:
    """The same beside the ridges of some cards."""
    shown = intensities(context) | {f"ridge of {name}": ridge for name, ridge in ridges.items()}
    return bars(shown, "", title="FLOP per byte of decode attention")


def per_rank(config: ModelConfig, ranks: Sequence[int]) -> dict[int, float]:
    """Bytes per token on each of some tensor-parallel ranks, 16 bits: KV heads are split until each rank has one; a latent
    belongs to all heads, so that every rank keeps all of it."""
    if config.mla is not None:
        return {n: config.kv_bytes_per_token() for n in ranks}
    return {n: config.kv_bytes_per_token() * max(1, config.num_kv_heads // n) / config.num_kv_heads for n in ranks}
