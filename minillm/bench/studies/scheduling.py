"""What scheduling itself costs, without a model: many running requests, many more that wait, and those that come and go."""

from __future__ import annotations

import time
from itertools import islice

from minillm.bench.study import Bar
from minillm.cache.block_pool import BlockPool
from minillm.cache.manager import CacheManager
from minillm.cache.prefix import NoPrefixCache
from minillm.config import EngineConfig
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.sampling_params import SamplingParams

RUNNING, WAITING, STEPS, PROMPT, BLOCK = 1_000, 10_000, 40, 4, 16

TITLE = f"Scheduling: {RUNNING:,} requests run, {WAITING:,} wait, no model"
ROUNDS = 5
BARS = (
    Bar("milliseconds a step", lambda r: 1e3 * r["step_s"], at_most=3.0),
    Bar("a step with 10,000 waiting / with none", lambda r: r["step_s"] / r["alone_s"], at_most=1.3),
    Bar("a step of 1,000 / ten steps of 100", lambda r: r["step_s"] / (10 * r["tenth_s"]), at_most=2.0),
    Bar("microseconds for one that ends and one that starts", lambda r: 1e6 * r["change_s"]),
    Bar("microseconds for an abort of one that waits", lambda r: 1e6 * r["abort_s"]),
)


def prepare() -> tuple[int, int]:
    return RUNNING, WAITING


def measure(state: tuple[int, int], turn: int) -> dict[str, float]:
    running, waiting = state
    loads = {"step_s": (running, waiting), "alone_s": (running, 0), "tenth_s": (running // 10, 0)}
    names = list(loads)
    found = {}
    for i in range(len(names)):
        name = names[(i + turn) % len(names)]
        found[name] = decoding_step(loaded(*loads[name]))
    return found | changes(loaded(running, waiting))


def loaded(running: int, waiting: int) -> Scheduler:
    """A scheduler in which as many requests decode and wait."""
    options = EngineConfig(max_num_seqs=running, max_num_batched_tokens=running * PROMPT)
    scheduler = Scheduler.from_options(options, CacheManager(BlockPool(running * 40), NoPrefixCache(), BLOCK))
    params = SamplingParams(max_tokens=10_000)
    for i in range(running + waiting):
        scheduler.add(Request(f"r{i}", PROMPT, [2] * PROMPT, params, 0, frozenset(), 10_000))
    step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> float:
    """Seconds of one step: choosing it and taking note that it ran. What a model would do in between is not timed."""
    before = time.perf_counter()
    plan = scheduler.schedule()
    scheduler.launched(plan)
    scheduler.update(plan)
    took = time.perf_counter() - before
    for s in plan.scheduled:
        s.request.token_ids.append(3)
    return took


def decoding_step(scheduler: Scheduler) -> float:
    """The median over steps."""
    return sorted(step(scheduler) for _ in range(STEPS))[STEPS // 2]


def changes(scheduler: Scheduler) -> dict[str, float]:
    """Seconds of a change: a tenth of the running requests ends in each step, and waiting ones take their slots."""
    quiet = decoding_step(scheduler)
    ending = max(scheduler.max_num_seqs // 10, 1)
    took = []
    for _ in range(5):
        leaving = list(islice(scheduler.running, ending))
        before = time.perf_counter()
        for request in leaving:
            scheduler.finish(request, "length")
        took.append(time.perf_counter() - before + step(scheduler) - quiet)
    waiting = list(scheduler.waiting)[::2]
    before = time.perf_counter()
    for request in waiting:
        scheduler.finish(request, "abort")
    return {"change_s": sorted(took)[2] / ending, "abort_s": (time.perf_counter() - before) / max(len(waiting), 1)}
