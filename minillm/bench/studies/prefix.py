"""A prompt whose first 512 tokens are cached against one that starts cold, and what a cache costs that never hits."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Callable

from minillm.bench.study import Bar
from minillm.cache.prefix import HashPrefixCache, PrefixCache
from minillm.cache.radix import RadixPrefixCache
from minillm.llm import LLM
from minillm.sampling_params import SamplingParams

SHARED, OWN, BLOCK = 512, 32, 16
CACHED_BLOCKS, LOOKUPS = 100_000, 2_000
KINDS: dict[str, Callable[[int], PrefixCache]] = {"radix": RadixPrefixCache, "hash": HashPrefixCache}

TITLE = "Prefix cache: 512 shared tokens, 32 own"
ROUNDS = 5
BARS = (
    Bar("TTFT, cold / hit", lambda r: r["cold_s"] / r["hit_s"], at_least=4.0),
    Bar("TTFT, a cache that never hits / none", lambda r: r["miss_s"] / r["cold_s"], at_most=1.02),
    Bar("lookups per second, radix tree of 100,000 blocks", lambda r: r["lookups"] / r["radix_s"], at_least=10_000),
    Bar("lookups per second, table of 100,000 hashes", lambda r: r["lookups"] / r["hash_s"], at_least=10_000),
    Bar("prompts inserted and evicted per second, radix tree", lambda r: r["churned"] / r["radix_churn_s"]),
    Bar("prompts inserted and evicted per second, hashes", lambda r: r["churned"] / r["hash_churn_s"]),
)


@dataclass
class State:
    """Two engines over one model; and full caches: those where prompts are looked up, and those where they come and go.

    Prompts are random: only their lengths matter."""

    plain: LLM
    cached: LLM
    block_size: int
    own: int
    shared: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    full: dict[str, PrefixCache] = field(default_factory=dict)
    busy: dict[str, PrefixCache] = field(default_factory=dict)
    repeats: int = 3
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def tokens(self, n: int) -> list[int]:
        return self.random.choices(range(self.plain.model.config.vocab_size), k=n)


def prepare() -> State:
    plain = LLM("smollm2-135m", num_blocks=3 * (SHARED + OWN) // BLOCK, max_num_seqs=1)
    return make_state(plain, SHARED, OWN, CACHED_BLOCKS)


def make_state(plain: LLM, shared: int, own: int, cached_blocks: int) -> State:
    """Pools with room for three prompts: a cache that never hits is full after the third, and evicts at every prompt."""
    block = plain.engine.options.block_size
    cached = LLM(
        plain.model, num_blocks=plain.engine.cache.pool.num_blocks, block_size=block, max_num_seqs=1, prefix_cache="radix"
    )
    state = State(plain, cached, block, own)
    state.shared = state.tokens(shared)
    state.prompts = [state.tokens(shared) for _ in range(cached_blocks // (shared // block))]
    for name, make in KINDS.items():
        for caches in (state.full, state.busy):
            fresh = count(1)
            caches[name] = make(block)
            for prompt in state.prompts:
                caches[name].insert(prompt, [next(fresh) for _ in range(shared // block)])
    for _ in range(4):
        first_token(cached, state.tokens(shared + own))
    first_token(plain, state.tokens(shared + own))
    return state


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Seconds to the only token of an answer."""
    before = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    return time.perf_counter() - before


def measure(state: State, turn: int) -> dict[str, float]:
    result: dict[str, float] = {}
    samples: dict[str, list[float]] = {"cold_s": [], "miss_s": [], "hit_s": []}
    length = len(state.shared) + state.own
    for i in range(state.repeats):
        first_token(state.cached, state.shared + state.tokens(1))  # warm: the shared tokens are computed here, and not timed
        ways = list(samples)
        for j in range(len(ways)):
            way = ways[(i + j + turn) % len(ways)]
            if way == "hit_s":
                samples[way].append(first_token(state.cached, state.shared + state.tokens(state.own)))
            else:
                llm = state.plain if way == "cold_s" else state.cached
                samples[way].append(first_token(llm, state.tokens(length)))
    result.update({way: sorted(seconds)[len(seconds) // 2] for way, seconds in samples.items()})
    known = state.random.sample(state.prompts, min(LOOKUPS, len(state.prompts)))
    unknown = [state.tokens(len(state.shared)) for _ in known]
    for name in sorted(KINDS, reverse=bool(turn % 2)):
        result[f"{name}_s"] = look_up(state.full[name], known)
        result[f"{name}_churn_s"] = churn(state.busy[name], unknown, len(state.shared) // state.block_size)
    return result | {"lookups": len(known), "churned": len(unknown)}


def look_up(cache: PrefixCache, prompts: list[list[int]]) -> float:
    before = time.perf_counter()
    for prompt in prompts:
        cache.match(prompt)
    return time.perf_counter() - before


def churn(cache: PrefixCache, prompts: list[list[int]], blocks: int) -> float:
    """A full cache meets prompts that it has not seen: each takes the blocks of the one that was used longest ago."""
    before = time.perf_counter()
    for prompt in prompts:
        cache.match(prompt)
        cache.insert(prompt, cache.evict(blocks, lambda block: True))
    return time.perf_counter() - before
