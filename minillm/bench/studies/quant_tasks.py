"""The whole default model in 3 bits by RTN, AWQ and GPTQ on one grid: what each loses, task by task, and what fitting it takes.

The loss is the KL divergence of next-token predictions from those of the float32 model. The packaged weights lie on a 4-bit grid
already, so that 4 bits on the same grid would seem to lose nothing: 3 bits in groups of 64 is another grid. The numbers are the
same in every round. A method that wins one task may lose another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from minillm.bench.quality import Evaluation
from minillm.bench.study import Bar
from minillm.engine.admission import TokenizerLike
from minillm.model.loader import load_checkpoint
from minillm.model.transformer import Transformer
from minillm.quant.config import QuantConfig
from minillm.quant.quantise import quantise_model

TITLE = "The default model in 3 bits, groups of 64, by RTN, AWQ and GPTQ: KL by task, relative to RTN (report)"
ROUNDS = 3
METHODS = ("rtn", "awq", "gptq")
TASKS = ("prose", "code", "arithmetic", "JSON", "retrieval")


def relative(method: str, task: str, r: Any) -> float:
    return float(r[f"{method}_{task}"] / r[f"rtn_{task}"])


def taken(method: str, r: Any) -> float:
    return float(r[f"fit_{method}"])


BARS = (
    *(Bar(f"KL on {t}, {m.upper()} / RTN", partial(relative, m, t)) for m in METHODS[1:] for t in TASKS),
    *(Bar(f"seconds to fit, {m.upper()}", partial(taken, m)) for m in METHODS),
)


@dataclass(frozen=True)
class State:
    evaluation: Evaluation
    models: dict[str, Transformer]
    seconds: dict[str, float] = field(default_factory=dict)


def prepare() -> State:
    checkpoint = load_checkpoint("smollm2-135m")
    exact = Transformer.from_weights(checkpoint.config, checkpoint.weights, torch.float32)
    assert checkpoint.tokenizer is not None  # the default model's
    return state_of(exact, checkpoint.tokenizer, QuantConfig("rtn", 3, 64, dense_from=1))


def state_of(exact: Transformer, tokenizer: TokenizerLike, grid: QuantConfig, most: int = 192) -> State:
    """A model by each method, and how long that took."""
    state = State(Evaluation(exact, tokenizer, choices={}, most=most), {})
    for method in METHODS:
        started = time.perf_counter()
        config = replace(grid, method=method)  # type: ignore[arg-type]
        state.models[method] = quantise_model(exact, config, tokenizer)
        state.seconds[method] = time.perf_counter() - started
    return state


def measure(state: State, turn: int) -> dict[str, float]:
    found = {f"fit_{method}": seconds for method, seconds in state.seconds.items()}
    for i in range(len(METHODS)):
        method = METHODS[(i + turn) % len(METHODS)]
        scores = state.evaluation.text_scores(state.models[method])
        found.update({f"{method}_{task}": score.kl for task, score in scores.items()})
    return found
