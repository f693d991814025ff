"""Reserved strips against pages of 1 to 256 tokens: slots left empty, requests at once in an equal pool, seconds of a step."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from minillm.attention.strip_backend import StripAttention
from minillm.bench.study import Bar
from minillm.llm import LLM
from minillm.model.transformer import Transformer
from minillm.sampling_params import SamplingParams
from minillm.traffic.occupancy import Held, before_preemption, last_block_waste, occupancy, waste

BLOCKS = (1, 4, 16, 64, 256)
POOL, LONGEST, REQUESTS = 16_384, 2048, 96
CONTEXT, ROWS, STEPS = 512, 4, 8
WAYS: dict[str, dict[str, Any]] = {
    "reserve": {"allocation": "reserve"}, "exact": {"allocation": "exact"},
    **{f"paged {b}": {"block_size": b} for b in BLOCKS},
}  # fmt: skip

TITLE = f"Paging: a lognormal mix in a pool of {POOL:,} tokens, and a step over {ROWS} rows of {CONTEXT} tokens"
ROUNDS = 5
BARS = (
    Bar("empty share of allocated slots, reserved strips", lambda r: r["reserve waste"]),
    Bar("empty share, exact strips (an oracle)", lambda r: r["exact waste"]),
    *(Bar(f"empty share, pages of {b}", itemgetter(f"paged {b} waste")) for b in BLOCKS),
    Bar("empty share, pages of 16 / formula", lambda r: r["paged 16 waste"] / r["formula 16"], at_most=1.1),
    Bar("requests before a preemption, pages of 16 / reserved", lambda r: r["paged 16 rows"] / r["reserve rows"], at_least=2.0),
    Bar("requests before a preemption, pages of 16 / exact", lambda r: r["paged 16 rows"] / r["exact rows"]),
    Bar("decode step, pages of 16 / strips read in place", lambda r: r["paged_s"] / r["strips_s"]),
)  # fmt: skip


@dataclass
class State:
    """Two engines over one model: pages that are gathered, and strips that are read where they lie."""

    paged: LLM
    strips: LLM
    context: int
    rows: int
    steps: int


def lengths(seed: int, count: int, longest: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of requests whose lengths are lognormal: many short ones and a few very long."""
    draw = random.Random(seed)

    def one(median: float) -> int:
        return max(1, min(round(draw.lognormvariate(0, 1) * median), longest // 2))

    return [(one(160), one(120)) for _ in range(count)]


def prepare() -> State:
    model = LLM("smollm2-135m", num_blocks=1).model
    return make_state(model, CONTEXT, ROWS, STEPS)


def make_state(model: Transformer, context: int, rows: int, steps: int) -> State:
    longest = context + steps + 1
    options: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": rows, "num_blocks": rows * -(-longest // 16)}
    strips = LLM(model, kv_cache="contiguous", attention_backend=StripAttention(), **options)
    return State(LLM(model, **options), strips, context, rows, steps)


def measure(state: State, turn: int) -> dict[str, float]:
    found = hold(lengths(turn, REQUESTS, LONGEST), POOL, LONGEST)
    order = [("paged_s", state.paged), ("strips_s", state.strips)]
    for name, llm in order[turn % 2 :] + order[: turn % 2]:
        found[name] = time_steps(llm, state)
    return found


def hold(mix: list[tuple[int, int]], pool: int, longest: int) -> dict[str, float]:
    """Waste and rows of every way to allocate, and what the formula expects of pages of 16."""
    found: dict[str, float] = {}
    for name, options in WAYS.items():
        steps: list[Held] = occupancy(mix, pool, longest, max_num_seqs=len(mix), **options)
        found |= {f"{name} waste": waste(steps), f"{name} rows": before_preemption(steps)}
        if name == "paged 1":
            rows = sum(s.running for s in steps)
            found["formula 16"] = last_block_waste(16, sum(s.live for s in steps) / rows)
    return found


def time_steps(llm: LLM, state: State) -> float:
    """Seconds of one decode step, the fastest of several."""
    params = SamplingParams(max_tokens=state.steps + 1, ignore_eos=True)
    names = [llm.engine.add_request([1 + i] * state.context, params) for i in range(state.rows)]
    while any(r.num_computed_tokens < state.context for r in [*llm.engine.scheduler.running, *llm.engine.scheduler.waiting]):
        llm.engine.step()
    seconds = []
    for _ in range(state.steps - 1):
        start = time.perf_counter()
        llm.engine.step()
        seconds.append(time.perf_counter() - start)
    for name in names:
        llm.engine.abort(name)
    return min(seconds)
