"""Lesson 0.2: prefill and decode of the real engine on the roofline, as prompt, batch and dtype change."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import ipywidgets as w
from matplotlib.figure import Figure

from minillm.attention.torch_backend import precision_name
from minillm.checking import check_whole
from minillm.config import DTYPES
from minillm.course.labs.roofline import roof_of
from minillm.course.panel import Job, Panel
from minillm.course.plots import Point, Span, roofline, timeline
from minillm.llm import LLM
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware
from minillm.perf.roofline import Prediction, decode_work, predict, step_work
from minillm.perf.timing import Timing
from minillm.perf.units import format_time
from minillm.perf.work import Work
from minillm.sampling_params import SamplingParams

PROMPTS = (1, 4, 16, 64, 256, 512)
BATCHES = (1, 2, 4, 8)
ANSWER = 8
"""Decoding steps that are timed for each prompt."""


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of the step that computed the prompts, and of one step of the answers; all requests run together."""

    prompt: int
    batch: int
    prefill: Timing
    decode: Timing

    @property
    def even_answer(self) -> float:
        """Answer tokens of each request that take as long as the prompts did."""
        return self.prefill.median / self.decode.median

    @property
    def per_token(self) -> float:
        """How many times as much time an answer token takes as a prompt token, a step shared by all that run in it."""
        return self.prompt / self.even_answer


def time_phases(
    llm: LLM, prompt: int, batch: int = 1, *, answer: int = ANSWER, repeats: int = 3, patience: float = 2.0,
    job: Job | None = None,
) -> PhaseTimes:
    """Run ``batch`` requests of ``prompt`` tokens in an idle engine, step by step, and time each step.

    ``answer`` decoding steps follow each prefill. Repeats stop after ``patience`` seconds. ``job`` sees progress and may
    cancel between two steps. A prompt that the engine would not compute in one step is a ValueError.
    """
    for name, count in (("prompt", prompt), ("batch", batch), ("answer", answer), ("repeats", repeats)):
        check_whole(name, count)
    options = llm.engine.options
    if batch * prompt > options.max_num_batched_tokens or batch > options.max_num_seqs:
        raise ValueError(
            f"{batch} prompts of {prompt} tokens do not fit in one step of at most {options.max_num_batched_tokens} tokens "
            f"and {options.max_num_seqs} requests"
        )
    if llm.engine.has_work:
        raise ValueError("the engine has other requests; time it when it is idle")
    prefill: list[float] = []
    decode: list[float] = []
    start, steps = time.perf_counter(), repeats * (answer + 1)

    def step_done(done: int) -> None:
        if job is not None:
            job.progress((len(prefill) * (answer + 1) + done) / steps)

    _run(llm, min(prompt, 16), batch, 2, step_done)  # warm-up
    while len(prefill) < repeats and (not prefill or time.perf_counter() - start < patience):
        found = _run(llm, prompt, batch, answer, step_done)
        prefill.append(found[0])
        decode += found[1:]
    return PhaseTimes(prompt, batch, Timing(tuple(prefill)), Timing(tuple(decode)))


def _run(llm: LLM, prompt: int, batch: int, answer: int, step_done: Callable[[int], None]) -> list[float]:
    """Seconds of the prefill step and of each decoding step. Leaves nothing behind in the engine, also when cancelled."""
    params, vocab = SamplingParams(max_tokens=answer + 1, ignore_eos=True), llm.model.config.vocab_size
    names: list[str] = []
    seconds: list[float] = []
    try:
        for row in range(batch):
            names.append(llm.engine.add_request([(31 * row + 7 * i + 100) % vocab for i in range(prompt)], params))
        while llm.engine.has_work:
            step_done(len(seconds))
            start = time.perf_counter()
            llm.engine.step()
            seconds.append(time.perf_counter() - start)
    finally:
        for name in names:
            llm.engine.abort(name)
    return seconds


