"""How the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Sequence

MAX_LOGPROBS = 100
MAX_SAMPLES = 1024
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Choices for one request. Filters apply in this order: temperature, top-k, top-p.

    n: independent samples of the same prompt; results stand next to each other in the output list.
    max_tokens: new tokens at most, at least 1.
    temperature: 0 is greedy (the highest logit, the lowest id among equals); larger is more random.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p, at least one
        (Holtzman et al. 2020, arXiv 1904.09751).
    seed: makes the request's tokens repeatable whatever runs beside it; None draws one from the engine's seed.
    stop: strings that end the text; the stop string itself is not part of it.
    stop_token_ids: ids that end the request like an end-of-sequence token. ignore_eos: run on past end-of-sequence tokens.
    logprobs: report the log-probability of the chosen token and of this many most likely ones; None reports none.
    """

    n: int = 1
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, MAX_SAMPLES)
        _whole("max_tokens", self.max_tokens, 1)
        _whole("top_k", self.top_k, 0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _real("temperature", self.temperature)
        _real("top_p", self.top_p)
        if not 0 <= self.temperature:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        stops = (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop)
        for s in stops:
            if not isinstance(s, str) or not s:
                raise ValueError(f"stop strings must be non-empty strings, got {s!r}")
        ids = _several("stop_token_ids", self.stop_token_ids)
        for t in ids:
            _whole("stop_token_ids", t, 0)
        for name in ("n", "max_tokens", "top_k", "seed", "logprobs"):
            if getattr(self, name) is not None:  # a small numpy integer would overflow in sums with other numbers
                object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "stop_strings", stops)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(int(t) for t in ids))

    def samples(self) -> list["SamplingParams"]:
        """n independent samples, each a request of its own; with a seed, sample i has seed + i."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else (self.seed + i) % (MAX_SEED + 1) for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]


def _several(name: str, value: object) -> tuple:
    try:
        return () if value is None else tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be a list, got {value!r}") from None


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    bad = isinstance(value, bool) or not isinstance(value, Integral)
    if bad or int(value) < low or (high is not None and int(value) > high):  # type: ignore[call-overload]
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be a whole number {limit}, got {value!r}")


def _real(name: str, value: object) -> None:
    try:
        good = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        good = False
    if not good:
        raise ValueError(f"{name} must be a finite number, got {value!r:.60}")
