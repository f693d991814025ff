"""The run itself: engines take turns, round after round, so that a disturbance hits all of them; only one is ever active."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from minillm.bench.engines import OWN, Engine
from minillm.bench.measures import Measure
from minillm.bench.worker import Worker, WorkerError, WorkerLost

SETTLE = 0.3
"""Seconds between turns, for the threads of the engine before to fall asleep."""
TEXTS = ("The capital of France is", "Once upon a time there was a small robot that", "To make bread, you need flour, water,")


@dataclass(frozen=True)
class Sample:
    """One turn: its round, its value in the measure's unit, and the worker's answer."""

    round: int
    value: float
    answer: Mapping[str, Any]


@dataclass
class Results:
    """What came out.

    facts: {engine: what its worker said at the start}. missing: {engine: why it never ran, or stopped}.
    refused: {measure: {series: why}}, where an engine lives on but cannot do this. samples: {measure: {series: [...]}}.
    agreement: {engine: leading tokens of each check that equal those of minillm in float32}.
    busy: share of the processor that others used before each round.
    """

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    agreement: dict[str, list[int]] = field(default_factory=dict)
    checked_tokens: int = 0
    machine: dict[str, Any] | None = None
    busy: list[float] = field(default_factory=list)


class Bench:
    """Starts the engines, runs the rounds, ends the engines. say: called with each line of progress."""

    def __init__(
        self, engines: Sequence[Engine], launch: Callable[[Engine], tuple[Worker, dict[str, Any]]], vocab_size: int,
        timeout: float, say: Callable[[str], None],
    ):  # fmt: skip
        """launch: start an engine's worker and return it with its first request; what it raises makes the engine unavailable."""
        self.engines, self.launch, self.vocab_size, self.timeout, self.say = engines, launch, vocab_size, timeout, say
        self.results = Results()
        self._workers: dict[str, Worker] = {}

    def start(self) -> None:
        for engine in self.engines:
            self.say(f"starting {engine.name}")
            started = time.monotonic()
            try:
                worker, task = self.launch(engine)
                self._workers[engine.name] = worker
                facts = worker.ask(task, self.timeout)
            except (WorkerError, WorkerLost, ValueError, OSError) as error:
                self._lose(engine, str(error))
            else:
                self.results.facts[engine.name] = {**facts, "start_seconds": round(time.monotonic() - started, 1)}

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def measure_machine(self, refresh: bool) -> None:
        answer = self._ask_own("machine", {"task": "machine", "refresh": refresh})
        self.results.machine = answer

    def check(self, reference: Engine, new: int) -> None:
        """Compare greedy tokens with those of a minillm in float32, which runs for this only."""
        texts = self._ask_own("check", {"task": "encode", "texts": list(TEXTS)})
        prompts = texts["token_ids"] if texts else Measure("check", "decode", "", 3, 12, new).task(self.vocab_size)["prompts"]
        task = {"task": "tokens", "prompts": prompts, "new": new}
        worker: Worker | None = None
        try:
            worker, start = self.launch(reference)
            worker.ask(start, self.timeout)
            expected = worker.ask(task, self.timeout)["token_ids"]
        except (WorkerError, WorkerLost, ValueError, OSError) as error:
            self._refuse("check", reference.name, str(error))
            return
        finally:
            if worker is not None:
                worker.close()
        self.results.checked_tokens = new
        for engine in self._alive():
            answer = self._turn(engine, "check", engine.name, task)
            if answer is not None:
                got = answer["token_ids"]
                self.results.agreement[engine.name] = [_common(a, b) for a, b in zip(expected, got, strict=True)]

    def warm_up(self, measures: Sequence[Measure]) -> None:
        """One short turn of every engine. What it refuses here it is asked again: a probe may be too short to be timed."""
        before = {what: dict(series) for what, series in self.results.refused.items()}
        for measure in measures:
            self._round(measure.quick(), 0, keep=False)
        self.results.refused = before

    def run(self, measures: Sequence[Measure], rounds: int, after: Callable[[], object] = lambda: None) -> None:
        """after: called when a round is done, to keep what there is."""
        for r in range(rounds):
            self.results.busy.append(psutil.cpu_percent(interval=1.0) / 100)  # every engine is idle now: this is somebody else
            for measure in measures:
                self.say(f"round {r + 1} of {rounds}: {measure.title}")
                self._round(measure, r, keep=True)
            after()

    def profile(self, measures: Sequence[Measure], steps: int) -> None:
        for measure in measures:
            task = measure.task(self.vocab_size) | {"task": "profile", "new": 0 if measure.kind == "prefill" else steps}
            task["prompts"] = task["prompts"][: measure.rows]
            answer = self._ask_own(f"profile {measure.name}", task)
            if answer:
                self.results.profile[measure.name] = answer

    def _round(self, measure: Measure, r: int, keep: bool) -> None:
        task = measure.task(self.vocab_size)
        turns = [(e, m) for e in self.engines if measure.kind in e.kinds for m in (e.methods if measure.kind == "mix" else ("",))]
        first = r % len(turns) if turns else 0
        for engine, method in turns[first:] + turns[:first]:  # nobody always runs in the same neighbour's wake
            series = engine.series(method)
            if engine.name not in self._workers or series in self.results.refused.get(measure.name, {}):
                continue
            answer = self._turn(engine, measure.name, series, {**task, "method": method})
            if answer is not None and keep:
                value = measure.value(task, answer)
                self.results.samples.setdefault(measure.name, {}).setdefault(series, []).append(Sample(r, value, answer))
                self.say(f"  {series:<32} {value:10.3f} {measure.unit}")

    def _turn(self, engine: Engine, what: str, series: str, task: Mapping[str, Any]) -> dict[str, Any] | None:
        time.sleep(SETTLE)
        try:
            return self._workers[engine.name].ask(task, self.timeout)
        except WorkerError as error:
            self._refuse(what, series, str(error))
        except WorkerLost as error:
            self._lose(engine, str(error))
        return None

    def _ask_own(self, what: str, task: Mapping[str, Any]) -> dict[str, Any] | None:
        own = next((e for e in self._alive() if e.name == OWN), None)
        return self._turn(own, what, OWN, task) if own else None

    def _alive(self) -> list[Engine]:
        return [e for e in self.engines if e.name in self._workers]

    def _refuse(self, what: str, series: str, reason: str) -> None:
        self.results.refused.setdefault(what, {})[series] = reason
        self.say(f"  {series}: {what} is not available: {reason}")

    def _lose(self, engine: Engine, reason: str) -> None:
        worker = self._workers.pop(engine.name, None)
        if worker is not None:
            worker.close()
        self.results.missing[engine.name] = reason
        self.say(f"  {engine.name} is not available: {reason}")


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
