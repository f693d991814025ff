"""Lesson 1.3: a prefix computed again or loaded from a tier: pictures of it, timings through the engine, and the live panel."""

from __future__ import annotations

import math
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.cache.tiered import TieredCache, load_always
from minillm.cache.tiers import HostTier, chain_keys
from minillm.checking import check_whole
from minillm.course.panel import Panel
from minillm.course.predictions import short
from minillm.course.style import COLOURS, INK, LINES, MARKERS, SMALL, SOFT, figure, titled
from minillm.model.transformer import Transformer
from minillm.perf.timing import Timing
from minillm.perf.transfer import Link, LoadOffer, PrefillRate, crossover_tokens, load_or_recompute
from minillm.perf.units import format_bytes, format_rate, format_time

LENGTHS = (64, 128, 256, 512, 1024)
WAYS = {"recompute": "computed again", "host": "loaded from memory", "disk": "loaded from disk", "slow": "over a slow link"}
TIERS = tuple(way for way in WAYS if way != "recompute")
SECONDS_EACH = 0.6
"""After this long no further run of a way is started."""


# Pictures ---------------------------------------------------------------------------------------------------------------------


def tier_picture() -> Figure:
    """The three tiers, with what moves between them and when."""
    fig, ax = figure(7.0, 2.5)
    places = ("KV pool", "host memory", "disk")
    says = ("attention reads here", "what the pool evicted", "what memory pushed out")
    for i, (place, say) in enumerate(zip(places, says, strict=True)):
        box = FancyBboxPatch((3 * i, 0), 2, 1, boxstyle="round,pad=0.05", facecolor=COLOURS[i], edgecolor=INK, alpha=0.4)
        ax.add_patch(box)
        ax.text(3 * i + 1, 0.62, place, ha="center", va="center", color=INK, weight="bold")
        ax.text(3 * i + 1, 0.3, say, ha="center", va="center", color=INK, fontsize=SMALL - 0.5)
    for i, (down, up) in enumerate((("evicted", "hit: load"), ("pushed out", "hit: load"))):
        ax.annotate("", (3 * i + 2.9, 0.72), (3 * i + 2.1, 0.72), arrowprops={"arrowstyle": "->", "color": INK})
        ax.text(3 * i + 2.5, 0.86, down, ha="center", fontsize=SMALL, color=INK)
        ax.annotate("", (3 * i + 2.1, 0.28), (3 * i + 2.9, 0.28), arrowprops={"arrowstyle": "->", "color": INK})
        ax.text(3 * i + 2.5, 0.05, up, ha="center", fontsize=SMALL, color=INK)
    ax.text(4, -0.42, "to the right: larger and slower; the oldest blocks go first", ha="center", fontsize=SMALL, color=SOFT)
    ax.set_xlim(-0.2, 8.2)
    ax.set_ylim(-0.6, 1.2)
    ax.axis("off")
    return fig


# The measurement --------------------------------------------------------------------------------------------------------------


class SlowTier(HostTier):
    """Host memory behind a link that is slow on purpose: each read sleeps as long as the bytes would take, the first of a load
    its latency as well. A stand-in for a network drive, whose speed can then be chosen."""

    name = "slow"

    def __init__(self, limit: int, link: Link):
        super().__init__(limit)
        self.link, self.fresh = link, True

    def read(self, key: bytes) -> Tensor | None:
        data = super().read(key)
        if data is not None:
            time.sleep(self.link.seconds(data.nbytes) - (0.0 if self.fresh else self.link.latency))
            self.fresh = False
        return data


def slow_link(prefill: Callable[[int, int], float], bytes_per_token: float, tokens: int = 256) -> Link:
    """A link that breaks even at ``tokens`` by the rule: a quarter of what is saved there is for bytes, the rest latency."""
    saved = prefill(0, tokens + 1) - prefill(tokens, 1)
    return Link(tokens * bytes_per_token / (saved / 4), 0.75 * saved)


@dataclass(frozen=True)
class Prices:
    """What the rule knows about one engine: its measured prefill and links, and the bytes of a token."""

    prefill: PrefillRate
    links: Mapping[str, Link]
    bytes_per_token: int

    def seconds(self, way: str, tokens: int) -> float:
        """Predicted seconds to the first token of a prompt with a prefix of so many tokens and one token more."""
        if way == "recompute":
            return self.prefill.seconds(0, tokens + 1)
        return self.links[way].seconds(tokens * self.bytes_per_token) + self.prefill.seconds(tokens, 1)

    def crossover(self, way: str) -> int | None:
        """The shortest prefix that the rule loads."""
        return crossover_tokens(self.links[way], self.bytes_per_token, self.prefill.seconds)


