"""A step with sparse attention against a dense one, decoding and prefill, by context: where it wins, and where it should.

A tiny-width random model over KV of noise: attention is most of its step. The cost model is two straight lines: what a step costs
grows with the context by the keys that it reads (dense), or by the candidates that it scores (sparse). Each line goes through the
times at the two ends of its range; where they meet is predicted, and compared with where the times between really meet.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from minillm.attention.window import SparseView
from minillm.bench.study import Bar
from minillm.course.labs.sparse_attention import BLOCK, CHUNK, WINDOW, Bench, Line, crossover, measured_crossover

TITLE = "Sparse attention against dense, by context (8 blocks of 64 and a window of 64; decode, and a chunk of 512)"
ROUNDS = 5
BLOCKS = 8
CONTEXTS = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
PHASES = {"decode": 1, "prefill": CHUNK}
WAYS = {"dense": (None, 1), "sparse": (BLOCKS, 1), "shared": (BLOCKS, 2)}
"""Blocks chosen, and layers that share a choice."""
LEAST = SparseView(BLOCKS, WINDOW, BLOCK).first_sparse


def times(r: Any, phase: str, way: str) -> list[float]:
    return [float(r[f"{phase}_{way}_{n}"]) for n in CONTEXTS]


def predicted(r: Any, phase: str) -> float:
    """Where the cost model's lines meet: dense from the first and last context, sparse from the last two octaves."""
    ends = {"dense": (CONTEXTS[0], CONTEXTS[-1]), "sparse": (4096, CONTEXTS[-1])}
    made = {way: Line.through(*((n, r[f"{phase}_{way}_{n}"]) for n in at)) for way, at in ends.items()}
    return crossover(made["dense"], made["sparse"], LEAST)


def crossover_ratio(r: Any, phase: str) -> float:
    """Measured against predicted."""
    return measured_crossover(CONTEXTS, times(r, phase, "dense"), times(r, phase, "sparse")) / predicted(r, phase)


def gain(r: Any, phase: str, context: int, way: str = "sparse") -> float:
    return float(r[f"{phase}_dense_{context}"] / r[f"{phase}_{way}_{context}"])


def floor(phase: str, context: int) -> float | None:
    """Decoding crosses over near 8,192 tokens: there either side is as good."""
    return None if (phase, context) == ("decode", 8192) else 1.0


BARS = (
    *(
        Bar(f"dense / sparse, {p}, {n} tokens", partial(gain, phase=p, context=n), at_least=floor(p, n))
        for p in PHASES for n in (8192, 16384)
    ),
    *(
        Bar(f"crossover, measured / predicted, {p}", partial(crossover_ratio, phase=p), at_least=2 / 3, at_most=1.5)
        for p in PHASES
    ),
    *(Bar(f"crossover predicted, {p}, tokens", partial(predicted, phase=p)) for p in PHASES),
    *(
        Bar(f"dense / sparse, {p}, 16384 tokens, choice shared by 2", partial(gain, phase=p, context=16384, way="shared"))
        for p in PHASES
    ),
)  # fmt: skip


def prepare() -> Bench:
    bench = Bench()
    for blocks, share in WAYS.values():
        bench.seconds(blocks, CONTEXTS[0], CHUNK, repeats=1, share=share)
    return bench


def measure(state: Bench, turn: int) -> dict[str, float]:
    found = {}
    names = list(WAYS)
    for phase, queries in PHASES.items():
        for n in CONTEXTS:
            for i in range(len(names)):
                way = names[(i + turn) % len(names)]
                if way == "shared" and n != CONTEXTS[-1]:
                    continue
                blocks, share = WAYS[way]
                timing = state.seconds(blocks, n, queries, 11 if queries == 1 else 2, share=share)
                found[f"{phase}_{way}_{n}"] = timing.median
    return found
