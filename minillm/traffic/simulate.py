"""Serve a trace without a model: the engine's own scheduler and cache manager, and a function that says how long a step takes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable

from minillm.cache.block_pool import BlockPool
from minillm.cache.choice import make_prefix_cache
from minillm.cache.manager import CacheManager, reservation
from minillm.checking import check_positive
from minillm.config import EngineConfig
from minillm.engine.admission import Admission
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.sampling_params import SamplingParams
from minillm.traffic.run import Row, Run, Served, Step
from minillm.traffic.trace import Arrival, Trace

StepTime = Callable[[Step], float]
"""Seconds that a step takes: a Roofline, a StepCurve, or any function."""


def simulate(trace: Trace, step_time: StepTime, **options: Any) -> Run:
    """Serve a trace in simulated time. options: those of an engine that choose who runs when (EngineConfig).

    Without num_blocks the pool has room for max_num_seqs requests of the longest. An engine with the same options and pool
    takes the same steps as long as requests arrive between the same ones, which at time 0 they do.
    """
    return _simulate(trace, step_time, EngineConfig.from_options(**options), received=False)


@dataclass(frozen=True)
class SplitRun:
    """A trace on two pools. run: as users saw it, its steps those of the decode pool. prefill, decode: each pool's own.

    transfer_bytes, transfer_s: KV that went over the link, and for how long the link was busy."""

    run: Run
    prefill: Run
    decode: Run | None
    transfer_bytes: int
    transfer_s: float


def simulate_split(
    trace: Trace, prefill_time: StepTime, decode_time: StepTime, *, kv_bytes_per_token: float, link: float, latency: float = 0.0,
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None,
) -> SplitRun:  # fmt: skip
    """Prefill and decode on pools of their own (Zhong et al. 2024, DistServe, arXiv 2401.09670).

    A prompt is computed in one pool, which samples its first token; its KV, kv_bytes_per_token for each prompt token, crosses a
    link of `link` bytes/s that carries one request at a time, `latency` seconds each; then it decodes in the other pool.
    prefill, decode: engine options of either pool. A prompt's blocks are taken to be free again once it is computed, and
    received tokens cost nothing to place; a request that the decode pool preempts is computed again there.
    """
    check_positive("kv_bytes_per_token", kv_bytes_per_token)
    check_positive("link", link)
    prompts = Trace(trace.name, tuple(dataclasses.replace(a, output_len=1) for a in trace.arrivals))
    first = simulate(prompts, prefill_time, **(prefill or {}))
    ready = sorted(zip((r.token_times[0] for r in first.requests), range(len(trace)), strict=True))
    free_at, sent_bytes, busy = 0.0, 0, 0.0
    arrivals: list[tuple[Arrival, int]] = []
    for time, i in ready:
        asked = trace.arrivals[i]
        if asked.output_len == 1:
            continue
        size = round(kv_bytes_per_token * len(asked.prompt))
        took = size / link + latency
        free_at = max(free_at, time) + took
        sent_bytes, busy = sent_bytes + size, busy + took
        arrivals.append((Arrival(free_at, (*asked.prompt, asked.prompt[-1]), asked.output_len - 1), i))
    times = [list(r.token_times) for r in first.requests]
    second = None
    if arrivals:
        received = Trace(trace.name, tuple(a for a, _ in arrivals))
        config = EngineConfig.from_options(**(decode or {}))
        budget = max(config.max_num_batched_tokens, config.max_num_seqs * received.longest)  # a received token uses up none of it
        second = _simulate(received, decode_time, dataclasses.replace(config, max_num_batched_tokens=budget), received=True)
        for served, (_, i) in zip(second.requests, arrivals, strict=True):
            times[i] += served.token_times
    requests = tuple(Served(r.request_id, a, tuple(t)) for r, a, t in zip(first.requests, trace.arrivals, times, strict=True))
    run = Run(f"{trace.name}, split", requests, (second or first).steps)
    return SplitRun(run, first, second, sent_bytes, busy)


def _simulate(trace: Trace, step_time: StepTime, options: EngineConfig, received: bool) -> Run:
    _check_options(options)
    limit = options.max_model_len or trace.longest + 1
    cache = _make_cache(options, limit)
    scheduler = Scheduler.from_options(options, cache)
    whole_steps = options.max_num_batched_tokens if options.kv_cache == "none" else None
    vocab = 1 + max(t for a in trace.arrivals for t in a.prompt)
    admission = Admission(None, vocab, limit, cache.capacity, whole_steps)
    requests = [_request(i, a, admission) for i, a in enumerate(trace.arrivals)]
    arrival_of = {r.request_id: a for r, a in zip(requests, trace.arrivals, strict=True)}
    times: dict[str, list[float]] = {r.request_id: [] for r in requests}
    pending, now = deque(requests), 0.0
    steps: list[Step] = []
    never_seen = itertools.count(-1, -1)  # sampled tokens: equal to no others, so that a prefix cache finds only what was sent
    while pending or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrival_of[pending[0].request_id].time)
        while pending and arrival_of[pending[0].request_id].time <= now:
            scheduler.add(pending.popleft())
        plan = scheduler.schedule()
        if not plan.scheduled:
            raise RuntimeError(f"batching policy {type(scheduler.policy).__name__} granted nothing")
        step = Step.of(plan, scheduler)
        if received:
            step = dataclasses.replace(
                step, rows=tuple(_as_received(row, s.request) for row, s in zip(step.rows, plan.scheduled))
            )
        took = step_time(step)
        if not isinstance(took, (int, float)) or not 0 <= took < math.inf:
            raise ValueError(f"step_time must give a finite number of seconds, at least 0, got {took!r:.60} in step {len(steps)}")
        start, now = now, now + took
        steps.append(step.at(start, now))
        sampled = [s.request for s in plan.scheduled if s.catches_up]
        scheduler.launched(plan)
        scheduler.update(plan)
        for request in sampled:
            cache.release(cache.offer_prompt(request))
            request.token_ids.append(next(never_seen))
            times[request.request_id].append(now)
            if request.num_output_tokens >= request.max_tokens:
                scheduler.finish(request, "length")
    served = tuple(Served(r.request_id, arrival_of[r.request_id], tuple(times[r.request_id])) for r in requests)
    return Run(f"{trace.name}, simulated", served, tuple(steps))


MODELLESS = frozenset(
    (
        "seed max_model_len max_num_seqs max_num_batched_tokens block_size num_blocks kv_cache allocation batching prefill "
        "queue_order prefix_cache"
    ).split()
)
"""Options that a simulation knows: those by which an engine decides who computes what, and when."""


def _check_options(options: EngineConfig) -> None:
    """ValueError for an option that would change the steps of an engine and does not change a simulation's."""
    for field in dataclasses.fields(options):
        if field.name not in MODELLESS and getattr(options, field.name) != field.default:
            raise ValueError(f"a simulation has no model: {field.name}={getattr(options, field.name)!r:.60} cannot be simulated")


def _make_cache(options: EngineConfig, max_model_len: int) -> CacheManager:
    strip = -(-max_model_len // options.block_size)
    blocks = options.max_num_seqs * strip if options.num_blocks is None else options.num_blocks
    reserve = reservation(options.strips, max_model_len)
    prefix = make_prefix_cache(options, options.block_size)
    return CacheManager(BlockPool(blocks), prefix, options.block_size, reserve=reserve)


def _request(i: int, arrival: Arrival, admission: Admission) -> Request:
    params = SamplingParams(max_tokens=arrival.output_len, temperature=0.0, ignore_eos=True)
    admission.check(arrival.prompt, params)
    room = admission.max_model_len - len(arrival.prompt)
    return Request(
        f"request-{i}", len(arrival.prompt), list(arrival.prompt), params, 0, frozenset(), min(arrival.output_len, room)
    )


def _as_received(row: Row, request: Request) -> Row:
    """A prompt whose KV came over the link computes its last token only."""
    return Row(row.request_id, row.past + row.new - 1, 1, row.samples) if not request.num_preemptions else row
