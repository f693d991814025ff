"""What is measured, and how fast it ought to be: the only place where either is written down."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["decode", "prefill", "mix", "overhead"]


@dataclass(frozen=True)
class Measure:
    """One line of the benchmark. rows prompts of ``prompt`` tokens; ``new`` decoding steps after the first token.

    decode: (time of new + 1 tokens) - (time of 1 token), for all rows at once. prefill: time to the first token of one prompt,
    ``new`` times a turn. mix: rows requests at once, prompts of 16..prompt and outputs of 16..new tokens. overhead: share of a
    step that minillm's scheduler, sampler and detokenizer take.
    """

    name: str
    kind: Kind
    title: str
    rows: int
    prompt: int
    new: int

    @property
    def unit(self) -> str:
        return "of a step" if self.kind == "overhead" else "tok/s"

    def quick(self, new: int = 6) -> "Measure":
        """The same with few tokens: shows that everything runs, and warms up."""
        return dataclasses.replace(self, new=1 if self.kind == "prefill" else min(self.new, new))

    def task(self, vocab_size: int) -> dict[str, Any]:
        """The request that goes to every engine, the same for all. Token ids are random: no two prompts share a prefix."""
        rng = random.Random(self.name)  # seeded by the name: equal in every run
        rows = self.new + 1 if self.kind == "prefill" else self.rows
        lengths, new = [self.prompt] * rows, [self.new] * rows
        if self.kind == "mix":
            lengths = [rng.randint(min(16, self.prompt), self.prompt) for _ in range(rows)]
            new = [rng.randint(min(16, self.new), self.new) for _ in range(rows)]
        prompts = [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]
        return {"task": self.kind, "prompts": prompts, "new": new if self.kind == "mix" else self.new}

    def value(self, task: dict[str, Any], answer: dict[str, Any]) -> float:
        """Tokens per second, or for overhead the share of a step."""
        if self.kind == "overhead":
            return float(answer["overhead"])
        if self.kind == "prefill":
            tokens = self.prompt
        else:
            tokens = sum(task["new"]) if self.kind == "mix" else self.rows * self.new
        return tokens / float(answer["seconds"])


MEASURES = {
    m.name: m
    for m in (
        Measure("decode1", "decode", "decode, 1 row, context 32 to 160", 1, 32, 128),
        Measure("prefill512", "prefill", "prefill of 512 tokens", 1, 512, 3),
        Measure("decode8", "decode", "decode, 8 rows", 8, 32, 64),
        Measure("decode16", "decode", "decode, 16 rows", 16, 32, 64),
        Measure("decode32", "decode", "decode, 32 rows", 32, 32, 64),
        Measure("mix32", "mix", "32 requests, prompts 16..256, outputs 16..128", 32, 256, 128),
        Measure("overhead", "overhead", "scheduler, sampler, detokenizer in a 32-row step", 32, 32, 32),
    )
}


@dataclass(frozen=True)
class Bar:
    """How many times as fast as a peer minillm should be; against the peer's own best variant.

    engine: the variant of minillm. at_least: None reports the ratio without judging it. For overhead there is no peer, and the
    share of a step is to be at most ``at_most``.
    """

    measure: str
    engine: str
    peer: str | None
    at_least: float | None = None
    aim: float | None = None
    at_most: float | None = field(default=None, kw_only=True)


_EAGER_AND_COMPILED: tuple[tuple[str, str, float, float | None], ...] = (  # held against each of the two
    ("decode8", "transformers", 1.6, None),
    ("decode32", "transformers", 1.6, None),
    ("mix32", "transformers", 2.0, None),
    ("mix32", "vllm", 0.7, 1.0),
    ("decode16", "llama.cpp", 1.0, None),
    ("decode32", "llama.cpp", 1.0, None),
)
_UNJUDGED = (
    ("decode1", "llama.cpp"), ("decode8", "llama.cpp"), ("mix32", "llama.cpp"), ("decode1", "vllm"), ("decode8", "vllm"),
    ("decode32", "vllm"),
)  # fmt: skip
_BOTH = ("minillm", "minillm-compiled")
_INT4 = (("decode1", 0.7), ("decode8", None), ("decode16", None), ("decode32", None))
BARS = (
    Bar("decode1", "minillm", "transformers", 1.3),
    Bar("decode1", "minillm-compiled", "transformers", 2.7, 3.5),
    Bar("prefill512", "minillm", "transformers", 1.0, 1.2),
    *(Bar(measure, engine, peer, bar, aim) for measure, peer, bar, aim in _EAGER_AND_COMPILED for engine in _BOTH),
    *(Bar("overhead", engine, None, at_most=0.10) for engine in _BOTH),
    *(Bar("prefill512", "minillm", peer) for peer in ("vllm", "llama.cpp")),
    *(Bar(measure, engine, peer) for measure, peer in _UNJUDGED for engine in _BOTH),
    *(Bar(measure, "minillm-int4", "llama.cpp", aim=aim) for measure, aim in _INT4),
)
