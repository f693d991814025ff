"""minillm, measured through LLM.generate. It alone also says what the machine can do, and where its own time goes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from protocol import Handler, Prompts, serve, timed, versions  # type: ignore[import-not-found]  # run as a script: its folder is the path

import minillm
from minillm.bench import anatomy
from minillm.llm import LLM
from minillm.perf.hardware import measure_machine
from minillm.perf.meter import Needles
from minillm.sampling_params import SamplingParams


def start(task: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Handler]]:
    torch.set_num_threads(task["threads"])
    llm = LLM(task["model"], **task["options"])
    calls: list[Needles] = []

    def generate(prompts: Prompts, new: list[int]) -> list[list[int]]:
        llm.meter.reset()
        outputs = llm.generate([list(p) for p in prompts], [SamplingParams(max_tokens=n, ignore_eos=True) for n in new])
        calls.append(llm.meter.snapshot())
        return [list(o.token_ids) for o in outputs]

    tasks = timed(generate)

    def decode(task: dict[str, Any]) -> dict[str, Any]:
        return {**tasks["decode"](task), "work": _work(calls[-1] - calls[-2])}

    def prefill(task: dict[str, Any]) -> dict[str, Any]:
        return {**tasks["prefill"](task), "work": _work(calls[-1])}

    def mix(task: dict[str, Any]) -> dict[str, Any]:
        return {**tasks["mix"](task), "work": _work(calls[-1])}

    def encode(task: dict[str, Any]) -> dict[str, Any]:
        return {"token_ids": [llm.engine.encode(text) for text in task["texts"]]}

    def machine(task: dict[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(measure_machine(llm.model.device, refresh=task["refresh"]))

    def overhead(task: dict[str, Any]) -> dict[str, Any]:
        return anatomy.overhead(llm, task["prompts"], task["new"])

    def profile(task: dict[str, Any]) -> dict[str, Any]:
        return anatomy.profile(llm, task["prompts"], task["new"])

    facts = {
        "versions": {**versions("torch", "tokenizers", "numpy"), "minillm": minillm.__version__}, "note": llm.note,
        "dtype": str(llm.model.dtype).removeprefix("torch."), "compiled": llm.engine.runner.compiled is not None,
        "engine": llm.engine.description,
    }  # fmt: skip
    if task["options"].get("compile") and not facts["compiled"]:
        raise RuntimeError("the decode step cannot be compiled here")
    own: list[Handler] = [decode, prefill, mix, encode, machine, overhead, profile]
    return facts, {**tasks, **{handler.__name__: handler for handler in own}}


def _work(n: Needles) -> dict[str, Any]:
    return {"steps": n.steps, **dataclasses.asdict(n.work)}


if __name__ == "__main__":
    serve(start)
