"""Times the first token of a prompt whose prefix is computed again, or loaded from a tier, beside what the rule predicts."""

from __future__ import annotations

import math
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.cache.tiered import TieredCache, load_always
from minillm.cache.tiers import HostTier, chain_keys
from minillm.checking import check_whole
from minillm.model.transformer import Transformer
from minillm.perf.timing import Timing
from minillm.perf.transfer import Link, PrefillRate, crossover_tokens

LENGTHS = (64, 128, 256, 512, 1024)
WAYS = {"recompute": "computed again", "host": "loaded from memory", "disk": "loaded from disk", "slow": "over a slow link"}
TIERS = tuple(way for way in WAYS if way != "recompute")
SECONDS_EACH = 0.6
"""After this long no further run of a way is started."""


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
