"""Where the time of minillm's steps goes, seen from outside: parts of a step by wrapping them, operators by torch's profiler."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, Sequence
from unittest.mock import patch

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from minillm.engine import runner as runner_module
from minillm.engine.batch import ForwardBatch
from minillm.llm import LLM
from minillm.sampling_params import SamplingParams

BEYOND_THE_MODEL = ("scheduler", "sampler", "detokenizer")
GROUPS = (  # the first pattern that fits an operator's name, or that of an operator around it
    ("attention", re.compile(r"scaled_dot_product|attention")),
    ("matmuls", re.compile(r"linear|matmul|(^|::|_)(add|b)?mm(_|$)")),
    ("KV reads and writes", re.compile(r"::(embedding|index_copy_?)$")),
)


class Stopwatch:
    """Seconds spent inside wrapped calls, by name. A call inside another wrapped call counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - started
                self.seconds[name] += elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        return timed


def overhead(llm: LLM, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
    """Mean seconds of a step in which every prompt decodes one token, and the share of each part of it.

    overhead: scheduler, sampler and detokenizer; outside: all that is not the model's forward pass, which also holds batch
    building, the meter and what no wrapper caught.
    """
    engine, runner, watch = llm.engine, llm.engine.runner, Stopwatch()
    parts: list[tuple[str, Any, str]] = [
        ("model", *((runner.compiled, "run") if runner.compiled is not None else (runner.model, "forward"))),
        ("batch", ForwardBatch, "build"), ("batch", runner.backend, "plan"), ("batch", runner.backend, "single_group"),
        ("scheduler", engine.scheduler, "schedule"), ("scheduler", engine.scheduler, "update"),
        ("sampler", runner_module, "sample"), ("detokenizer", engine, "_advance"),
        ("meter", runner.model, "work"), ("meter", engine.meter, "record"),
        ("meter", engine.accounts, "counts"), ("meter", engine.accounts, "kv_bytes"),
    ]  # fmt: skip
    with _decoding(llm, prompts, new + 1), ExitStack() as wrapped:
        for name, owner, method in parts:
            if hasattr(owner, method):
                wrapped.enter_context(patch.object(owner, method, watch.wrap(name, getattr(owner, method))))
        elapsed = _time_steps(llm, new)
    shares = {name: seconds / elapsed for name, seconds in watch.seconds.items()}
    shares["rest"] = 1 - sum(shares.values())
    return {
        "rows": len(prompts), "steps": new, "step_seconds": elapsed / new, "shares": shares,
        "overhead": sum(shares.get(name, 0.0) for name in BEYOND_THE_MODEL), "outside": 1 - shares["model"],
    }  # fmt: skip


def profile(llm: LLM, prompts: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
    """Shares of a step's time by kind of operator; steps: how many decoding steps, 0 for the step that computes the prompts.

    Operators' times come from a profiled run, the whole from a run without the profiler, which slows Python and dispatch down.
    What the operators leave of the whole is Python and dispatch, so that figure is a lower bound.
    """
    runs: list[Any] = []
    for profiled in (False, True):
        with _decoding(llm, prompts, 2 * max(steps, 1)) if steps else _queued(llm, prompts, 1), ExitStack() as stack:
            recorder = stack.enter_context(torch_profile(activities=[ProfilerActivity.CPU])) if profiled else None
            runs.append((_time_steps(llm, max(steps, 1)), recorder))
    (elapsed, _), (profiled_elapsed, recorder) = runs
    spent: dict[str, float] = defaultdict(float)
    for event in recorder.events():
        spent[_group(event)] += event.self_cpu_time_total * 1e-6
    whole = max(elapsed, sum(spent.values()))  # a disturbed run may not hold the operators of another one
    shares = {name: seconds / whole for name, seconds in sorted(spent.items())}
    shares["Python and dispatch"] = 1 - sum(shares.values())
    return {
        "rows": len(prompts), "steps": max(steps, 1), "step_seconds": elapsed / max(steps, 1), "shares": shares,
        "slowdown_by_profiler": profiled_elapsed / elapsed,
    }  # fmt: skip


def _group(event: Any) -> str:
    names = []
    at = event
    while at is not None:
        names.append(at.name)
        at = at.cpu_parent
    return next((group for group, pattern in GROUPS if any(pattern.search(name) for name in names)), "other operators")


def _time_steps(llm: LLM, n: int) -> float:
    started = time.perf_counter()
    for _ in range(n):
        llm.engine.step()
    return time.perf_counter() - started


@contextmanager
def _queued(llm: LLM, prompts: Sequence[Sequence[int]], new: int) -> Iterator[None]:
    """Requests that have been added, and are aborted at the end."""
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    names = [llm.engine.add_request(p, params) for p in prompts]
    try:
        yield
    finally:
        for name in names:
            llm.engine.abort(name)


@contextmanager
def _decoding(llm: LLM, prompts: Sequence[Sequence[int]], new: int) -> Iterator[None]:
    """Requests that have computed their prompts and warmed up with one decoding step more."""
    with _queued(llm, prompts, new + 2):
        while llm.engine.scheduler.waiting or any(r.num_output_tokens < 2 for r in llm.engine.scheduler.running):
            llm.engine.step()
        yield
