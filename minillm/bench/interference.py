"""A long prompt arrives while other requests decode: who waits for whom, by the clock and by the counts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable, Sequence

from minillm.llm import LLM
from minillm.perf.meter import Needles
from minillm.perf.timing import Timing
from minillm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Interference:
    """gaps: seconds between two tokens of a running request, for gaps that overlap the time from the long prompt's arrival to its
    first token. before: such gaps just before it arrived. ttft: its time to first token. steps: seconds of each step from its
    arrival on. needles: counted until its first token. tokens: of every running request, and of the late one at the end.
    """

    gaps: tuple[float, ...]
    before: tuple[float, ...]
    ttft: float
    steps: tuple[float, ...]
    needles: Needles
    tokens: tuple[tuple[int, ...], ...]

    def itl(self, q: float) -> float:
        """Inter-token latency of the running requests meanwhile, percentile q in 0..100."""
        return Timing(self.gaps).percentile(q)


def meet(
    llm: LLM, running: Sequence[Sequence[int]], late: Sequence[int], *, ahead: int = 4,
    clock: Callable[[], float] = time.perf_counter, check: Callable[[], None] = lambda: None,
) -> Interference:  # fmt: skip
    """Let ``running`` decode until each has ``ahead`` tokens, then let ``late`` arrive, and go on until the late one has its
    first token and everybody else one more. check: called before each step; what it raises ends the meeting.

    ValueError for an engine that has work already, or that does not run all of them at once. Afterwards the engine is empty.
    """
    engine = llm.engine
    if engine.has_work:
        raise ValueError("the engine has other work; a measurement needs it idle")
    if len(running) + 1 > engine.options.max_num_seqs:
        raise ValueError(f"{len(running)} running requests and one late need max_num_seqs above {engine.options.max_num_seqs}")
    if ahead < 2:
        raise ValueError(f"ahead must be at least 2, so that there is a gap, got {ahead}")
    names: list[str] = []
    last: dict[str, float] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    before: list[float] = []
    try:
        for prompt in running:
            most = engine.admission.longest_answer(len(prompt))
            names.append(engine.add_request(prompt, SamplingParams(max_tokens=most, ignore_eos=True)))
        while min((len(tokens.get(name, ())) for name in names), default=ahead) < ahead:
            check()
            outputs, now = engine.step(), clock()
            for output in outputs:
                if output.request_id in last:
                    before.append(now - last[output.request_id])
                last[output.request_id], tokens[output.request_id] = now, output.token_ids
        arrived, counted = clock(), llm.meter.snapshot()
        names.append(engine.add_request(late, SamplingParams(max_tokens=1, ignore_eos=True)))
        first: float | None = None
        needles = counted
        gaps: list[float] = []
        steps: list[float] = []
        while first is None or any(last[name] < first for name in names[:-1]):
            check()
            start = clock()
            outputs, now = engine.step(), clock()
            steps.append(now - start)
            for output in outputs:
                name = output.request_id
                if name != names[-1] and (first is None or last[name] < first):
                    gaps.append(now - last[name])
                last[name], tokens[name] = now, output.token_ids
                if name == names[-1]:
                    first, needles = now, llm.meter.snapshot() - counted
        return Interference(
            tuple(gaps), tuple(before[-2 * len(running) :]), first - arrived, tuple(steps), needles,
            tuple(tokens[name] for name in names),
        )  # fmt: skip
    finally:
        for name in names:
            engine.abort(name)
