"""How long a step takes: from the roofline of some hardware, or from a curve through measured steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

import numpy as np

from minillm.engine.engine import Engine
from minillm.engine.scheduler import SchedulerOutput
from minillm.model.config import ModelConfig
from minillm.perf.hardware import Hardware
from minillm.perf.roofline import predict, step_work
from minillm.sampling_params import SamplingParams
from minillm.traffic.run import Step

DECODING_STEPS = 12
"""Steps that each load decodes while a curve is measured."""


@dataclass(frozen=True)
class Roofline:
    """The least time of a step on some hardware, plus overhead_s for what is not overlapped: a floor for any machine.

    Padding counts as what it computes; dtype and bytes as in `step_work`."""

    config: ModelConfig
    hardware: Hardware
    overhead_s: float = 0.0
    dtype: str = "bfloat16"
    bytes_per_weight: float = 2.0
    kv_bytes_per_element: float = 2.0

    def __call__(self, step: Step) -> float:
        chunks = [(row.past, row.new) for row in step.rows] + [(0, 1)] * step.padded_tokens
        work = step_work(
            self.config, chunks, logits=step.samples, dtype=self.dtype, bytes_per_weight=self.bytes_per_weight,
            kv_bytes_per_element=self.kv_bytes_per_element,
        )  # fmt: skip
        return predict(work, self.hardware, self.overhead_s).seconds


@dataclass(frozen=True)
class _Fit:
    """Seconds = a curve through the number of tokens (straight between knots) + weights · (sampled rows, KV tokens, pairs)."""

    knots: tuple[int, ...]
    weights: tuple[float, ...]

    def __call__(self, step: Step) -> float:
        return float(_features(step, self.knots) @ np.asarray(self.weights))

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "_Fit":
        tokens = [step.tokens for step in steps]
        powers = sorted({2 ** round(np.log2(n)) for n in tokens})
        knots = tuple(int(k) for k in np.clip(powers, min(tokens), max(tokens)))
        knots = tuple(dict.fromkeys(knots))
        x = np.stack([_features(step, knots) for step in steps])
        y = np.array([step.seconds for step in steps])
        weights = _nonnegative(x, y, np.full(len(y), 1 / y.mean()))
        # errors of long and short steps count alike, in proportion to what is predicted and not to what was measured:
        # that would favour the steps that happened to be fast
        return cls(knots, tuple(_nonnegative(x, y, 1 / np.maximum(x @ weights, 1e-9))))


@dataclass(frozen=True)
class StepCurve:
    """Seconds of a step, fitted to steps that were measured. Steps in which every row decodes one token have a curve of their
    own: an engine may run them compiled."""

    decode: _Fit
    mixed: _Fit

    def __call__(self, step: Step) -> float:
        return (self.decode if _decodes(step) else self.mixed)(step)

    @classmethod
    def fit(cls, steps: Sequence[Step]) -> "StepCurve":
        """From steps with their start and end; ValueError where none decode or none compute a prompt."""
        decode, mixed = [s for s in steps if _decodes(s)], [s for s in steps if not _decodes(s)]
        if not decode or not mixed:
            raise ValueError(f"a curve needs decoding steps and steps with prompts, got {len(decode)} and {len(mixed)}")
        return cls(_Fit.of(decode), _Fit.of(mixed))

    @classmethod
    def measure(
        cls, engine: Engine, clock: Callable[[], float], prompts: tuple[int, int] = (16, 256), seed: int = 0
    ) -> "StepCurve":
        """Drive an idle engine through loads of every size and fit a curve to its steps. prompts: shortest and longest.

        For every power of two up to max_num_seqs, that many requests compute their prompts, decode a while, and are aborted."""
        if engine.has_work:
            raise ValueError("the engine has other work; a measurement needs it idle")
        random = np.random.Generator(np.random.Philox(key=seed))
        limit = engine.options.max_num_seqs
        loads = list(dict.fromkeys(min(2**i, limit) for i in range(limit.bit_length() + 1)))
        steps: list[Step] = []
        plans: list[Step] = []

        def observe(plan: SchedulerOutput) -> None:
            plans.append(Step.of(plan, engine.scheduler))

        engine.scheduler.observers.append(observe)
        vocab = engine.model.config.vocab_size
        names: list[str] = []
        try:
            for i, load in enumerate([limit, *loads, *loads]):
                for k in range(load):
                    n = min(int(random.integers(prompts[0], prompts[1], endpoint=True)), engine.max_model_len - 1)
                    params = SamplingParams(max_tokens=max(1, engine.cache.capacity - n), temperature=0.0, ignore_eos=True)
                    names.append(engine.add_request(random.integers(2, vocab, n).tolist(), params))
                    if k >= load // 2:  # half of them come while the others decode: prompts in chunks of every size
                        _timed(engine, clock, plans, steps)
                while engine.scheduler.waiting:
                    _timed(engine, clock, plans, steps)
                for _ in range(DECODING_STEPS):
                    _timed(engine, clock, plans, steps)
                for name in names:
                    engine.abort(name)
                if i == 0:
                    steps.clear()  # the first load was the warm-up
        finally:
            engine.scheduler.observers.remove(observe)
            for name in names:
                engine.abort(name)
        return cls.fit(steps)


def _timed(engine: Engine, clock: Callable[[], float], plans: list[Step], steps: list[Step]) -> None:
    """One step of the engine, timed, if it has work."""
    plans.clear()
    if not engine.has_work:
        return
    before = clock()
    engine.step()
    after = clock()
    steps += [plan.at(before, after) for plan in plans]


def _decodes(step: Step) -> bool:
    return all(row.new == 1 and row.samples for row in step.rows)


def _features(step: Step, knots: Sequence[int]) -> np.ndarray:
    """Hat functions of the number of tokens at the knots (beyond the last one its line goes on), then what else costs time."""
    tokens, hats = step.tokens, np.zeros(len(knots))
    if len(knots) == 1 or tokens <= knots[0]:
        hats[0] = 1.0 if len(knots) > 1 else max(tokens / knots[0], 1.0)
    else:
        i = min(int(np.searchsorted(knots, tokens, side="left")), len(knots) - 1)
        share = (tokens - knots[i - 1]) / (knots[i] - knots[i - 1])
        hats[i - 1], hats[i] = 1 - share, share
    return np.concatenate([hats, [1e-3 * step.samples, 1e-5 * step.kv_tokens, 1e-6 * step.pairs]])


def _nonnegative(x: np.ndarray, y: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Least squares with weights of at least 0: those that come out negative are left out, one after another."""
    used = list(range(x.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(x[:, used] * scale[:, None], y * scale, rcond=None)
        if not used or found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    weights = np.zeros(x.shape[1])
    weights[used] = found
    return weights
