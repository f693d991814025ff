"""KV in int8 and fp8 against 16 bits: the time of a decode step and the bytes it reads, by context.

On a CPU without a kernel of its own the codes are turned back into 16 bits at every read, so that fewer bytes need not be faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minillm import LLM
from minillm.attention.torch_backend import TorchAttention
from minillm.bench.study import Bar
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.transformer import Transformer
from minillm.perf.timing import measure as time_calls

TITLE = "KV in int8 and fp8 against 16 bits: step time and bytes by context (report)"
ROUNDS = 3
CONTEXTS = (256, 2048)
ROWS = 4
KINDS = ("auto", "int8", "fp8")
BLOCK = 16


def step_ratio(kind: str, context: int, r: Any) -> float:
    return float(r[f"{kind}_{context}"] / r[f"auto_{context}"])


def byte_ratio(kind: str, r: Any) -> float:
    return float(r[f"{kind}_bytes"] / r["auto_bytes"])


BARS = (
    *(Bar(f"step, {k} / 16-bit, context {n}", partial(step_ratio, k, n)) for k in KINDS[1:] for n in CONTEXTS),
    *(Bar(f"KV bytes per token, {k} / 16-bit", partial(byte_ratio, k)) for k in KINDS[1:]),
)


@dataclass(frozen=True)
class State:
    engines: dict[str, Any]


def prepare() -> State:
    model = LLM("smollm2-135m", num_blocks=8).model
    return state_of(model)


def state_of(model: Transformer) -> State:
    """An engine per kind over one model, its pool filled with noise."""
    blocks = ROWS * CONTEXTS[-1] // BLOCK
    engines = {k: LLM(model, kv_dtype=k, num_blocks=blocks, block_size=BLOCK, prefix_cache="none").engine for k in KINDS}
    shape = (BLOCK, model.config.num_kv_heads, model.config.head_dim)
    noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    for engine in engines.values():
        for layer in range(model.config.num_layers):
            for block in range(blocks + 1):
                engine.store.write(layer, torch.arange(block * BLOCK, (block + 1) * BLOCK), noise[0], noise[1])
    return State(engines)


def measure(state: State, turn: int) -> dict[str, float]:
    found: dict[str, float] = {f"{k}_bytes": engine.store.bytes_per_token for k, engine in state.engines.items()}
    for context in CONTEXTS:
        for i in range(len(KINDS)):
            kind = KINDS[(i + turn) % len(KINDS)]
            found[f"{kind}_{context}"] = step_seconds(state.engines[kind], context)
    return found


def step_seconds(engine: Any, context: int) -> float:
    """The median time of a decode step of ROWS rows at this context."""
    per_row = CONTEXTS[-1] // BLOCK
    rows = [Row([5], context - 1, range(1 + i * per_row, 1 + (i + 1) * per_row)) for i in range(ROWS)]
    batch = ForwardBatch.build(rows, BLOCK, device=engine.model.device)
    backend = TorchAttention(engine.model.config.sliding_window)
    plan = backend.plan(batch, engine.model.dtype)
    with torch.inference_mode():
        return time_calls(lambda: engine.model(batch, engine.store, backend, plan), warmup=1, repeats=5).median
