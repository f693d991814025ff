"""A mixture of 64 experts, 8 a token, against a loop over tokens and against a dense layer of equal active size.

With 512 tokens an expert has 64 rows of work for the weights that it reads, where the dense layer has 512. So the ratio of their
times has a floor, reported beside it: what reading all experts takes by what the dense layer's arithmetic takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from minillm.bench.study import Bar
from minillm.model.experts import Places
from minillm.model.layers import MLP, PLAIN
from minillm.model.moe import MoE, Router
from minillm.model.moe_config import MoEConfig
from minillm.perf.hardware import fast_dtype
from minillm.perf.probes import read_bandwidth
from minillm.quant.linear import Linear, default_method

TITLE = "One layer of 64 experts, 8 a token: grouped, token by token, and dense of equal active size (ms by tokens in the report)"
ROUNDS = 5
HIDDEN = 1024
MOE = MoEConfig(64, 8, 512)
TOKENS = (1, 8, 32, 128, 512)
LOOPED = 32
"""The loop over tokens is measured up to here: beyond, it only takes longer."""
MANY = 512


def ratio(way: str, other: str, tokens: int) -> Callable[[Mapping[str, float]], float]:
    return lambda r: r[f"{way}_{tokens}"] / r[f"{other}_{tokens}"]


def floor(read: str, dense: str) -> Callable[[Mapping[str, float]], float]:
    """The roofline of the mixture by the dense layer's time: it does the same arithmetic, at best as fast, and it must read."""
    return lambda r: max(1.0, r[read] / r[dense])


BARS = (
    Bar("loop over tokens / grouped, 32 tokens", ratio("loop", "grouped", 32), at_least=5.0),
    Bar("grouped / dense of equal active size, 512 tokens", ratio("grouped", "dense", MANY), at_most=1.5),
    Bar("of it the experts' products", ratio("products", "dense", MANY)),
    Bar("its floor: reading the experts / dense, at least 1", floor("read", f"dense_{MANY}")),
    Bar("grouped / dense of equal active size, 512 tokens, float32", ratio("f32_grouped", "f32_dense", MANY), at_most=1.5),
    Bar("of it the experts' products, float32", ratio("f32_products", "f32_dense", MANY)),
    Bar("its floor: reading the experts / dense, at least 1, float32", floor("f32_read", f"f32_dense_{MANY}")),
    *(Bar(f"loop over tokens / grouped, {n} tokens", ratio("loop", "grouped", n)) for n in (1, 8)),
    *(Bar(f"grouped / dense of equal active size, {n} tokens", ratio("grouped", "dense", n)) for n in (1, 8, 32, 128)),
    Bar("distinct experts, 32 tokens", lambda r: r["touched_32"]),
)


@dataclass(frozen=True)
class Layers:
    """A mixture, its experts one by one, and a dense layer that does as much arithmetic per token."""

    moe: MoE
    experts: list[MLP]
    dense: MLP

    @classmethod
    def random(cls, moe: MoEConfig, hidden: int, dtype: torch.dtype, seed: int = 0) -> "Layers":
        generator = torch.Generator().manual_seed(seed)
        method = default_method(dtype, "cpu")

        def linear(out: int, inner: int) -> Linear:
            return Linear((torch.randn(out, inner, generator=generator) / inner**0.5).to(dtype), None, method)

        def mlp(width: int) -> tuple[Linear, Linear]:
            return linear(2 * width, hidden), linear(hidden, width)

        pairs = [mlp(moe.expert_size) for _ in range(moe.num_experts)]
        router = Router(moe, torch.randn(moe.num_experts, hidden, generator=generator).to(dtype) / hidden**0.5, None)
        layer = MoE(moe, router, [g for g, _ in pairs], [d for _, d in pairs], None)
        return cls(layer, [MLP(*pair) for pair in pairs], MLP(*mlp(moe.top_k * moe.expert_size)))

    def inputs(self, tokens: int, seed: int = 1) -> Tensor:
        """[tokens, hidden]"""
        made = torch.randn(tokens, self.dense.gate_up.in_features, generator=torch.Generator().manual_seed(seed))
        return made.to(self.dense.gate_up.dtype)

    def touched(self, tokens: int) -> int:
        """Distinct experts that these inputs go to."""
        return len(self.moe.router(self.inputs(tokens))[0].unique())

    def ways(self) -> dict[str, Callable[[Tensor], Tensor]]:
        return {"grouped": self.moe, "loop": lambda x: by_token(self.moe, self.experts, x), "dense": self.dense}

    def products(self, tokens: int) -> Callable[[Tensor], Tensor]:
        """The two products of a mixture alone: routed, sorted and activated beforehand, whatever it is then given."""
        moe, x = self.moe, self.inputs(tokens)
        experts, _ = moe.router(x)
        counts = experts.flatten().bincount(minlength=moe.moe.num_experts)
        places = Places.find(experts, counts, moe.gate_up.runs(counts.tolist()))
        rows = x.index_select(0, places.tokens)
        inner = PLAIN.swiglu(moe.gate_up(rows, places))

        def run(_: Tensor) -> Tensor:
            moe.gate_up(rows, places)
            return moe.down(inner, places)

        return run


def by_token(layer: MoE, experts: Sequence[MLP], x: Tensor) -> Tensor:
    """The same output one token after the other: every expert's weights are read for every token that goes to it."""
    rows = []
    for row in x.split(1):
        chosen, weights = layer.router(row)
        out = torch.zeros_like(row)
        for e, weight in zip(chosen[0].tolist(), weights[0].to(x.dtype), strict=True):
            out += weight * experts[e](row)
        rows.append(out)
    return torch.cat(rows)


@dataclass(frozen=True)
class State:
    """The layers in the dtype of this machine, and in float32 (which may be the same)."""

    fast: Layers
    exact: Layers


def prepare() -> State:
    fast, exact = (Layers.random(MOE, HIDDEN, dtype) for dtype in (fast_dtype("cpu"), torch.float32))
    return State(fast, exact)


@torch.inference_mode()
def measure(state: State, turn: int, repeats: int = 5) -> dict[str, float]:
    found: dict[str, float] = {}
    for tokens in TOKENS:
        found[f"touched_{tokens}"] = state.fast.touched(tokens)
        found |= _turns(state.fast, tokens, turn, repeats)
    found["read"] = _reading(state.fast)
    found |= {f"f32_{name}": s for name, s in _turns(state.exact, MANY, turn, repeats).items()}
    found["f32_read"] = _reading(state.exact)
    return found


def _turns(layers: Layers, tokens: int, turn: int, repeats: int) -> dict[str, float]:
    """Seconds of each way, the best of some repeats, in an order that rotates with turn."""
    ways = [(name, run) for name, run in layers.ways().items() if name != "loop" or tokens <= LOOPED]
    if tokens == MANY:
        ways.append(("products", layers.products(tokens)))
    x = layers.inputs(tokens)
    found = {}
    for i in range(len(ways)):
        name, run = ways[(i + turn) % len(ways)]
        run(x)
        found[f"{name}_{tokens}"] = min(_seconds(run, x) for _ in range(repeats))
    return found


def _reading(layers: Layers) -> float:
    """Seconds that it takes to read the weights of all experts and nothing else."""
    size = sum(weight.nbytes for part in (layers.moe.gate_up, layers.moe.down) for weight in part.dense())
    return size / read_bandwidth(torch.ones(size // 4), size)


def _seconds(run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    before = time.perf_counter()
    run(x)
    return time.perf_counter() - before