class TierBench:
    """Times the first token of prompts that share a prefix of any length up to ``most``: computed again, or loaded.

    One engine per tier over one model. Tokens are random: only their number matters. The pool forgets the prefix before each run.
    """

    def __init__(self, model: Transformer, most: int = 512, folder: Path | None = None, block_size: int = 16) -> None:
        check_whole("most", most, at_least=block_size)
        self.block_size, self.most = block_size, most
        self._scratch = None if folder else tempfile.TemporaryDirectory(prefix="minillm-tiers-")
        draw = random.Random(0)
        self.prefix = draw.choices(range(model.config.vocab_size), k=most // block_size * block_size)
        self.own = draw.randrange(model.config.vocab_size)
        room = 2 * (most + 2 * block_size) * int(model.config.kv_bytes_per_token(model.dtype.itemsize)) + 1024 * most
        options: dict[str, Any] = {
            "block_size": block_size, "num_blocks": most // block_size + 2, "max_num_seqs": 1, "prefix_cache": "radix",
            "max_model_len": most + 2 * block_size, "max_num_batched_tokens": most + block_size,
        }  # fmt: skip
        disk: dict[str, Any] = {"disk_cache": room, "disk_folder": folder or Path(self._scratch.name if self._scratch else ".")}
        self.engines = {"host": LLM(model, host_cache=room, **options), "disk": LLM(model, **disk, **options)}
        measured = self.tiers("host")
        assert measured.prefill is not None
        bytes_per_token = measured.io.nbytes // block_size
        link = slow_link(measured.prefill.seconds, bytes_per_token, tokens=min(256, most // 2))
        self.engines["slow"] = LLM(model, host_cache=SlowTier(room, link), tier_policy="always", **options)
        links = {"host": measured.links["host"], "disk": self.tiers("disk").links["disk"], "slow": link}
        self.prices = Prices(measured.prefill, links, bytes_per_token)
        self._fill()

    def _fill(self) -> None:
        """Compute the whole prefix once, and put its blocks into all tiers."""
        self._answer("host", self.prefix)
        self._forget("host")
        source = self.tiers("host")
        data = [source.tiers[0].read(key) for key in chain_keys(source.root, self.prefix, self.block_size)]
        for name in ("disk", "slow"):
            keys = chain_keys(self.tiers(name).root, self.prefix, self.block_size)
            items = [(key, block) for key, block in zip(keys, data, strict=True) if block is not None]
            self.tiers(name).tiers[0].write(items[::-1], frozenset())

    def tiers(self, way: str) -> TieredCache:
        found = self.engines["host" if way == "recompute" else way].engine.cache.tiers
        assert found is not None
        return found

    def _forget(self, way: str) -> None:
        """Empty the pool: what it keeps is copied down, where that has not happened yet."""
        cache = self.engines[way].engine.cache
        cache.pool.uncache(cache.prefix.evict(cache.pool.num_cached, lambda block: cache.pool.ref_count(block) == 0))

    def _answer(self, way: str, prefix: Sequence[int]) -> int:
        (out,) = self.engines[way].generate([[*prefix, self.own]], SamplingParams(max_tokens=1, ignore_eos=True))
        return out.num_loaded_tokens

    def run(self, way: str, tokens: int) -> float:
        """Seconds to the first token. ValueError for a length that is no whole number of blocks up to ``most``."""
        if tokens % self.block_size or not 0 < tokens <= self.most:
            raise ValueError(f"a prefix has 1 to {self.most // self.block_size} blocks of {self.block_size} tokens, got {tokens}")
        engine = "host" if way == "recompute" else way
        tiers = self.tiers(engine)
        tiers.policy = (lambda offer: 0) if way == "recompute" else load_always
        for tier in tiers.tiers:
            if isinstance(tier, SlowTier):
                tier.fresh = True
        started = time.perf_counter()
        loaded = self._answer(engine, self.prefix[:tokens])
        seconds = time.perf_counter() - started
        self._forget(engine)
        if loaded != (0 if way == "recompute" else tokens):
            raise RuntimeError(f"{loaded} of {tokens} tokens were loaded; the measurement would not say what it claims")
        return seconds

    def measure(self, way: str, tokens: int, check: Callable[[], None] = lambda: None, repeats: int = 3) -> Timing:
        """A few runs; no further one is started after SECONDS_EACH."""
        samples: list[float] = []
        while len(samples) < repeats and sum(samples) < SECONDS_EACH:
            check()
            samples.append(self.run(way, tokens))
        return Timing(tuple(samples))

    def sweep(self, lengths: Sequence[int], ways: Sequence[str] = tuple(WAYS)) -> dict[str, dict[int, Timing]]:
        """{way: {length: timing}}."""
        return {way: {n: self.measure(way, n) for n in lengths} for way in ways}


def crossing(recomputed: Mapping[int, float], loaded: Mapping[int, float]) -> float:
    """The length from which on loading is faster, interpolated between measured lengths on log scales; 0 if it always is, and
    infinite if it is not at the longest."""
    lengths = sorted(recomputed)
    gains = [math.log(recomputed[n] / loaded[n]) for n in lengths]
    losing = [i for i, gain in enumerate(gains) if gain <= 0]
    if not losing:
        return 0.0
    i = losing[-1]
    if i == len(lengths) - 1:
        return math.inf
    share = gains[i] / (gains[i] - gains[i + 1])
    return math.exp((1 - share) * math.log(lengths[i]) + share * math.log(lengths[i + 1]))


# The live panel ---------------------------------------------------------------------------------------------------------------


def time_figure(prices: Prices, way: str, seen: Mapping[str, Mapping[int, Timing]], here: int | None = None) -> Figure:
    """Time to the first token against the prefix's length: predictions as lines, measurements as points."""
    fig, ax = figure(7.0, 3.7)
    grid = [16 * 2 ** (i / 4) for i in range(27)]
    for i, one in enumerate(("recompute", way)):
        colour = COLOURS[1 - i]
        values = [prices.seconds(one, round(n)) for n in grid]
        ax.plot(grid, values, color=colour, linestyle=LINES[1 - i], linewidth=1.6, label=f"{WAYS[one]}, predicted")
        points = sorted(seen.get(one, {}).items())
        if points:
            ax.plot(
                [n for n, _ in points], [t.median for _, t in points], MARKERS[i], color=colour, markersize=7,
                markeredgecolor="white", zorder=5, label=f"{WAYS[one]}, measured",
            )  # fmt: skip
    cross = prices.crossover(way)
    if cross is not None and cross > grid[0]:
        ax.axvline(cross, color=SOFT, linewidth=1)
        said = f"break-even, predicted: {cross}"
        ax.annotate(said, (cross, ax.get_ylim()[1]), (4, -10), textcoords="offset points", fontsize=SMALL)
    if here is not None:
        ax.axvline(here, color=SOFT, linestyle=(0, (2, 2)), linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks([16, 32, *LENGTHS], [str(n) for n in (16, 32, *LENGTHS)])
    ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0), numticks=12))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda v, _: format_time(v).replace(".00", "").replace(".0 ", " "))
    titled(ax, None, "tokens of the prefix", "time to the first token")
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=SMALL, frameon=False, labelcolor=INK)
    return fig


