"""How fast an engine could be at most on this machine: bytes it must move, or arithmetic it must do, at the measured roofs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from minillm.bench.engines import Engine
from minillm.bench.measures import Measure
from minillm.model.config import ModelConfig
from minillm.perf.hardware import Machine
from minillm.perf.roofline import decode_work, predict, prefill_work
from minillm.perf.work import Work


def read_machine(raw: Mapping[str, Any]) -> Machine:
    return Machine(**{**raw, "curve": tuple((int(size), float(rate)) for size, rate in raw["curve"])})


def floor_seconds(
    measure: Measure, engine: Engine, facts: Mapping[str, Any], answer: Mapping[str, Any], config: ModelConfig, machine: Machine
) -> float | None:
    """The least seconds for one sample, or None where the work is not known.

    minillm's work is what its meter counted. A peer's is derived from the model's shape and its own bytes per weight; that of a
    mix depends on how it schedules, and arithmetic on quantised weights has no measured peak: there it has no floor. Activations
    are left out: they stay in the caches.
    """
    if "work" in answer:
        steps, work = _counted(answer["work"])
        return _seconds(work, steps, machine)
    if measure.kind in ("mix", "overhead"):
        return None
    dtype, per_weight = str(facts.get("dtype")), engine.weight_bytes
    if per_weight is None:
        per_weight = facts.get("weight_bytes", math.nan) / config.num_params
    if math.isnan(per_weight) or (measure.kind == "prefill" and dtype not in machine.flops):
        return None
    kv_bytes = per_weight if dtype in machine.flops else 2.0
    known = dtype if dtype in machine.flops else "float32"
    if measure.kind == "prefill":
        work = prefill_work(config, measure.prompt, dtype=known, bytes_per_weight=per_weight, kv_bytes_per_element=kv_bytes)
        return _seconds(work, 1, machine)
    context = measure.prompt + (measure.new + 1) // 2  # of the middle step
    work = decode_work(
        config, measure.rows, context, dtype=known, bytes_per_weight=per_weight, kv_bytes_per_element=kv_bytes
    ) * measure.new  # fmt: skip
    return _seconds(work if dtype in machine.flops else dataclasses.replace(work, flops={}), measure.new, machine)


def _counted(raw: Mapping[str, Any]) -> tuple[int, Work]:
    raw = dict(raw)
    steps = max(int(raw.pop("steps")), 1)
    return steps, Work(**{**raw, "activation_bytes": 0})


def _seconds(work: Work, steps: int, machine: Machine) -> float:
    at = bandwidth_at(machine, work.total_bytes / steps)
    return predict(work, dataclasses.replace(machine, bandwidth=at)).seconds


def bandwidth_at(machine: Machine, size: float) -> float:
    """Measured bytes/s for a working set of that many bytes, between its neighbours on the curve: caches are read faster."""
    curve = machine.curve or ((machine.working_set, machine.bandwidth),)
    if size <= curve[0][0]:
        return curve[0][1]
    for (small, slow), (large, fast) in zip(curve, curve[1:]):
        if size <= large:
            share = math.log(size / small) / math.log(large / small)
            return slow + share * (fast - slow)
    return curve[-1][1]
