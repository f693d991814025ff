"""Lesson 5.3: the two lanes of a serving step, host and device: who did what when, taken from a running engine."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minillm.course.labs.overlap import endless
from minillm.course.stepper import Stepper
from minillm.course.style import COLOURS, DPI, FAINT, INK, SMALL, SOFT, Drawing, styled, titled
from minillm.llm import LLM
from minillm.perf.units import format_time


@dataclass(frozen=True)
class Moment:
    """lane: "host" or "device". start, stop: seconds since the recording began. step: the step it was done for."""

    lane: str
    what: str
    step: int
    start: float
    stop: float


class Recorder:
    """Takes the times of an engine's steps from outside: planning, the model's run, and handing the tokens out.

    device: seconds that a run lasts at least. A run that is done earlier waits, as a stand-in for a device that the host only
    starts and waits for; what the host does meanwhile, and when, is measured.
    """

    def __init__(self, llm: LLM, device: float = 0.0):
        self.engine, self.device = llm.engine, device
        self.moments: list[Moment] = []
        self._zero, self._planned, self._ran, self._landed = time.perf_counter(), 0, 0, 0
        self._planning = self._handing = 0.0
        self._host = threading.current_thread()
        engine = self.engine
        self._parts = engine.runner.run, engine.scheduler.schedule, engine.pipeline.submit

    def record(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Moment]:
        """Answer the prompts and return what was done when, in seconds since the first step."""
        engine = self.engine
        for prompt in prompts:
            engine.add_request(prompt, endless(tokens))
        engine.runner.run = self._run  # type: ignore[method-assign]
        engine.scheduler.schedule = self._schedule  # type: ignore[method-assign]
        engine.pipeline.submit = self._submit  # type: ignore[method-assign]
        self._zero = time.perf_counter()
        try:
            while engine.has_work:
                engine.step()
                self._handed_out()
        finally:
            engine.runner.run, engine.scheduler.schedule, engine.pipeline.submit = self._parts  # type: ignore[method-assign]
        return sorted(self.moments, key=lambda m: m.start)

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def _schedule(self) -> Any:
        self._planning = self._now()
        return self._parts[1]()

    def _submit(self, run: Any, step: Any, before: Any) -> "Future[Any]":
        self._note("host", "plan", self._planned, self._planning)
        self._planned += 1
        future = self._parts[2](run, step, before)
        waited = future.result

        def result(timeout: float | None = None) -> Any:
            if threading.current_thread() is not self._host:
                return waited(timeout)  # the next step asks for the tokens of this one
            self._handed_out()
            found = waited(timeout)
            self._handing, self._landed = self._now(), self._landed + 1
            return found

        future.result = result  # type: ignore[method-assign]
        return future

    def _run(self, step: Any, before: Any = None) -> Any:
        start = self._now()
        found = self._parts[0](step, before)
        time.sleep(max(0.0, self.device - (self._now() - start)))
        self._note("device", "run", self._ran, start)
        self._ran += 1
        return found

    def _handed_out(self) -> None:
        if self._handing:
            self._note("host", "hand out", self._landed - 1, self._handing)
            self._handing = 0.0

    def _note(self, lane: str, what: str, step: int, start: float) -> None:
        self.moments.append(Moment(lane, what, step, start, self._now()))


def step_seconds(moments: Sequence[Moment], skip: int = 2) -> float:
    """Mean seconds from one run's end to the next one's, without the first ones: they hold the prompts and warm up."""
    ends = sorted(m.stop for m in moments if m.lane == "device")[skip:]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def idle_share(moments: Sequence[Moment], skip: int = 2) -> float:
    """Share of that time in which the device had nothing to do."""
    runs = sorted((m for m in moments if m.lane == "device"), key=lambda m: m.start)[skip:]
    busy = sum(m.stop - m.start for m in runs[1:])
    return max(0.0, 1 - busy / (runs[-1].stop - runs[0].stop))


def timeline_figure(recorded: Mapping[str, Sequence[Moment]], first: int = 2, last: int = 5) -> Figure:
    """Both lanes of every recording, from the planning of step ``first`` to the end of step ``last``, on one scale."""
    looks = {"plan": (COLOURS[1], "////"), "hand out": (COLOURS[3], "...."), "run": ("#9CCFF0", "")}
    shown = {name: [m for m in moments if first <= m.step <= last] for name, moments in recorded.items()}
    length = max(max(m.stop for m in ms) - min(m.start for m in ms) for ms in shown.values())
    fig = Drawing(figsize=(7.4, 0.7 + 1.15 * len(shown)), dpi=DPI, layout="constrained", facecolor="white")
    axes = fig.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, moments) in zip(axes, shown.items(), strict=True):
        zero = min(m.start for m in moments)
        for m in moments:
            colour, hatch = looks[m.what]
            lane = 0 if m.lane == "host" else 1
            width = 1e3 * (m.stop - m.start)
            left = 1e3 * (m.start - zero)
            ax.barh(lane, width, left=left, height=0.8, color=colour, hatch=hatch, edgecolor=SOFT, linewidth=0.6)
            if m.lane == "device" and width > 1e3 * length / 30:
                ax.text(left + width / 2, lane, str(m.step), ha="center", va="center", fontsize=SMALL, color=INK)
        styled(ax).set_yticks([0, 1], ["host", "device"])
        ax.set_ylim(1.5, -0.5)
        ax.set_xlim(0, 1e3 * length)
        ax.grid(True, axis="x", color=FAINT)
        ax.grid(False, axis="y")
        titled(ax, name, "ms" if ax is axes[-1] else "")
    handles = [Patch(facecolor=c, hatch=h, edgecolor=SOFT, label=what) for what, (c, h) in looks.items()]
    fig.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=SMALL, frameon=False)
    return fig


def timeline_stepper(recorded: Mapping[str, Sequence[Moment]], first: int = 2, last: int = 7) -> Stepper:
    """The same, one step after the other: what is on which lane when step i ends."""

    def draw(step: int, _: int) -> tuple[Figure, str]:
        said = []
        for name, moments in recorded.items():
            (run,) = (m for m in moments if m.lane == "device" and m.step == step)
            beside = sum(
                max(0.0, min(m.stop, run.stop) - max(m.start, run.start)) for m in moments if m.lane == "host" and m.what != "run"
            )
            said.append(f"{name}: {format_time(beside)} of host work beside it")
        return timeline_figure(recorded, first, step), f"step {step} ran {format_time(run.stop - run.start)}. {'; '.join(said)}."

    return Stepper("host and device", list(range(first, last + 1)), draw)
