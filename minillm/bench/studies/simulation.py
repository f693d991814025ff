"""A trace in simulated time, its step times from a curve through other steps measured before, against the same in real time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from minillm.bench.study import Bar
from minillm.llm import LLM
from minillm.traffic.replay import replay
from minillm.traffic.simulate import simulate
from minillm.traffic.step_time import StepCurve
from minillm.traffic.trace import Trace, lognormal_lengths, make_trace, poisson, uniform_lengths

REQUESTS, RATE, PROMPTS, MEDIAN, LONGEST = 60, 8.0, (16, 192), 24, 96
OPTIONS: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_blocks": 400}

TITLE = f"Simulation: {REQUESTS} Poisson arrivals, chunked prompts of {PROMPTS[0]} to {PROMPTS[1]} tokens, lognormal outputs"
ROUNDS = 3
BARS = (
    Bar("throughput, simulated / real", lambda r: r["simulated tok/s"] / r["real tok/s"], at_least=0.85, at_most=1.15),
    Bar("p95 TPOT, simulated / real", lambda r: r["simulated p95 TPOT"] / r["real p95 TPOT"], at_least=0.8, at_most=1.2),
    Bar("p95 TTFT, simulated / real", lambda r: r["simulated p95 TTFT"] / r["real p95 TTFT"]),
    Bar("steps, simulated / real", lambda r: r["simulated steps"] / r["real steps"]),
    Bar("seconds of simulation per second of the trace", lambda r: r["simulation_s"] / r["real_s"]),
)


@dataclass
class State:
    llm: LLM
    trace: Trace
    options: dict[str, Any]
    prompts: tuple[int, int]


def prepare() -> State:
    return make_state(LLM("smollm2-135m", **OPTIONS), REQUESTS, RATE, PROMPTS, MEDIAN, LONGEST, OPTIONS)


def make_state(
    llm: LLM, requests: int, rate: float, prompts: tuple[int, int], median: float, longest: int, options: dict[str, Any]
) -> State:
    outputs = lognormal_lengths(requests, median, 1.0, high=longest)
    lengths = uniform_lengths(requests, *prompts)
    trace = make_trace("Poisson", poisson(requests, rate), lengths, outputs, llm.model.config.vocab_size)
    return State(llm, trace, options, prompts)


def measure(state: State, turn: int) -> dict[str, float]:
    curve = StepCurve.measure(state.llm.engine, time.perf_counter, state.prompts, seed=turn)
    real = replay(state.llm.engine, state.trace)
    before = time.perf_counter()
    simulated = simulate(state.trace, curve, **state.options)
    found = {"simulation_s": time.perf_counter() - before, "real_s": real.seconds}
    for name, run in (("real", real), ("simulated", simulated)):
        found |= {f"{name} tok/s": run.throughput, f"{name} steps": len(run.steps)}
        found |= {f"{name} p95 TPOT": run.tpot(95), f"{name} p95 TTFT": run.ttft(95)}
    return found
