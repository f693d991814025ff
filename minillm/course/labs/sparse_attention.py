"""Lesson 2.2: what choosing blocks saves and costs, by formula and by the clock, and what is still found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.attention.indexer import Indexer, best_blocks
from minillm.attention.torch_backend import TorchAttention
from minillm.attention.window import SparseView
from minillm.cache.kv_store import PlainKVStore
from minillm.checking import check_whole
from minillm.course.panel import Panel
from minillm.course.plots import lines
from minillm.course.predictions import short
from minillm.course.style import COLOURS, DPI, SMALL, SOFT, Drawing, titled
from minillm.engine.batch import ForwardBatch, Row
from minillm.llm import LLM
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.timing import Timing
from minillm.perf.timing import measure as time_calls
from minillm.perf.units import format_time
from minillm.perf.work import Work

CONTEXTS = (1024, 2048, 4096, 8192, 16384)
CHUNK, BLOCK, WINDOW = 512, 64, 64
TINY = ModelConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32,
    max_position=CONTEXTS[-1], name="a tiny random model",
)  # fmt: skip

# The measurement: one step at a context, over KV of noise ----------------------------------------------------------------------


class Bench:
    """Engines over one tiny random model: dense (blocks None), and sparse ones, made when they are first asked for.

    A random model says how long attention takes and what it counts; what it chooses means nothing.
    """

    def __init__(self, config: ModelConfig = TINY, block: int = BLOCK, window: int = WINDOW) -> None:
        self.model = Transformer.random(config, seed=0)
        self.block, self.window = block, window
        self._engines: dict[Any, Any] = {}

    def engine(self, blocks: int | None, share: int = 1) -> Any:
        """share: layers in a row that use one choice."""
        key = blocks, share
        if key not in self._engines:
            sparse = {"sparse_blocks": blocks, "sparse_window": self.window, "sparse_share_layers": share}
            options: dict[str, Any] = {} if blocks is None else sparse
            size = self.model.config.max_position // self.block
            engine = LLM(self.model, block_size=self.block, num_blocks=size, attention_backend="torch", **options).engine
            config, generator = self.model.config, torch.Generator().manual_seed(0)
            shape = size * self.block, config.num_kv_heads, config.head_dim
            slots = torch.arange(self.block, shape[0] + self.block)
            for layer in range(config.num_layers):
                k, v = torch.randn(2, *shape, generator=generator).unbind()
                engine.store.write(layer, slots, k, v)
            self._engines[key] = engine
        return self._engines[key]

    def batch(self, context: int, queries: int = 1) -> ForwardBatch:
        """The last ``queries`` tokens of a request of ``context`` tokens."""
        check_whole("context", context)
        row = Row([5] * queries, context - queries, range(1, -(-context // self.block) + 1))
        return ForwardBatch.build([row], self.block)

    def work(self, blocks: int | None, context: int, queries: int = 1, share: int = 1) -> Work:
        """What the step does, counted."""
        work: Work = self.engine(blocks, share).runner.forward(self.batch(context, queries))[1]
        return work

    def seconds(
        self, blocks: int | None, context: int, queries: int = 1, repeats: int = 5, tick: Callable[[], None] = lambda: None,
        share: int = 1,
    ) -> Timing:  # fmt: skip
        """The step's time, planning included."""
        runner, batch = self.engine(blocks, share).runner, self.batch(context, queries)

        def step() -> None:
            tick()
            runner.forward(batch)

        with torch.inference_mode():
            return time_calls(step, warmup=1, repeats=repeats)


def versus(what: str, dense: Timing, sparse: Timing) -> str:
    """A line: both medians, and their ratio."""
    d, s = dense.median, sparse.median
    return f"{what}: dense {format_time(d)}, sparse {format_time(s)}: {d / s:.2f} times as fast"


# The cost model ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Seconds of a step by context: at the first of two contexts, and per token beyond it."""

    context: int
    seconds: float
    per_token: float

    @classmethod
    def through(cls, a: tuple[int, float], b: tuple[int, float]) -> Line:
        """(context, seconds) at two contexts."""
        return cls(a[0], a[1], (b[1] - a[1]) / (b[0] - a[0]))

    def at(self, context: float) -> float:
        return self.seconds + self.per_token * (context - self.context)


