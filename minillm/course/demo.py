"""`make demo`: one answer of the real engine, its counts, and what the roofline says about its two phases."""

from __future__ import annotations

import time
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minillm.perf.hardware import Machine, measure_machine
from minillm.perf.meter import Needles
from minillm.perf.roofline import predict
from minillm.perf.units import format_rate, format_time
from minillm.sampling_params import SamplingParams

# verb, what is counted, its unit ("" for a plain number)
ROWS = [
    ("skip", "tokens computed", ""), ("", "tokens not recomputed", ""), ("compute less", "arithmetic", "FLOP"),
    ("move less", "weights read", "B"), ("", "keys, values read", "B"), ("", "intermediates", "B"),
    ("break serial", "passes of the model", ""), ("", "tokens of the answer", ""),
]  # fmt: skip


def demo(llm: Any, question: str, max_tokens: int = 128) -> None:
    """Answer a question; print what prefill and decode counted, and the time that their bytes and FLOPs need at least."""
    console = Console(highlight=False)
    for line in llm.engine.description.split("; "):
        console.print(Text(line, style="dim"))
    with console.status("Measuring this machine; it takes a few seconds, the first time only"):
        machine = measure_machine(llm.model.device)
    dtype = str(llm.model.dtype).removeprefix("torch.")
    console.print(Text(roofs(machine, dtype), style="dim"))
    messages = [{"role": "user", "content": question}]
    llm.chat(messages, SamplingParams(max_tokens=2, ignore_eos=True))  # warm up: the first call pays for allocations
    llm.meter.reset()

    console.print(Text(f"\n{question}", style="bold"))
    started = time.perf_counter()
    llm.engine.add_request(llm.tokenizer.apply_chat_template(messages), SamplingParams(max_tokens=max_tokens))
    while llm.meter.output_tokens == 0:
        step(llm)
    prefill_s, prefill = time.perf_counter() - started, llm.meter.snapshot()
    while llm.engine.has_work:
        step(llm)
    decode_s, decode = time.perf_counter() - started - prefill_s, llm.meter.snapshot() - prefill
    print("\n")
    console.print(counts_table(prefill, decode))
    if dtype in machine.flops and decode.steps:
        console.print(times_table([("prefill", prefill, prefill_s), ("decode", decode, decode_s)], machine))
        console.print(Text(conclusion(decode, machine, dtype)))


def step(llm: Any) -> None:
    """One pass of the model; print the text that it added."""
    for output in llm.engine.step():
        print(output.delta, end="", flush=True)


def roofs(machine: Machine, dtype: str) -> str:
    """The two peaks of the machine, in words."""
    bandwidth = f"{machine.name}, measured: moves {format_rate(machine.bandwidth, 'B/s')}"
    if dtype not in machine.flops:
        return f"{bandwidth}; arithmetic in {dtype} is not measured, so there are no floors below"
    return f"{bandwidth}, computes {format_rate(machine.rate(dtype), 'FLOP/s')} in {dtype}"


def counts_table(prefill: Needles, decode: Needles) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Counted while it answered, by verb", title_justify="left")
    table.add_column("verb")
    table.add_column("what")
    for name in ("prefill", "decode", "a decode step"):
        table.add_column(name, justify="right", no_wrap=True)
    columns = [counts(prefill), counts(decode), [n / max(decode.steps, 1) for n in counts(decode)]]
    for (verb, what, unit), *numbers in zip(ROWS, *columns, strict=True):  # type: ignore[var-annotated]
        table.add_row(verb, what, *(format_rate(n, unit) if unit else f"{n:,.0f}" for n in numbers))
    return table


def counts(n: Needles) -> list[int]:
    """The numbers of ROWS."""
    return [
        n.tokens_computed, n.tokens_reused, n.total_flops, n.weight_bytes, n.kv_read_bytes, n.activation_bytes, n.steps,
        n.output_tokens,
    ]  # fmt: skip


def times_table(phases: list[tuple[str, Needles, float]], machine: Machine) -> Table:
    """phases: name, counts, measured seconds. All times are those of one step."""
    title = "Timed, against what arithmetic and data need at full peaks"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in ("a step of", "measured", "arithmetic", "data", "bound by", "of the peak"):
        table.add_column(name, justify="left" if name in ("a step of", "bound by") else "right", no_wrap=True)
    for phase, needles, seconds in phases:
        floor, steps = predict(needles.work, machine), needles.steps
        times = [format_time(s / steps) for s in (seconds, floor.compute_s, floor.memory_s)]
        table.add_row(phase, *times, floor.bound, f"{floor.seconds / seconds:.0%}")
    return table


def conclusion(decode: Needles, machine: Machine, dtype: str) -> str:
    step, intensity = format_rate(decode.total_bytes / decode.steps, "B"), decode.total_flops / decode.total_bytes
    return (
        f"A decode step moves {step} and does {intensity:.2f} FLOP with each byte; "
        f"this machine could do {machine.ridge(dtype):.0f}. The course is about that gap: make lab opens it."
    )
