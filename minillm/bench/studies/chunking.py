"""Eight requests decode while a prompt of 1,500 tokens arrives: chunked prefill against prefill first."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from minillm.bench.interference import Interference, meet
from minillm.bench.study import Bar
from minillm.llm import LLM

RUNNING, SHORT, LONG, CHUNK, BLOCK = 8, 32, 1500, 256, 16

TITLE = f"Chunked prefill: {RUNNING} decode, a prompt of {LONG} tokens arrives, chunks of {CHUNK}"
ROUNDS = 5
BARS = (
    Bar("p99 inter-token latency meanwhile, chunked / prefill first", lambda r: r["chunked_itl"] / r["first_itl"], at_most=0.35),
    Bar("TTFT of the long prompt, chunked / prefill first", lambda r: r["chunked_ttft"] / r["first_ttft"], at_most=1.5),
    Bar("p99 inter-token latency, prefill first (s)", lambda r: r["first_itl"]),
    Bar("p99 inter-token latency, chunked (s)", lambda r: r["chunked_itl"]),
    Bar("TTFT of the long prompt, prefill first (s)", lambda r: r["first_ttft"]),
    Bar("steps until its first token, chunked", lambda r: r["chunked_steps"]),
)


@dataclass
class State:
    """Two engines over one model, and the prompts; a pool in which nobody is preempted."""

    engines: dict[str, LLM]
    running: list[list[int]]
    late: list[int]


def prepare() -> State:
    return make_state(LLM("smollm2-135m", num_blocks=1), RUNNING, SHORT, LONG, CHUNK)


def make_state(llm: LLM, running: int, short: int, long: int, chunk: int) -> State:
    """chunk: tokens of the long prompt in a step in which all others decode."""
    draw = random.Random(0)
    vocab = llm.model.config.vocab_size
    prompts = [draw.choices(range(3, vocab), k=n) for n in [short] * running + [long]]
    answer = 8 + -(-long // chunk)  # tokens that a running request may come to have
    blocks = running * -(-(short + answer) // BLOCK) + -(-long // BLOCK)
    same: dict[str, Any] = {"max_num_seqs": running + 1, "num_blocks": blocks, "block_size": BLOCK}
    engines = {
        way: LLM(llm.model, prefill=way, max_num_batched_tokens=budget, **same)
        for way, budget in (("first", long + running), ("chunked", chunk + running))
    }
    state = State(engines, prompts[:-1], prompts[-1])
    for engine in engines.values():
        meet(engine, state.running, state.late)
    return state


def measure(state: State, turn: int) -> dict[str, float]:
    found: dict[str, Interference] = {}
    ways = list(state.engines)
    for way in ways[:: -1 if turn % 2 else 1]:
        found[way] = meet(state.engines[way], state.running, state.late)
    result: dict[str, float] = {}
    for way, seen in found.items():
        result |= {f"{way}_itl": seen.itl(99), f"{way}_ttft": seen.ttft, f"{way}_steps": seen.needles.steps}
    return result
