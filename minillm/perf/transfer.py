"""Load or recompute: when bringing KV over a link is faster than computing it again. Formulas; nothing here reads a clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Mapping

from minillm.checking import check_positive, check_whole
from minillm.model.config import ModelConfig
from minillm.perf.roofline import prefill_work

NEWEST = 0.3
"""Weight of the newest load in a link's running mean."""


@dataclass(frozen=True)
class Link:
    """How fast bytes come out of a tier: bytes per second, and seconds that every load costs whatever its size."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_positive("bandwidth", self.bandwidth)
        if not 0 <= self.latency < float("inf"):
            raise ValueError(f"latency must be a finite number of seconds, at least 0, got {self.latency!r}")

    def seconds(self, num_bytes: float) -> float:
        """Seconds of one load; loading nothing takes none."""
        return self.latency + num_bytes / self.bandwidth if num_bytes else 0.0

    def observed(self, num_bytes: float, seconds: float) -> "Link":
        """The link after one more load was timed: a running mean of the seconds per byte beyond the latency."""
        if num_bytes <= 0 or seconds <= 0:
            return self
        newest = max(seconds - self.latency, seconds / 10) / num_bytes
        return replace(self, bandwidth=1 / ((1 - NEWEST) / self.bandwidth + NEWEST * newest))


@dataclass(frozen=True)
class PrefillRate:
    """Predicted time of prefill: FLOPs counted from the shape, at a measured FLOP/s, plus seconds that every pass costs."""

    config: ModelConfig
    flops_per_second: float
    overhead: float = 0.0

    def seconds(self, past: int, new: int) -> float:
        """Seconds to compute `new` tokens after `past` cached ones; none for no tokens."""
        return self.overhead + prefill_work(self.config, new, past=past).total_flops / self.flops_per_second if new else 0.0


@dataclass(frozen=True)
class LoadOffer:
    """A request's prefix is in the pool up to `past` tokens and goes on in slower tiers.

    tiers: the tier that holds each further block, in order. rest: tokens behind them, at least 1, computed in any case.
    block_size: tokens per block; block_bytes: bytes of one block's KV. links: by tier. prefill: (past, new) → seconds.
    """

    past: int
    rest: int
    tiers: tuple[str, ...]
    block_size: int
    block_bytes: int
    links: Mapping[str, Link]
    prefill: Callable[[int, int], float]

    def load_seconds(self, blocks: int) -> float:
        """Seconds to load the first `blocks` of the offered blocks: one load from each tier that holds some of them."""
        held = self.tiers[:blocks]
        return sum(self.links[tier].seconds(held.count(tier) * self.block_bytes) for tier in dict.fromkeys(held))

    def prefill_seconds(self, blocks: int) -> float:
        """Seconds to compute what is left when that many blocks were loaded."""
        loaded, offered = blocks * self.block_size, len(self.tiers) * self.block_size
        return self.prefill(self.past + loaded, offered - loaded + self.rest)


def load_or_recompute(offer: LoadOffer) -> int:
    """How many of the offered blocks to load so that the first token comes soonest; the rest of the prompt is computed.

    0 is plain recomputation, which also wins a tie. A prefix that starts in fast memory and goes on over a slow link is
    loaded up to where loading stops to pay.
    """
    return min(range(len(offer.tiers) + 1), key=lambda n: offer.load_seconds(n) + offer.prefill_seconds(n))


def break_even_bandwidth(tokens: int, kv_bytes_per_token: float, prefill_seconds: float, latency: float = 0.0) -> float:
    """Bytes per second at which loading the KV of `tokens` takes as long as computing them: a slower link loses.

    Infinite where the latency alone takes longer than the prefill.
    """
    check_whole("tokens", tokens)
    check_positive("kv_bytes_per_token", kv_bytes_per_token)
    check_positive("prefill_seconds", prefill_seconds)
    left = prefill_seconds - latency
    return tokens * kv_bytes_per_token / left if left > 0 else float("inf")


def crossover_tokens(
    link: Link, kv_bytes_per_token: float, prefill: Callable[[int, int], float], rest: int = 1, limit: int = 131_072
) -> int | None:
    """The shortest prefix for which loading beats computing it, with `rest` tokens computed after it; None up to `limit`.

    Loading n tokens gains prefill(0, n + rest) - prefill(n, rest) seconds and costs link.seconds. The gain grows faster
    than the cost, since a later token attends to more keys, so that there is one crossover and halving finds it.
    """
    check_whole("rest", rest)
    check_whole("limit", limit)

    def pays(n: int) -> bool:
        return link.seconds(n * kv_bytes_per_token) < prefill(0, n + rest) - prefill(n, rest)

    if not pays(limit):
        return None
    low, high = 0, limit  # pays(high), and not pays(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