def explain(prices: Prices, tokens: int, way: str, found: Mapping[str, Timing] | None) -> str:
    """The verdict under the picture: the rule's choice, and what was measured."""
    size = tokens * prices.bytes_per_token
    choice = "load" if prices.seconds(way, tokens) < prices.seconds("recompute", tokens) else "compute"
    said = f"{tokens} tokens, {format_bytes(size)}, {WAYS[way]} at {format_rate(prices.links[way].bandwidth, 'B/s')}"
    said += f" after {format_time(prices.links[way].latency)}" if prices.links[way].latency else ""
    said += f": the rule says <b>{choice}</b>"
    if found is None:
        return f"<span class='verdict'>{said}; measuring …</span>"
    gain = found["recompute"].median / found[way].median
    better = f"loading was {short(gain)} times as fast" if gain > 1 else f"computing was {short(1 / gain)} times as fast"
    return f"<span class='verdict'>{said}; measured: {better}, {found['recompute']} against {found[way]}.</span>"


def tier_panel(bench: TierBench, seen: Mapping[str, Mapping[int, Timing]] | None = None, tokens: int = 256) -> Panel:
    """Sliders for the prefix's length and the tier; each place is measured anew, computed and loaded."""
    kept: dict[str, dict[int, Timing]] = {way: dict((seen or {}).get(way, {})) for way in WAYS}

    def run(job: Any, tokens: int, tier: str) -> dict[str, Timing]:
        job.progress(0.0)
        again = bench.measure("recompute", tokens, job.check)
        job.progress(0.6)
        return {"recompute": again, tier: bench.measure(tier, tokens, job.check)}

    def draw(values: dict[str, Any], found: dict[str, Timing] | None) -> tuple[Figure, str]:
        n, tier = values["tokens"], values["tier"]
        for way, timing in (found or {}).items():
            kept[way][n] = timing
        return time_figure(bench.prices, tier, kept, here=n), explain(bench.prices, n, tier, found)

    places = [n for n in (16, 32, *LENGTHS) if n <= bench.most]
    controls = {
        "tokens": w.SelectionSlider(options=places, value=min(tokens, places[-1]), description="prefix"),
        "tier": w.SelectionSlider(options=[(WAYS[t], t) for t in TIERS], value="host", description="tier"),
    }
    return Panel("a prefix computed or loaded", controls, run, draw)


# What the lesson asks the engine ----------------------------------------------------------------------------------------------


def time_prompt(llm: LLM, prompt: Sequence[int]) -> tuple[Any, float]:
    """The output of one greedy token, and the seconds that it took."""
    before = time.perf_counter()
    (out,) = llm.generate([list(prompt)], SamplingParams(max_tokens=1, ignore_eos=True))
    return out, time.perf_counter() - before


def decisions(links: Mapping[str, Link], lengths: Sequence[int], prefill: Callable[[int, int], float], token_bytes: int) -> str:
    """A table: what the rule does with a prefix of each length behind each link, and one token more."""
    rows = [f"{'':24}" + "".join(f"{n:>9}" for n in lengths)]
    for name, link in links.items():
        said = []
        for n in lengths:
            loaded = load_or_recompute(LoadOffer(0, 1, (name,) * (n // 16), 16, 16 * token_bytes, {name: link}, prefill)) * 16
            said.append("load" if loaded == n else "compute" if loaded == 0 else f"load {loaded}")
        rows.append(f"{name:24}" + "".join(f"{word:>9}" for word in said))
    return "\n".join(rows)