def crossover(dense: Line, sparse: Line, least: int) -> float:
    """The context from which the sparse step is the shorter one; at least ``least``, where it begins to leave anything out.
    Infinite where it never is."""
    gain = dense.per_token - sparse.per_token
    if gain <= 0:
        return float("inf")
    return max(float(least), dense.context + (sparse.at(dense.context) - dense.seconds) / gain)


def measured_crossover(contexts: Sequence[int], dense: Sequence[float], sparse: Sequence[float]) -> float:
    """Where the measured sparse time falls below the dense one for good, between two contexts in proportion; the first context
    where it always is, infinite where it is not at the last."""
    gaps = [s - d for d, s in zip(dense, sparse, strict=True)]
    if gaps[-1] >= 0:
        return float("inf")
    last = max((i for i, gap in enumerate(gaps) if gap >= 0), default=None)
    if last is None:
        return float(contexts[0])
    share = gaps[last] / (gaps[last] - gaps[last + 1])
    return contexts[last] + share * (contexts[last + 1] - contexts[last])


def index_flops(config: ModelConfig, context: int, block: int, window: int, numbers: int) -> int:
    """FLOPs of one query's scores in one layer: a product of ``numbers`` per query head and candidate."""
    return 2 * config.num_heads * numbers * int(SparseView(1, window, block).first_local(context - 1))


# Pictures ----------------------------------------------------------------------------------------------------------------------


