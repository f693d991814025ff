"""How long a call takes: warm-up, repeats, median and spread; on a GPU with its own clock."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping

import torch

from minillm.checking import check_whole
from minillm.perf.units import format_time


@dataclass(frozen=True)
class Timing:
    """The seconds that each run of one call took, in the order of the runs."""

    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("a Timing needs at least one sample, got none")

    @property
    def repeats(self) -> int:
        return len(self.samples)

    @property
    def median(self) -> float:
        """Seconds; half of the runs were faster."""
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        """Seconds of the fastest run: the estimate that interference from other processes biases least."""
        return min(self.samples)

    @property
    def p10(self) -> float:
        return self.percentile(10)

    @property
    def p90(self) -> float:
        return self.percentile(90)

    @property
    def iqr(self) -> float:
        """Seconds between the quartiles: the middle half of the runs lies within."""
        return self.percentile(75) - self.percentile(25)

    @property
    def spread(self) -> float:
        """Half the interquartile range as a share of the median: the ± that `str` prints."""
        return self.iqr / 2 / self.median if self.median else 0.0

    def percentile(self, q: float) -> float:
        """Seconds below which q percent of the runs lie, interpolated between neighbours; q in 0..100."""
        if not 0 <= q <= 100:
            raise ValueError(f"a percentile lies in 0..100, got {q!r}")
        ordered = sorted(self.samples)
        position = q / 100 * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    def __str__(self) -> str:
        runs = "1 run" if self.repeats == 1 else f"{self.repeats} runs"
        return f"{format_time(self.median)} (±{100 * self.spread:.0f} %, {runs})"


@dataclass(frozen=True)
class Comparison:
    """Timings of several calls that took turns, so that a disturbance hit all of them alike. The first is the baseline."""

    timings: Mapping[str, Timing]

    @property
    def baseline(self) -> str:
        return next(iter(self.timings))

    def ratio(self, name: str, to: str | None = None) -> float:
        """How many times as long `name` takes as `to` (the baseline unless said): the median over rounds of their quotient.

        Quotients are taken within a round, where both ran under the same conditions. Unknown names raise ValueError.
        """
        to = self.baseline if to is None else to
        for each in (name, to):
            if each not in self.timings:
                raise ValueError(f"no timing named {each!r}; there are {', '.join(self.timings)}")
        pairs = zip(self.timings[name].samples, self.timings[to].samples, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def speedup(self, name: str, over: str | None = None) -> float:
        """How many times as fast `name` is as `over` (the baseline unless said); above 1 is faster."""
        return self.ratio(self.baseline if over is None else over, to=name)

    def __str__(self) -> str:
        width = max(map(len, self.timings))
        lines = [f"{name:<{width}}  {timing}  {self.speedup(name):.2f}x" for name, timing in self.timings.items()]
        return "\n".join([*lines, f"x: speed relative to {self.baseline}, median over rounds"])


def measure(fn: Callable[[], Any], *, warmup: int = 3, repeats: int = 20, device: str | torch.device = "cpu") -> Timing:
    """Time `fn()`: `warmup` runs that do not count (caches, allocator, autotuning), then `repeats` that do.

    On a CUDA device, events on the current stream do the timing and each run is waited for, so that launches which merely
    queue up are not mistaken for finished work. What `fn` raises passes through. ValueError: bad counts, no such device.
    """
    _check_call("fn", fn)
    check_whole("warmup", warmup, at_least=0)
    check_whole("repeats", repeats)
    run_once = _stopwatch(device)
    for _ in range(warmup):
        run_once(fn)
    return Timing(tuple(run_once(fn) for _ in range(repeats)))


def compare(
    fns: Mapping[str, Callable[[], Any]], rounds: int = 20, *, warmup: int = 1, device: str | torch.device = "cpu"
) -> Comparison:
    """Time several calls round-robin; each round starts with the next one, so that none always runs in another's wake."""
    if not fns:
        raise ValueError("compare needs at least one function, got none")
    for name, fn in fns.items():
        _check_call(name, fn)
    check_whole("rounds", rounds)
    check_whole("warmup", warmup, at_least=0)
    run_once = _stopwatch(device)
    names = list(fns)
    for name in names * warmup:
        run_once(fns[name])
    samples: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds):
        for name in _rotated(names, r):
            samples[name].append(run_once(fns[name]))
    return Comparison({name: Timing(tuple(s)) for name, s in samples.items()})


def _rotated(names: list[str], by: int) -> Iterable[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _check_call(name: str, fn: object) -> None:
    if not callable(fn):
        raise ValueError(f"{name} must be a function without arguments, got {fn!r}")


def _stopwatch(device: str | torch.device) -> Callable[[Callable[[], Any]], float]:
    """A function that runs a call to its end and returns the seconds it took."""
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}") from None
    if device.type == "cpu":
        return _wall_clock
    if device.type != "cuda":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {str(device)!r}")
    if not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but torch sees no GPU")

    def events(fn: Callable[[], Any]) -> float:
        with torch.cuda.device(device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            fn()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3

    return events


def _wall_clock(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start
