"""Who holds how much KV, step by step: the engine's scheduler and block tables at work, without a model and without a clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, Sequence

from minillm.cache.block_pool import BlockPool
from minillm.cache.manager import CacheManager, reservation
from minillm.cache.prefix import NoPrefixCache
from minillm.checking import check_whole
from minillm.config import EngineConfig
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Held:
    """While one step runs: requests in it, tokens that have slots, tokens whose KV those hold; and who was preempted for it."""

    running: int
    allocated: int
    live: int
    preempted: int


def occupancy(lengths: Iterable[tuple[int, int]], pool_tokens: int, max_model_len: int, **options: Any) -> list[Held]:
    """Serve requests of (prompt, output) tokens, all there at the start, from a pool of pool_tokens slots; one entry a step.

    options: those of an engine that decide who holds what (EngineConfig): allocation, block_size, max_num_seqs, batching, …
    """
    check_whole("pool_tokens", pool_tokens)
    check_whole("max_model_len", max_model_len)
    config = EngineConfig.from_options(**options)
    pool = BlockPool(pool_tokens // config.block_size)
    cache = CacheManager(pool, NoPrefixCache(), config.block_size, reserve=reservation(config.strips, max_model_len))
    scheduler = Scheduler.from_options(config, cache)
    for i, (prompt, output) in enumerate(lengths):
        if prompt + output > max_model_len or cache.blocks_for(prompt + output - 1) > pool.num_blocks:
            limits = f"max_model_len is {max_model_len}, the pool {pool_tokens}"
            raise ValueError(f"request {i} has {prompt} + {output} tokens; {limits}")
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        scheduler.add(Request(str(i), prompt, [0] * prompt, params, 0, frozenset(), output))
    steps = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        if not plan.scheduled:
            raise ValueError(f"a pool of {pool_tokens} tokens has no room for one request with allocation={config.allocation!r}")
        scheduler.launched(plan)
        live = scheduler.num_live_tokens - cache.tokens_without_slots(scheduler.running)
        steps.append(Held(len(scheduler.running), pool.num_referenced * config.block_size, live, len(plan.preempted)))
        done = [s.request for s in plan.scheduled if s.catches_up]
        scheduler.update(plan)
        for request in done:
            request.token_ids.append(0)
            if request.num_output_tokens >= request.max_tokens:
                scheduler.finish(request, "length")
    return steps


def waste(steps: Sequence[Held]) -> float:
    """Share of the allocated slots, summed over steps, that held nothing."""
    return 1 - sum(s.live for s in steps) / sum(s.allocated for s in steps)


def before_preemption(steps: Sequence[Held]) -> int:
    """Most requests that ran at once before the first was preempted."""
    first = next((i for i, s in enumerate(steps) if s.preempted), len(steps))
    return max(s.running for s in steps[:first])


def last_block_waste(block_size: int, length: float) -> float:
    """Expected share of a request's slots that its last block leaves empty, (B - 1) / 2 of them when any fill is as likely as any
    other."""
    empty = (block_size - 1) / 2
    return empty / (length + empty)
