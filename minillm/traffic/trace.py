"""Traces: which requests arrive when. Everything random is seeded: equal arguments give equal traces on every machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

import numpy as np

from minillm.checking import check_positive, check_whole

PUBLIC_REQUESTS, PUBLIC_LENGTHS = 256, (100, 1024)


@dataclass(frozen=True)
class Arrival:
    """One request: when it arrives (seconds after the start), its prompt as token ids, and how many tokens it is to get."""

    time: float
    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. name says how it was made."""

    name: str
    arrivals: tuple[Arrival, ...]

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise ValueError("a trace needs at least one request, got none")
        before = 0.0
        for i, a in enumerate(self.arrivals):
            if isinstance(a.time, str) or not before <= a.time < math.inf:  # also where the time is no number
                rule = "arrival times must be finite, at least 0 and in order"
                raise ValueError(f"{rule}; request {i} has {a.time!r} after {before!r}")
            before = a.time
            check_whole("output_len", a.output_len)
            if not len(a.prompt):
                raise ValueError("a prompt in a trace needs at least one token, got none")
            bad = next((t for t in a.prompt if isinstance(t, bool) or not isinstance(t, (int, np.integer)) or t < 0), None)
            if bad is not None:
                raise ValueError(f"a prompt in a trace is token ids, whole numbers of at least 0; request {i} has {bad!r}")

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def output_tokens(self) -> int:
        return sum(a.output_len for a in self.arrivals)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(a.prompt) + a.output_len for a in self.arrivals)


# --- when ---


def at_once(n: int) -> list[float]:
    """n requests that are all there at the start: an offline batch."""
    check_whole("n", n)
    return [0.0] * n


def poisson(n: int, rate: float, seed: int = 0) -> list[float]:
    """n arrival times of independent users, `rate` per second on average: exponential gaps."""
    return bursty(n, rate, burstiness=1.0, seed=seed)


def bursty(n: int, rate: float, burstiness: float = 3.0, seed: int = 0) -> list[float]:
    """Arrival times with gamma-distributed gaps. burstiness: standard deviation of a gap over its mean; 1 is a Poisson process,
    more comes in bursts with pauses between them, less is more even."""
    check_whole("n", n)
    check_positive("rate", rate)
    check_positive("burstiness", burstiness)
    if not 1e-100 < burstiness < 1e100:  # its square has to be a number as well
        raise ValueError(f"burstiness must lie between 1e-100 and 1e100, got {burstiness!r}")
    shape = burstiness**-2
    gaps = _generator(seed, 0).gamma(shape, 1 / (rate * shape), n)
    return [float(t) for t in np.cumsum(gaps)]


# --- how long ---


def uniform_lengths(n: int, low: int, high: int, seed: int = 0) -> list[int]:
    """n whole numbers, each from low to high alike."""
    check_whole("n", n)
    _check_range(low, high)
    return [int(x) for x in _generator(seed, 1).integers(low, high, n, endpoint=True)]


def lognormal_lengths(n: int, median: float, sigma: float = 1.0, low: int = 1, high: int = 1_000_000, seed: int = 0) -> list[int]:
    """n whole numbers whose logarithms are normal: few are much longer than the median, as answers of chat models are.

    sigma: standard deviation of the natural logarithm; at 1, a sixth exceeds 2.7 medians. Cut to low … high."""
    check_whole("n", n)
    check_positive("median", median)
    check_positive("sigma", sigma)
    _check_range(low, high)
    drawn = _generator(seed, 2).lognormal(math.log(median), sigma, n)
    return [int(x) for x in np.clip(np.rint(drawn), low, high)]


def exponential_lengths(n: int, mean: float, seed: int = 0) -> list[int]:
    """n whole numbers of at least 1, geometric: after each token the answer ends with probability 1 / mean."""
    check_whole("n", n)
    check_positive("mean", mean)
    if mean > 1e15:  # the drawn lengths are 64-bit numbers
        raise ValueError(f"mean must be at most 1e15, got {mean!r}")
    return [int(x) for x in _generator(seed, 3).geometric(1 / max(mean, 1.0), n)]


# --- together ---


def make_trace(
    name: str, times: Sequence[float], prompt_lens: Sequence[int], output_lens: Sequence[int], vocab_size: int, seed: int = 0,
    low: int = 2,
) -> Trace:  # fmt: skip
    """One request per entry of the three lists, with random token ids from low to vocab_size - 1."""
    if not len(times) == len(prompt_lens) == len(output_lens):
        raise ValueError(f"{len(times)} times, {len(prompt_lens)} prompt and {len(output_lens)} output lengths; give one of each")
    for length in prompt_lens:
        check_whole("prompt length", length)
    check_whole("vocab_size", vocab_size)
    if vocab_size <= low:
        raise ValueError(f"vocab_size must be above {low}, got {vocab_size}")
    random = _generator(seed, 4)
    prompts = [tuple(random.integers(low, vocab_size, n).tolist()) for n in prompt_lens]
    return Trace(name, tuple(Arrival(*each) for each in zip(times, prompts, output_lens, strict=True)))


def public_workload(vocab_size: int, scale: float = 1.0, requests: int = PUBLIC_REQUESTS, seed: int = 0) -> Trace:
    """What small engines publish their throughput on: 256 requests at once, input and output lengths uniform in 100..1024.

    scale: factor on both limits of the lengths, for a CPU."""
    check_positive("scale", scale)
    low, high = (max(1, round(x * scale)) for x in PUBLIC_LENGTHS)
    prompts, outputs = uniform_lengths(requests, low, high, seed), uniform_lengths(requests, low, high, seed + 1)
    name = f"{requests} requests at once, input and output uniform in {low}..{high}"
    return make_trace(name, at_once(requests), prompts, outputs, vocab_size, seed)


def _generator(seed: int, stream: int) -> np.random.Generator:
    check_whole("seed", seed, at_least=0)
    return np.random.Generator(np.random.Philox(key=seed, counter=stream << 64))


def _check_range(low: int, high: int) -> None:
    check_whole("low", low)
    check_whole("high", high)
    if high < low:
        raise ValueError(f"high must be at least low ({low}), got {high}")
