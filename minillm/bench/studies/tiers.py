"""The first token of a prompt whose prefix is computed again, loaded from memory, from disk, or over a link with a slow start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from minillm.bench.study import Bar
from minillm.bench.tiers import LENGTHS, WAYS, TierBench, crossing
from minillm.llm import LLM
from minillm.perf.transfer import break_even_bandwidth

FACTOR = 1.5

TITLE = "Tiered cache: 64 to 1024 tokens computed or loaded"
ROUNDS = 5


def worst_gain(found: Mapping[str, float], way: str) -> float:
    """The smallest TTFT computed / loaded over the lengths of at least 1.5 times the one from which the rule loads."""
    lengths = [n for n in measured_lengths(found) if n >= FACTOR * found[f"{way}_predicted"]]
    return min((found[f"recompute_{n}_s"] / found[f"{way}_{n}_s"] for n in lengths), default=0.0)


def measured_lengths(found: Mapping[str, float]) -> list[int]:
    return sorted(int(name.split("_")[1]) for name in found if name.startswith("recompute_"))


def gain_at_longest(found: Mapping[str, float], way: str) -> float:
    longest = measured_lengths(found)[-1]
    return found[f"recompute_{longest}_s"] / found[f"{way}_{longest}_s"]


def crossover_ratio(found: Mapping[str, float], way: str) -> float:
    """The measured crossover length over the predicted one; 0 or infinite where the lengths measured do not enclose it."""
    lengths = measured_lengths(found)
    ways = [{n: found[f"{one}_{n}_s"] for n in lengths} for one in ("recompute", way)]
    return crossing(*ways) / found[f"{way}_predicted"]


BARS = (
    Bar("TTFT computed / from memory, worst from 1.5 x the predicted length", lambda r: worst_gain(r, "host"), at_least=1.0),
    Bar("TTFT computed / from disk, worst from 1.5 x the predicted length", lambda r: worst_gain(r, "disk")),
    Bar("TTFT computed / from memory, 1024 tokens", lambda r: gain_at_longest(r, "host")),
    Bar("TTFT computed / from disk, 1024 tokens", lambda r: gain_at_longest(r, "disk")),
    Bar(
        "slow start: measured crossover / predicted", lambda r: crossover_ratio(r, "slow"), at_least=1 / FACTOR, at_most=FACTOR
    ),
    Bar("break-even link, MB/s", lambda r: r["break_even"] / 1e6),
)


@dataclass
class State:
    bench: TierBench
    lengths: tuple[int, ...] = LENGTHS


def prepare() -> State:
    return make_state(LLM("smollm2-135m", num_blocks=4, max_num_seqs=1), LENGTHS)


def make_state(llm: LLM, lengths: tuple[int, ...]) -> State:
    """Every way once before the rounds."""
    bench = TierBench(llm.model, most=lengths[-1], block_size=llm.engine.options.block_size)
    for way in WAYS:
        bench.run(way, lengths[0])
    return State(bench, lengths)


def measure(state: State, turn: int) -> dict[str, float]:
    """Lengths in order, ways in a rotated one. The predicted lengths are those of the engine, from what it measured at its start
    and, for a link, from past loads."""
    found: dict[str, float] = {}
    ways = list(WAYS)
    for i, n in enumerate(state.lengths):
        for j in range(len(ways)):
            way = ways[(i + j + turn) % len(ways)]
            found[f"{way}_{n}_s"] = state.bench.measure(way, n).median
    prices = state.bench.prices
    for way in ways[1:]:
        found[f"{way}_predicted"] = float(prices.crossover(way) or 10**9)
    longest = state.lengths[-1]
    saved = found[f"recompute_{longest}_s"] - prices.prefill.seconds(longest, 1)
    found["break_even"] = break_even_bandwidth(longest, prices.bytes_per_token, max(saved, 1e-9))
    return found
