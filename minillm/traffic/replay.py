"""Replay a trace on an engine in real time."""

from __future__ import annotations

import time
from collections import deque
from typing import Callable

from minillm.engine.engine import Engine
from minillm.engine.scheduler import SchedulerOutput
from minillm.sampling_params import SamplingParams
from minillm.traffic.run import Run, Served, Step
from minillm.traffic.trace import Arrival, Trace


def replay(
    engine: Engine, trace: Trace, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
) -> Run:
    """Send each request at its time, greedily and to its full length, and step the engine until all have ended.

    ValueError, before anything runs, for an engine that has work already or a request that it refuses.
    """
    if engine.has_work:
        raise ValueError("the engine has other work; a replay needs it idle")
    params = [SamplingParams(max_tokens=a.output_len, temperature=0.0, ignore_eos=True) for a in trace.arrivals]
    for a, p in zip(trace.arrivals, params, strict=True):
        engine.admission.check(engine.encode(a.prompt), p)
    pending = deque(zip(trace.arrivals, params, strict=True))
    plans: list[Step] = []
    steps: list[Step] = []
    sent: dict[str, Arrival] = {}
    times: dict[str, list[float]] = {}

    def observe(plan: SchedulerOutput) -> None:
        plans.append(Step.of(plan, engine.scheduler))

    engine.scheduler.observers.append(observe)
    try:
        start = clock()
        while pending or engine.has_work:
            now = clock() - start
            while pending and pending[0][0].time <= now:
                arrival, p = pending.popleft()
                name = engine.add_request(arrival.prompt, p)
                sent[name], times[name] = arrival, []
            if not engine.has_work:
                sleep(pending[0][0].time - now)
                continue
            before = clock() - start
            outputs = engine.step()
            after = clock() - start
            steps += [plan.at(before, after) for plan in plans]
            plans.clear()
            for out in outputs:
                new = len(out.token_ids) - len(times[out.request_id])
                times[out.request_id] += [after] * new
    finally:
        engine.scheduler.observers.remove(observe)
        for name in sent:
            engine.abort(name)  # those that an interrupt left behind
    served = tuple(Served(name, arrival, tuple(times[name])) for name, arrival in sent.items())
    return Run(f"{trace.name}, in real time", served, tuple(steps))
