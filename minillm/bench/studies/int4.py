"""One decode step of the default model in 16, 8 and 4 bits, from one row to thirty-two: where fewer bytes pay, and where not.

The layers are in 8 bits per channel or in 4 bits in groups of 64; the head is in 8 bits in both. The dense copy that the packed
weights keep is part of what is measured, and of the bytes held.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minillm.bench.decode import DecodeBench
from minillm.bench.study import Bar
from minillm.model.loader import load_checkpoint
from minillm.model.transformer import Transformer
from minillm.quant.config import QuantConfig
from minillm.quant.quantise import quantise_model

TITLE = "A decode step in 16, 8 and 4 bits by rows (context 128; ms below in the report)"
ROUNDS = 5
ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 128
CONFIGS = {"8": QuantConfig("rtn", 8, -1, True), "4": QuantConfig("rtn", 4, 64)}


def to_16_bits(bits: str, rows: int, r: Any) -> float:
    return float(r[f"{bits}_{rows}"] / r[f"16_{rows}"])


def crossover(r: Any, bits: str) -> float:
    """The first number of rows at which the step is no faster than with 16 bits; twice the largest if it always is."""
    return next((rows for rows in ROWS if r[f"{bits}_{rows}"] >= r[f"16_{rows}"]), 2 * ROWS[-1])


def beyond(r: Any, bits: str) -> float:
    """The worst ratio to 16 bits among the numbers of rows from the dense copy's threshold on."""
    return max(r[f"{bits}_{rows}"] / r[f"16_{rows}"] for rows in ROWS if rows >= 8)


BARS = (
    Bar("int4 / 16-bit, 1 row", lambda r: r["4_1"] / r["16_1"], at_most=0.5),
    Bar("int8 / 16-bit, 1 row", lambda r: r["8_1"] / r["16_1"]),
    Bar("int4 / 16-bit, worst of 8 to 32 rows", lambda r: beyond(r, "4"), at_most=1.05),
    Bar("int8 / 16-bit, worst of 8 to 32 rows", lambda r: beyond(r, "8"), at_most=1.05),
    *(Bar(f"int4 / 16-bit, {rows} rows", partial(to_16_bits, "4", rows)) for rows in ROWS[1:]),
    *(Bar(f"int4 without a copy / 16-bit, {rows} rows", partial(to_16_bits, "packed", rows)) for rows in (8, 32)),
    Bar("crossover of int4, rows", lambda r: crossover(r, "4")),
    Bar("bytes held, int4 with its copy / 16-bit", lambda r: r["held_4"] / r["held_16"]),
    Bar("bytes held, int4 without / 16-bit", lambda r: r["held_packed"] / r["held_16"]),
)


@dataclass(frozen=True)
class State:
    benches: dict[str, DecodeBench]


def models(checkpoint: Any) -> dict[str, Transformer]:
    """In 16 bits, and from float32 weights in 8 and 4; "packed" is 4 bits without a dense copy."""
    plain = Transformer.from_weights(checkpoint.config, checkpoint.weights, torch.bfloat16)
    exact = Transformer.from_weights(checkpoint.config, checkpoint.weights, torch.float32)
    made = {bits: quantise_model(exact, config, dtype=torch.bfloat16) for bits, config in CONFIGS.items()}
    packed = quantise_model(exact, QuantConfig("rtn", 4, 64, dense_from=None), dtype=torch.bfloat16)
    return {"16": plain, **made, "packed": packed}


def prepare() -> State:
    return state_of(models(load_checkpoint("smollm2-135m")))


def state_of(made: dict[str, Transformer]) -> State:
    return State({name: DecodeBench(model, most=CONTEXT, batch=ROWS[-1]) for name, model in made.items()})


def measure(state: State, turn: int) -> dict[str, float]:
    found: dict[str, float] = {f"held_{name}": bench.model.weight_bytes() for name, bench in state.benches.items()}
    names = list(state.benches)
    for rows in ROWS:
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            if name == "packed" and rows not in (8, 32):
                continue
            bench = state.benches[name]
            found[f"{name}_{rows}"] = bench.measure(CONTEXT, rows, True, repeats=5).timing.median
    return found