def phase_work(config: ModelConfig, phase: str, prompt: int, batch: int, dtype: str, answer: int = ANSWER) -> Work:
    """The least work of a phase: all prompts in one step, or one step in the middle of the answers. Weights and the KV that is
    seen count once; intermediates are taken to stay in a cache."""
    element = DTYPES[dtype].itemsize
    sizes: dict[str, Any] = {"dtype": dtype, "bytes_per_weight": element, "kv_bytes_per_element": element}
    if phase == "prefill":
        return step_work(config, [(0, prompt)] * batch, logits=batch, **sizes)
    if phase == "decode":
        return decode_work(config, batch, prompt + 1 + answer // 2, **sizes)
    raise ValueError(f"phase must be 'prefill' or 'decode', got {phase!r}")


def phase_points(config: ModelConfig, found: PhaseTimes, dtype: str) -> list[Point]:
    """Both phases as measured points: least work against median seconds, with the spread of the runs."""
    points = []
    for phase, timing in (("prefill", found.prefill), ("decode", found.decode)):
        work = phase_work(config, phase, found.prompt, found.batch, dtype)
        points.append(Point(phase, work.total_flops, work.total_bytes, timing.median, timing.p10, timing.p90))
    return points


def request_timeline(found: PhaseTimes, answer: int) -> Figure:
    """One request from its arrival on: the prompt in one step, then a step for each further token of the answer."""
    at = found.prefill.median * 1e3
    spans = [Span(0, 0, at, "prefill", f"{found.prompt} prompt tokens")]
    for _ in range(answer):
        spans.append(Span(0, at, at + found.decode.median * 1e3))
        at = spans[-1].stop
    return timeline(spans, unit="ms since the request arrived")


def explain(prompt: int, batch: int, floors: Sequence[Prediction], found: PhaseTimes | None) -> str:
    """One line a phase: predicted, bound, measured; then what an answer token costs."""
    requests = "request" if batch == 1 else "requests"
    tokens = f"{batch * prompt} tokens" if batch * prompt > 1 else "1 token"
    heads = (f"Prefill, {tokens}", f"Decode, {batch} {requests}")
    timings = (None, None) if found is None else (found.prefill, found.decode)
    said = []
    for head, floor, timing in zip(heads, floors, timings):
        line = f"{head}: the roofline predicts {format_time(floor.seconds)}, <b>{floor.bound}</b>-bound"
        if timing is None:
            line += "; measuring …"
        else:
            share = floor.seconds / timing.median
            line += f"; measured {timing}, {share:.0%} of the roof."
            if share < 0.3:
                line += " Most of the time is what the roof leaves out: launches, intermediates, other programs."
        said.append(line)
    if found is not None:
        said.append(f"Per token, the answer takes {found.per_token:.3g} times as much time as the prompt.")
    return f"<span class='verdict'>{' <br>'.join(said)}</span>"


def phases_panel(
    hardware: Hardware, models: Sequence[Transformer], prompts: Sequence[int] = PROMPTS, batches: Sequence[int] = BATCHES,
    repeats: int = 3,
) -> Panel:
    """Sliders for prompt length and batch, a choice among the models' dtypes; each position runs both phases anew."""
    by_dtype = {precision_name(m.dtype): m for m in models}
    engines: dict[str, LLM] = {}

    def engine(dtype: str) -> LLM:
        if dtype not in engines:
            length = max(prompts) + ANSWER + 8
            engines[dtype] = LLM(
                by_dtype[dtype], max_model_len=length, max_num_seqs=max(batches), num_blocks=max(batches) * (length // 16 + 1),
                max_num_batched_tokens=max(batches) * max(prompts),
            )
        return engines[dtype]

    def run(job: Job, prompt: int, batch: int, dtype: str) -> PhaseTimes:
        return time_phases(engine(dtype), prompt, batch, repeats=repeats, job=job)

    def draw(values: dict[str, Any], found: PhaseTimes | None) -> tuple[Figure, str]:
        prompt, batch, dtype = values["prompt"], values["batch"], values["dtype"]
        config = by_dtype[dtype].config
        works = {phase: phase_work(config, phase, prompt, batch, dtype) for phase in ("prefill", "decode")}
        floors = [predict(work, hardware) for work in works.values()]
        if found is None:  # where the roof says that the phases are
            points = [Point(f"{p}, predicted", work.total_flops, work.total_bytes, floor.seconds)
                      for (p, work), floor in zip(works.items(), floors)]  # fmt: skip
        else:
            points = phase_points(config, found, dtype)
        return roofline([roof_of(hardware, dtype)], points), explain(prompt, batch, floors, found)

    controls = {
        "prompt": w.SelectionSlider(options=list(prompts), value=prompts[-1], description="prompt"),
        "batch": w.SelectionSlider(options=list(batches), value=batches[0], description="batch"),
        "dtype": w.Dropdown(options=list(by_dtype), value=next(iter(by_dtype)), description="dtype"),
    }
    return Panel("prefill and decode on the roofline", controls, run, draw)
