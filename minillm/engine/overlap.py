"""overlap=True: the host plans step n + 1 and sorts out step n - 1 while step n runs.

A step is launched and lands later: its tokens are not known when the next one is planned. What the next one needs of them is
their place, not their id: every request that is about to get a token has one more token to compute. The ids are filled in when
the next step starts to run. One thing is learned too late: that a token has ended its text. By then the request's next step is
on its way, and its token is wasted. (As in SGLang's zero-overhead scheduler, 2024; NanoFlow, Zhu et al., arXiv 2408.12757.)

The loop is the engine's, with or without: launch, then land. All that differs is how many steps may be in flight when the next
one is planned, and in which thread a step runs.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable

from minillm.engine.runner import Step, StepResult
from minillm.engine.scheduler import SchedulerOutput
from minillm.perf.meter import StepCounts
from minillm.perf.workers import release_workers

Run = Callable[[Step, "StepResult | None"], StepResult]


@dataclass(frozen=True)
class Flight:
    """A step between its launch and its landing. spare: blocks to release when it has landed, because it may read them."""

    plan: SchedulerOutput
    counts: StepCounts
    step: Step
    future: "Future[StepResult]"
    spare: list[int] = field(default_factory=list)

    def result(self) -> StepResult:
        """What the step gave, or the error it ended with; waits until it has ended."""
        return self.future.result()

    @property
    def failed(self) -> bool:
        """Whether the step itself has ended with an error: an interrupt of whoever waits for it leaves it in flight."""
        return self.future.done() and self.future.exception() is not None


class Inline:
    """Runs a step when it is launched: nothing is in flight when the next one is planned."""

    depth = 0

    def submit(self, run: Run, step: Step, before: Flight | None) -> "Future[StepResult]":
        future: Future[StepResult] = Future()
        try:
            future.set_result(run(step, before.result() if before else None))
        except BaseException as error:
            future.set_exception(error)
        return future


class OneAhead:
    """Runs steps one after the other in a thread of their own: one may be in flight when the next is planned.

    torch releases Python's lock inside its operators, so the two threads share the time of a step; on a GPU the thread feeds
    the stream and waits for its tokens. On a CPU there is little to gain: the model's threads want the same cores, and a
    compiled step holds the lock from its beginning to its end (pytorch issue 197516).
    """

    depth = 1

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="minillm-model")

    def submit(self, run: Run, step: Step, before: Flight | None) -> "Future[StepResult]":
        release_workers()  # of the calling thread: the model's thread computes now
        # a step behind one that failed fails with it: it would compute on tokens that there are not
        return self._thread.submit(lambda: run(step, before.result() if before else None))
