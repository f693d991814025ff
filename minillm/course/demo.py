"""`make demo`: one answer of the real engine, its counts, and what the roofline says about its two phases."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from minillm.perf.hardware import Machine, measure_machine
from minillm.perf.meter import Needles
from minillm.perf.roofline import predict
from minillm.perf.units import format_bytes, format_count, format_time
from minillm.sampling_params import SamplingParams


def demo(llm: Any, question: str, max_tokens: int = 64) -> None:
    """Answer a question; print the needles of prefill and decode beside the time that their bytes and FLOPs need at least."""
    console = Console()
    console.print(llm.engine.description, highlight=False, style="dim")
    machine = measure_machine(llm.model.device)
    console.print(machine.summary(), highlight=False, style="dim")
    llm.generate([1] * 8, SamplingParams(max_tokens=2, ignore_eos=True))  # warm up: the first call pays for allocations
    llm.meter.reset()

    messages = [{"role": "user", "content": question}]
    console.print(f"\n[bold]{question}[/bold]")
    started = time.perf_counter()
    stream = llm.stream(messages, SamplingParams(max_tokens=max_tokens))
    first = next(stream, "")
    prefill_s, prefill = time.perf_counter() - started, llm.meter.snapshot()
    console.print(first, end="", markup=False, highlight=False)
    for delta in stream:
        console.print(delta, end="", markup=False, highlight=False)
    decode_s, decode = time.perf_counter() - started - prefill_s, llm.meter.snapshot() - prefill
    console.print("\n")

    table = Table("", "prefill", "decode", "decode, per step", title="What the engine did: counted, not timed")
    for verb, name in ROWS:
        counts = [counter(n, verb, name) for n in (prefill, decode)]
        table.add_row(name.replace("_", " "), *(f"{c:,}" for c in counts), f"{counts[1] / max(decode.steps, 1):,.0f}")
    console.print(table)
    for phase, needles, seconds in (("prefill", prefill, prefill_s), ("decode", decode, decode_s)):
        console.print(verdict(phase, needles, seconds, machine), highlight=False)


ROWS = [
    ("skip", "tokens_computed"), ("skip", "tokens_reused"), ("compute less", "flops"), ("move less", "weight_bytes"),
    ("move less", "kv_read_bytes"), ("move less", "activation_bytes"),
    ("break serial", "steps"), ("break serial", "output_tokens"),
]  # fmt: skip


def counter(needles: Needles, verb: str, name: str) -> int:
    return needles.total_flops if name == "flops" else needles.by_verb()[verb][name]


def verdict(phase: str, needles: Needles, seconds: float, machine: Machine) -> str:
    """A phase's measured time against the floor that its counts set."""
    floor = predict(needles.work, machine)
    share = floor.seconds / seconds if seconds else 0.0
    per_step = f", {format_time(seconds / needles.steps)} a step" if needles.steps > 1 else ""
    work = f"{format_count(needles.total_flops)}FLOP and {format_bytes(needles.total_bytes)}"
    reached = f"The floor is {share:.0%} of the measured time."
    return f"[bold]{phase}[/bold]: {format_time(seconds)}{per_step}. {work}: {floor.verdict()}. {reached}"
