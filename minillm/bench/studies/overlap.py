"""One decoding step of one engine: a step at a time, overlapped, and replayed in fixed sizes; eager and compiled."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

from minillm.bench.study import Bar
from minillm.engine.engine import Engine
from minillm.engine.graphs import DecodeGraphs
from minillm.engine.overlap import Inline, OneAhead
from minillm.llm import LLM
from minillm.sampling_params import SamplingParams

BATCHES = (1, 8, 32)
WAYS = ("sync", "overlap", "replay")
PROMPT, STEPS, BLOCK = 32, 12, 16

TITLE = f"Overlap and replay: seconds of a decoding step at batch {', '.join(map(str, BATCHES))}"
ROUNDS = 5


def _over(way: str, mode: str, batch: int) -> Callable[[Mapping[str, float]], float]:
    return lambda r: r[f"{mode}_{way}_{batch}_s"] / r[f"{mode}_sync_{batch}_s"]


def _bars() -> tuple[Bar, ...]:
    """Two cores compute the model and run the host: what overlap can hide is little, and it must not cost more than that."""
    bars = []
    for mode in ("eager", "compiled"):
        for batch in BATCHES:
            name = f"{mode}, batch {batch}"
            bars.append(Bar(f"{name}: overlapped / a step at a time", _over("overlap", mode, batch), at_most=1.03))
            bars.append(Bar(f"{name}: replayed / a step at a time", _over("replay", mode, batch)))
            host = f"{mode}_host_{batch}_s", f"{mode}_sync_{batch}_s"
            bars.append(Bar(f"{name}: the host's share of a step", lambda r, host=host: r[host[0]] / r[host[1]]))  # type: ignore[misc]
    return tuple(bars)


BARS = _bars()


@dataclass
class State:
    """An engine for each mode; whether it overlaps and replays is changed between runs, so that all ways share its memory."""

    engines: dict[str, Engine]
    batches: tuple[int, ...] = BATCHES
    steps: int = STEPS
    graphs: dict[str, DecodeGraphs | None] = field(default_factory=dict)


def prepare() -> State:
    options: dict[str, Any] = {"block_size": BLOCK, "max_model_len": 128, "num_blocks": 32 * 8, "cuda_graphs": True}
    eager = LLM("smollm2-135m", **options)
    return make_state({"eager": eager.engine, "compiled": LLM(eager.model, compile=True, **options).engine})


def make_state(engines: dict[str, Engine], batches: tuple[int, ...] = BATCHES, steps: int = STEPS) -> State:
    state = State(engines, batches, steps)
    for mode, engine in engines.items():
        state.graphs[mode] = engine.runner.graphs
        for batch in batches:
            for way in WAYS:
                _run(state, mode, way, batch)
    return state


def measure(state: State, turn: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for batch in state.batches:
        for mode in state.engines:
            for i in range(len(WAYS)):
                way = WAYS[(i + turn) % len(WAYS)]
                seconds, model = _run(state, mode, way, batch)
                found[f"{mode}_{way}_{batch}_s"] = seconds
                if way == "sync":
                    found[f"{mode}_host_{batch}_s"] = max(seconds - model, 0.0)
    return found


def _run(state: State, mode: str, way: str, batch: int) -> tuple[float, float]:
    """Mean seconds of a step in which every request decodes, and of the model in it."""
    engine = state.engines[mode]
    engine.pipeline = OneAhead() if way == "overlap" else Inline()
    engine.runner.graphs = state.graphs[mode] if way == "replay" else None
    clock = ModelClock(engine)
    params = SamplingParams(max_tokens=state.steps + 4, ignore_eos=True)
    for i in range(batch):
        engine.add_request([(7 * i + j) % engine.model.config.vocab_size for j in range(PROMPT)], params)
    while engine.scheduler.waiting or any(r.num_output_tokens < 2 for r in engine.scheduler.running):
        engine.step()
    clock.seconds = 0.0
    started = time.perf_counter()
    for _ in range(state.steps):
        engine.step()
    seconds = time.perf_counter() - started
    model = clock.seconds
    while engine.has_work:
        engine.step()
    clock.stop()
    return seconds / state.steps, model / state.steps


class ModelClock:
    """Seconds that an engine's forward passes take, whichever way they go."""

    def __init__(self, engine: Engine):
        self.seconds = 0.0
        runner = engine.runner
        self._paths: list[Any] = [p for p in (runner.eager, runner.compiled, runner.graphs) if p is not None]
        for path in self._paths:
            path.run = self._timed(path.run)

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return run(*args)
            finally:
                self.seconds += time.perf_counter() - started

        return timed

    def stop(self) -> None:
        for path in self._paths:
            del path.run

