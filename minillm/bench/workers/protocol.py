"""What every worker has in common: JSON lines on standard input and output, and how a task is timed. Standard library only.

A request is {"task": name, ...}; its answer is {"ok": {...}} or {"error": "..."}. The first request is "start".
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from typing import Any, Callable, Sequence

Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, Sequence[int]], list[list[int]]]
"""Prompts as token ids and new tokens of each, none of which may end early → the new token ids. Greedy."""
Handler = Callable[[dict[str, Any]], dict[str, Any]]


def timed(generate: Generate) -> dict[str, Handler]:
    """The tasks that are timed through an engine's own way to generate."""

    def seconds(prompts: Prompts, new: Sequence[int]) -> float:
        started = time.perf_counter()
        outputs = generate(prompts, new)
        elapsed = time.perf_counter() - started
        if [len(ids) for ids in outputs] != list(new):
            raise ValueError(f"the engine gave {[len(ids) for ids in outputs]} new tokens instead of {list(new)}")
        return elapsed

    def decode(task: dict[str, Any]) -> dict[str, Any]:
        """n steps: the time of n + 1 tokens less the time of one, after one call that only wakes the engine."""
        prompts, rows = task["prompts"], len(task["prompts"])
        seconds(prompts, [1] * rows)
        first = seconds(prompts, [1] * rows)
        whole = seconds(prompts, [task["new"] + 1] * rows)
        if whole <= first:
            raise ValueError(f"{task['new'] + 1} tokens took {whole:.4f} s, one token {first:.4f} s; too few tokens to tell")
        return {"seconds": whole - first, "first_token_seconds": first}

    def prefill(task: dict[str, Any]) -> dict[str, Any]:
        """The time to the first token of one prompt; the median of several, after one that only wakes the engine."""
        wake, *prompts = task["prompts"]
        seconds([wake], [1])
        runs = sorted(seconds([p], [1]) for p in prompts)
        return {"seconds": runs[len(runs) // 2], "runs": runs}

    def mix(task: dict[str, Any]) -> dict[str, Any]:
        """All requests at once, each with its own number of new tokens."""
        seconds(task["prompts"][:1], [1])
        return {"seconds": seconds(task["prompts"], task["new"])}

    def tokens(task: dict[str, Any]) -> dict[str, Any]:
        return {"token_ids": generate(task["prompts"], [task["new"]] * len(task["prompts"]))}

    return {"decode": decode, "prefill": prefill, "mix": mix, "tokens": tokens}


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Handler]]]) -> None:
    """Answer requests until standard input ends. start gets the first one; it returns facts about the engine and its handlers."""
    # Engines and the processes they start may print: their standard output becomes standard error, ours is kept aside.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    handlers: dict[str, Handler] = {}
    for line in sys.stdin:
        task = json.loads(line)
        reply: dict[str, Any]
        try:
            if task["task"] == "start":
                answer, handlers = start(task)
            elif task["task"] in handlers:
                answer = handlers[task["task"]](task)
            else:
                raise ValueError(f"this engine has no task {task['task']!r}")
            reply = {"ok": answer}
        except Exception as error:  # whatever an engine raises is its answer; the worker lives on
            import traceback

            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of those packages that are there, and Python's."""
    found = {"python": sys.version.split()[0]}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found