def mask_picture(view: SparseView, tokens: int, chosen: Mapping[int, Sequence[int]]) -> Figure:
    """Which blocks of keys each query sees. chosen: {query: blocks}, for queries that do not see everything."""
    fig = Drawing(figsize=(5.2, 4.6), dpi=DPI, layout="constrained", facecolor="white")
    ax = fig.add_subplot()
    looks: dict[str, dict[str, Any]] = {
        "local": {"facecolor": COLOURS[0]}, "chosen": {"facecolor": COLOURS[1], "hatch": "////"},
        "a candidate that is not read": {"facecolor": "#F2F2F2"},
    }  # fmt: skip
    for query in range(tokens):
        first = int(view.first_local(query))
        for block in range(query // view.block_size + 1):
            kind = "local" if block >= first else "a candidate that is not read"
            if block < first and block in chosen.get(query, range(first)):
                kind = "chosen"
            width = min(view.block_size, query + 1 - block * view.block_size)
            ax.add_patch(Rectangle((block * view.block_size, query), width, 1, edgecolor="white", linewidth=0.4, **looks[kind]))
    ax.set_xlim(0, tokens)
    ax.set_ylim(tokens, 0)
    ax.set_aspect("equal")
    ax.set_xticks(range(0, tokens + 1, view.block_size))
    ax.set_yticks(range(0, tokens + 1, view.block_size))
    titled(ax, None, "position of a key (ticks: blocks)", "position of a query")
    handles = [Patch(edgecolor=SOFT, label=label, **look) for label, look in looks.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=SMALL, frameon=False)
    return fig


def choose(indexer: Indexer, q: torch.Tensor, keys: torch.Tensor, view: SparseView) -> dict[int, list[int]]:
    """{query: chosen blocks} for every query that must choose. q [tokens, heads, head_dim], keys [tokens, kv_heads, head_dim]."""
    full = len(keys) // view.block_size
    summaries = indexer.summarise(keys[: full * view.block_size].unflatten(0, (full, view.block_size)))
    out = {}
    for query in range(min(view.first_sparse, len(q)), len(q)):
        first = int(view.first_local(query))
        scores = indexer.score(q[None, query : query + 1], summaries[None, :first])
        out[query] = best_blocks(scores, torch.ones(1, 1, first, dtype=torch.bool), view.blocks).flatten().tolist()
    return out


def explain(bench: Bench, context: int, blocks: int, found: Mapping[str, Timing] | None) -> str:
    """The verdict of one point: keys and bytes, and what was measured."""
    seen = int(SparseView(blocks, bench.window, bench.block).count(context - 1))
    dense, sparse = bench.work(None, context), bench.work(blocks, context)
    said = [
        f"context {context:,}, {blocks} blocks: {seen:,} keys read of {context:,};",
        f"KV and summaries {short(dense.kv_read_bytes / sparse.kv_read_bytes)} times fewer bytes,",
        f"{sparse.index_bytes / max(sparse.total_bytes, 1):.0%} of all bytes are the indexer's;",
    ]
    if found is None:
        said.append("measuring …")
    else:
        factor = found["dense"].median / found["sparse"].median
        times = ", ".join(f"{name} {format_time(t.median)}" for name, t in found.items())
        said.append(f"measured a decoding step: {times}: <b>{short(factor)} times as fast</b>.")
    return f"<span class='verdict'>{' '.join(said)}</span>"


def sparse_panel(
    bench: Bench, context: int = 8192, blocks: int = 8, seen: Mapping[int, Mapping[str, Timing]] | None = None
) -> Panel:
    """Sliders for the context and the number of blocks; each point is measured and stays. seen: {context: timings} of ``blocks``
    blocks that were measured before."""
    kept = {(n, blocks): dict(timings) for n, timings in (seen or {}).items()}

    def run(job: Any, context: int, blocks: int) -> dict[str, Timing]:
        found = kept.get((context, blocks))
        if found is None:
            found = {name: bench.seconds(k, context, tick=job.check) for name, k in (("dense", None), ("sparse", blocks))}
        return found

    def draw(values: dict[str, Any], found: dict[str, Timing] | None) -> tuple[Figure, str]:
        if found is not None:
            kept[values["context"], values["blocks"]] = found
        shown: dict[str, list[Sequence[float]]] = {}
        for (n, k), timings in sorted(kept.items()):
            for name, timing in timings.items():
                label = "dense" if name == "dense" else f"{k} blocks"
                points = shown.setdefault(label, [])
                if not any(p[0] == n for p in points):
                    points.append((n, 1e3 * timing.median, 1e3 * timing.p10, 1e3 * timing.p90))
        here = {"here": float(values["context"])}
        picture = lines(shown, "context, tokens", "a decoding step, ms", logx=True, marks=here) if shown else _empty()
        return picture, explain(bench, values["context"], values["blocks"], found)

    controls = {
        "context": w.SelectionSlider(options=CONTEXTS, value=context, description="context"),
        "blocks": w.SelectionSlider(options=(2, 4, 8, 16, 32), value=blocks, description="blocks"),
    }
    return Panel("sparse attention by context", controls, run, draw)


def _empty() -> Figure:
    return lines({"measuring": [(CONTEXTS[0], 0.0)]}, "context, tokens", "a decoding step, ms", logx=True)


# A look inside the real model --------------------------------------------------------------------------------------------------


def look_inside(model: Transformer, token_ids: Sequence[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries [tokens, heads, head_dim] and keys [tokens, kv_heads, head_dim] of one layer of a dense pass."""
    kept: list[torch.Tensor] = []

    class Keeping(TorchAttention):
        def forward(self, q: torch.Tensor, at: int, store: Any, plan: Any) -> torch.Tensor:
            if at == layer:
                kept.extend((q.clone(), store.read(at, plan[0].slots)[0][0].clone()))
            return super().forward(q, at, store, plan)

    size = len(token_ids)
    store = PlainKVStore.allocate(model.config, 2 * size, model.dtype, model.device, shared=True)
    batch, backend = ForwardBatch.build([Row(token_ids, 0, [1])], size), Keeping()
    with torch.inference_mode():
        model(batch, store, backend, backend.plan(batch, model.dtype))
    return kept[0], kept[1]


def attention_kept(q: torch.Tensor, keys: torch.Tensor, view: SparseView, chosen: Mapping[int, Sequence[int]]) -> float:
    """Share of the dense attention of the queries that must choose, all heads, which lies on keys that they see."""
    group, shares = q.shape[1] // keys.shape[1], []
    for query, blocks in chosen.items():
        weights = torch.einsum("hd,khd->hk", q[query], keys[: query + 1].repeat_interleave(group, 1)) / q.shape[2] ** 0.5
        block = torch.arange(query + 1) // view.block_size
        seen = torch.isin(block, torch.tensor(list(blocks))) | (block >= int(view.first_local(query)))
        shares.append(float(weights.softmax(-1)[:, seen].sum(-1).mean()))
    return sum(shares) / len(shares)
