"""Continuous batching against padded static batches, in order of arrival and sorted by length, on one engine."""

from __future__ import annotations

import time
from dataclasses import dataclass

from minillm.bench.study import Bar
from minillm.llm import LLM
from minillm.model.transformer import Transformer
from minillm.traffic.replay import replay
from minillm.traffic.trace import Trace, at_once, lognormal_lengths, make_trace, uniform_lengths

REQUESTS, SLOTS, MEDIAN, LONGEST = 64, 16, 20, 200
WAYS = ("continuous", "static", "static-sorted")

TITLE = f"Batching: {REQUESTS} requests with lognormal output lengths (sigma 1), {SLOTS} slots"
ROUNDS = 3
BARS = (
    Bar("steps, static / continuous", lambda r: r["static steps"] / r["continuous steps"], at_least=1.8),
    Bar("steps, length-sorted static / continuous", lambda r: r["static-sorted steps"] / r["continuous steps"]),
    Bar("output tok/s, continuous / static", lambda r: r["static_s"] / r["continuous_s"], at_least=1.5),
    Bar("output tok/s, continuous / length-sorted static", lambda r: r["static-sorted_s"] / r["continuous_s"]),
    Bar("slot occupancy under load, continuous", lambda r: r["continuous occupancy"], at_least=0.9),
    Bar("slot occupancy under load, static", lambda r: r["static occupancy"]),
    Bar("slot occupancy under load, length-sorted static", lambda r: r["static-sorted occupancy"]),
    Bar("output tok/s, continuous", lambda r: r["tokens"] / r["continuous_s"]),
)


@dataclass
class State:
    engines: dict[str, LLM]
    trace: Trace


def prepare() -> State:
    first = LLM("smollm2-135m", max_num_seqs=SLOTS)
    return make_state(first.model, REQUESTS, SLOTS, MEDIAN, LONGEST)


def make_state(model: Transformer, requests: int, slots: int, median: float, longest: int) -> State:
    outputs = lognormal_lengths(requests, median, 1.0, high=longest)
    vocab = model.config.vocab_size
    trace = make_trace("lognormal outputs", at_once(requests), uniform_lengths(requests, 8, 32), outputs, vocab)
    blocks = slots * -(-trace.longest // 16)
    engines = {way: LLM(model, batching=way, max_num_seqs=slots, num_blocks=blocks) for way in WAYS}
    warm = Trace("warm-up", trace.arrivals[:slots])
    for llm in engines.values():
        replay(llm.engine, warm)
    return State(engines, trace)


def measure(state: State, turn: int) -> dict[str, float]:
    found: dict[str, float] = {"tokens": state.trace.output_tokens}
    for i in range(len(WAYS)):
        way = WAYS[(i + turn) % len(WAYS)]
        run = replay(state.engines[way].engine, state.trace, time.perf_counter)
        found |= {f"{way}_s": run.seconds, f"{way} steps": len(run.steps), f"{way} occupancy": run.occupancy}
    return found
