"""Single steps of a model, timed and counted, with and without a cache: what lessons and studies compare."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention, precision_name
from minillm.bench.quality import make_kv
from minillm.cache.kv_store import recounted
from minillm.checking import check_whole
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.runner import ModelRunner
from minillm.model.transformer import Transformer
from minillm.perf.timing import Timing
from minillm.perf.work import Work

SECONDS_EACH = 0.6
"""After this long no further run of a step is started: without a cache a late position takes seconds."""


class Ticking(TorchAttention):
    """The engine's attention; calls ``tick`` in every layer, so that a long step can be stopped in its middle."""

    def __init__(self, window: int | None, tick: Callable[[], None]) -> None:
        super().__init__(window)
        self.tick = tick

    def forward(self, q: Tensor, layer: int, store: Any, plan: Any) -> Tensor:
        self.tick()
        return super().forward(q, layer, store, plan)


@dataclass(frozen=True)
class Step:
    """One way of making the token at a position: its counted work and the time that it took."""

    work: Work
    timing: Timing


class DecodeBench:
    """Times single steps of a model at any position up to ``most``, for up to ``batch`` rows.

    The cache is filled with noise: the time of a step does not depend on what the keys and values are, its text would.
    """

    def __init__(
        self, model: Transformer, most: int = 512, batch: int = 4, block_size: int = 16,
        kv_dtype: str = "auto",
    ) -> None:  # fmt: skip
        self.model, self.most, self.batch, self.block_size = model, most, batch, block_size
        self.blocks = -(-most // block_size)
        self.store = make_kv(kv_dtype, model, (1 + batch * self.blocks) * block_size)
        shape = (self.store.num_slots, model.config.num_kv_heads, model.config.head_dim)
        k, v = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)
        for layer in range(model.config.num_layers):
            self.store.write(layer, torch.arange(self.store.num_slots), k, v)

    @property
    def precision(self) -> str:
        return precision_name(self.model.dtype)

    def build(self, position: int, batch: int, cached: bool) -> ForwardBatch:
        """The step that makes the logits at ``position`` (1 is the first token): one token a row, or all of them."""
        for name, value, most in (("position", position, self.most), ("batch", batch, self.batch)):
            check_whole(name, value)
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")
        start = position - 1 if cached else 0
        ids = [(7 * i + 3) % self.model.config.vocab_size for i in range(start, position)]
        tables = [range(1 + r * self.blocks, 1 + (r + 1) * self.blocks) for r in range(batch)]
        return ForwardBatch.build([Row(ids, start, table) for table in tables], self.block_size, device=self.model.device)

    def work(self, position: int, batch: int, cached: bool) -> Work:
        made = self.build(position, batch, cached)
        backend = TorchAttention(self.model.config.sliding_window)
        work = self.model.work(made, backend, backend.plan(made, self.model.dtype))
        return recounted(self.store, work)

    def measure(
        self, position: int, batch: int, cached: bool, tick: Callable[[], None] = lambda: None, repeats: int = 5
    ) -> Step:
        """Time the step: the first run warms up and counts only where it took long by itself."""
        made = self.build(position, batch, cached)
        runner = ModelRunner(self.model, self.store, Ticking(self.model.config.sliding_window, tick), self.block_size)
        samples: list[float] = []
        started = time.perf_counter()
        with torch.inference_mode():
            for i in range(repeats + 1):
                before = time.perf_counter()
                _, work = runner.forward(made)
                seconds = time.perf_counter() - before
                if i > 0 or seconds > SECONDS_EACH / 2:
                    samples.append(seconds)
                if samples and time.perf_counter() - started > SECONDS_EACH:
                    break
        return Step(work, Timing(tuple(samples)))

    def compare(self, position: int, batch: int = 1, tick: Callable[[], None] = lambda: None) -> dict[str, Step]:
        """Both ways of making the token at a position."""
        return {way: self.measure(position, batch, way == "cache", tick) for way in ("cache", "recompute")}


Steps = dict[str, dict[int, Step]]
"""{what is compared: {place: step}}"""


def sweep(made: Mapping[str, DecodeBench], places: Sequence[int], measure: Callable[[str, int], Step | None]) -> Steps:
    """Measure at each place, those that are compared taking turns; None leaves a place out."""
    found: Steps = {name: {} for name in made}
    for n in places:
        for name in made:
            if (step := measure(name, n)) is not None:
                found[name][n] = step
    return found


def timing_of(found: Steps) -> dict[str, dict[int, Timing]]:
    return {name: {n: step.timing for n, step in steps.items()} for name, steps in found.items()}
