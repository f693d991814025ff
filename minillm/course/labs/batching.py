"""Lesson 5.1: who sits in which slot at which step, what waiting and padding cost, throughput against latency."""

from __future__ import annotations

import heapq
import itertools
import statistics
import time
from typing import Any, Callable, Mapping, Sequence

import ipywidgets as w
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm import LLM
from minillm.checking import check_whole
from minillm.course.panel import Panel
from minillm.course.stepper import Stepper
from minillm.course.style import COLOURS, DPI, HATCHES, INK, MARKERS, SMALL, SOFT, Drawing, figure, legend, titled
from minillm.model.transformer import Transformer
from minillm.traffic.replay import replay
from minillm.traffic.run import Run
from minillm.traffic.simulate import simulate
from minillm.traffic.trace import Trace, at_once, exponential_lengths, lognormal_lengths, make_trace, poisson, uniform_lengths

WAYS = ("sequential", "static", "static-sorted", "continuous")
SLOTS = (1, 2, 4, 8, 16)
LOADS = {"2 requests/s": 2.0, "5 requests/s": 5.0, "10 requests/s": 10.0, "all at once": None}


# Workloads --------------------------------------------------------------------------------------------------------------------


def workload(requests: int, median: float, longest: int, vocab_size: int, rate: float | None = None, seed: int = 0) -> Trace:
    """Short prompts (8 to 16 tokens) and lognormal answers, as of a chat; all at once, or Poisson arrivals, ``rate`` a second."""
    times = at_once(requests) if rate is None else poisson(requests, rate, seed)
    outputs = lognormal_lengths(requests, median, 1.0, high=longest, seed=seed)
    return make_trace("chat", times, uniform_lengths(requests, 8, 16, seed), outputs, vocab_size, seed)


def same_lengths(requests: int, length: int, vocab_size: int) -> Trace:
    """Requests that all ask for the same number of tokens, with prompts of eight."""
    return make_trace("equal lengths", at_once(requests), [8] * requests, [length] * requests, vocab_size)


def neighbours(others: int) -> Trace:
    """A request of 30 tokens, and others with longer prompts and six tokens each, all there at the start."""
    return make_trace("neighbours", at_once(1 + others), [8] + [32] * others, [30] + [6] * others, 32)


def of_lengths(lengths: Sequence[int], rate: float | None = None, seed: int = 0) -> Trace:
    """Requests with prompts of one token and these answers: decoding alone. rate: requests per step, None for all at once."""
    times = at_once(len(lengths)) if rate is None else poisson(len(lengths), rate, seed)
    return make_trace("lengths", times, [1] * len(lengths), lengths, 32)


def in_steps(trace: Trace, batching: Any, slots: int, **options: Any) -> Run:
    """Serve a trace in simulated time in which every step takes one unit: exact, the same on every machine."""
    return simulate(trace, lambda _: 1.0, batching=batching, max_num_seqs=slots, **options)


# Static batching and the harmonic number --------------------------------------------------------------------------------------


def harmonic(n: int) -> float:
    """1 + 1/2 + … + 1/n: the mean of the longest of n exponential lengths of mean 1."""
    check_whole("n", n)
    return sum(1 / i for i in range(1, n + 1))


def efficiency(run: Run, slots: int) -> float:
    """Share of all slots, over all steps, in which a request got a token."""
    return run.output_tokens / (slots * len(run.steps))


def efficiency_figure(simulated: Mapping[str, Mapping[int, float]], most: int = 64) -> Figure:
    """Slot efficiency against the number of slots: 1/H_n as a line, simulated batches as points."""
    fig, ax = figure(7.0, 3.4)
    sizes = range(1, most + 1)
    ax.plot(sizes, [1 / harmonic(n) for n in sizes], color=INK, linewidth=1.4, label="1 / H_n, derived")
    for i, (name, points) in enumerate(simulated.items()):
        ax.plot(
            list(points), list(points.values()), linestyle="none", marker=MARKERS[i], color=COLOURS[i % 6], markersize=7,
            markeredgecolor="white", label=f"{name}, simulated",
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.set_ylim(0, 1.05)
    titled(ax, None, "slots", "share of slots in use")
    ax.legend(loc="lower left", fontsize=SMALL, frameon=False, labelcolor=INK)
    return fig


def simulated_efficiency(slots: Sequence[int], batches: int = 60, mean: float = 200.0) -> dict[str, dict[int, float]]:
    """{way: {slots: efficiency}} for exponential lengths, ``batches`` batches each."""
    found: dict[str, dict[int, float]] = {"static": {}, "continuous": {}}
    for n in slots:
        lengths = exponential_lengths(n * batches, mean, seed=n)
        longest = [max(lengths[i : i + n]) for i in range(0, len(lengths), n)]
        found["static"][n] = sum(lengths) / (n * sum(longest))
        found["continuous"][n] = sum(lengths) / (n * continuous_steps(lengths, n))
    return found


def continuous_steps(lengths: Sequence[int], slots: int) -> int:
    """Steps until all have ended when each freed slot goes to the next in the queue: no step is simulated one by one."""
    ends = [0] * slots
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


# Pictures of who sits where ---------------------------------------------------------------------------------------------------


def timeline_figure(runs: Mapping[str, Run], upto: int | None = None) -> Figure:
    """Slots against steps for each run, one below the other: a colour and a hatch per request, grey where nobody is served.

    upto: the number of steps to draw, all unless said."""
    steps = max(len(run.steps) for run in runs.values())
    slots = max(run.steps[0].limit for run in runs.values())
    fig = Drawing(figsize=(7.0, 0.7 + len(runs) * (0.65 + 0.17 * slots)), dpi=DPI, layout="constrained", facecolor="white")
    axes = fig.subplots(len(runs), 1, squeeze=False)[:, 0]
    for ax, (name, run) in zip(axes, runs.items(), strict=True):
        order = {r.request_id: i for i, r in enumerate(run.requests)}
        drawn = run.slots()[: upto or steps]
        for slot in range(slots):
            holders = [at[slot].request_id if slot in at else "" for at in drawn]
            for x, length, holder in _stretches(holders):
                look: dict[str, Any] = {"facecolor": "#F2F2F2"}
                if holder:
                    i = order[holder]
                    look = {"facecolor": COLOURS[i % 6], "hatch": HATCHES[i // 6 % 6], "edgecolor": "white"}
                ax.add_patch(Rectangle((x, slot), length, 0.86, linewidth=0, **look))
        done = sum(row.samples for step in run.steps[: len(drawn)] for row in step.rows)
        titled(ax, f"{name}: {done} tokens in {len(drawn)} steps", "step" if ax is axes[-1] else "", "slot")
        ax.set_xlim(0, steps)
        ax.set_ylim(slots, -0.2)
        ax.set_yticks([])
        ax.tick_params(labelsize=SMALL, length=2)
        ax.spines[["top", "right", "left"]].set_visible(False)
    return fig


def _stretches(holders: Sequence[str]) -> list[tuple[int, int, str]]:
    """(first step, number of steps, request or nobody) for each time that a slot's holder changes."""
    found, start = [], 0
    for holder, same in itertools.groupby(holders):
        length = len(list(same))
        found.append((start, length, holder))
        start += length
    return found


def timeline_stepper(runs: Mapping[str, Run], stride: int = 1) -> Stepper:
    """Play the runs side by side, ``stride`` steps a frame."""
    steps = max(len(run.steps) for run in runs.values())
    frames = [*range(stride, steps, stride), steps]

    def draw(upto: int, _: int) -> tuple[Figure, str]:
        said = []
        for name, run in runs.items():
            step = run.steps[min(upto, len(run.steps)) - 1]
            state = f"{len(step.rows)} of {step.limit} slots in use, {step.waiting} waiting" if upto <= len(run.steps) else "done"
            said.append(f"{name}: {state}")
        return timeline_figure(runs, upto), f"step {upto}. {'; '.join(said)}."

    return Stepper("slots at every step", frames, draw)


# What the steps are made of ---------------------------------------------------------------------------------------------------


def ladder(trace: Trace, slots: int) -> str:
    """A table of exact counts: from one request at a time to continuous batching, one defect less on each line."""
    lines = [f"{'':14} {'steps':>6} {'factor':>7} {'for nobody':>11} {'in use':>7} {'mean end':>9} {'mean start':>11}"]
    first = 0
    for way in WAYS:
        run = in_steps(trace, way, slots)
        first = first or len(run.steps)
        padded = sum(s.padded_tokens for s in run.steps)
        ends = statistics.fmean(r.latency for r in run.requests)
        starts = statistics.fmean(r.ttft for r in run.requests)
        share = "" if way == "sequential" else f"{efficiency(run, slots):7.0%}"
        factor = first / len(run.steps)
        lines.append(f"{way:14} {len(run.steps):6,} {factor:7.1f} {padded:11,} {share:>7} {ends:9.0f} {starts:11.0f}")
    return "\n".join(lines)


def latency_curve(batching: str, slots: int, lengths: Sequence[int], rates: Sequence[int], q: float = 90.0) -> dict[int, float]:
    """{requests per 100 steps: steps from arrival to the last token, percentile q} for Poisson arrivals of these answers."""
    return {rate: in_steps(of_lengths(lengths, rate / 100), batching, slots).latency(q) for rate in rates}


def sustained(curve: Mapping[int, float], limit: float) -> int:
    """The highest rate up to which a latency curve stays within a limit; 0 if it never does."""
    within = list(itertools.takewhile(lambda rate: curve[rate] <= limit, sorted(curve)))
    return within[-1] if within else 0


# Throughput against latency, live ---------------------------------------------------------------------------------------------


class Load:
    """Serves one workload on one model with any number of slots, at any load."""

    def __init__(self, model: Transformer, requests: int = 24, median: float = 8, longest: int = 40, **options: Any) -> None:
        self.model, self.shape, self.options = model, (requests, median, longest), options
        self._engines: dict[int, LLM] = {}

    def trace(self, rate: float | None) -> Trace:
        return workload(*self.shape, self.model.config.vocab_size, rate)

    def serve(self, slots: int, rate: float | None, tick: Callable[[float], None] = lambda _: None) -> Run:
        """Replay in real time. tick: called with the share of requests' time that has passed; what it raises ends the replay."""
        trace = self.trace(rate)
        if slots not in self._engines:
            blocks = slots * -(-trace.longest // 16)
            self._engines[slots] = LLM(self.model, max_num_seqs=slots, num_blocks=blocks, **self.options)
        engine, started = self._engines[slots].engine, time.perf_counter()
        expected = max(trace.arrivals[-1].time, 1e-9) + 2.0

        def clock() -> float:
            now = time.perf_counter()
            tick(min((now - started) / expected, 0.99))
            return now

        return replay(engine, trace, clock, lambda seconds: time.sleep(min(seconds, 0.05)))


def load_panel(load: Load, slots: int = 4, rate: str = "all at once") -> Panel:
    """Sliders for slots and load; each place is served in real time and stays on the picture."""
    kept: dict[str, dict[int, Run]] = {}

    def run(job: Any, slots: int, load_: str) -> Run:
        return load.serve(slots, LOADS[load_], job.progress)

    def draw(values: dict[str, Any], found: Run | None) -> tuple[Figure, str]:
        slots, chosen = values["slots"], values["load_"]
        if found is not None:
            kept.setdefault(chosen, {})[slots] = found
        return load_figure(kept, (chosen, slots)), explain(slots, chosen, found)

    controls = {
        "slots": w.SelectionSlider(options=SLOTS, value=slots, description="slots"),
        "load_": w.SelectionSlider(options=list(LOADS), value=rate, description="load"),
    }
    return Panel("throughput against latency", controls, run, draw)


def explain(slots: int, load: str, run: Run | None) -> str:
    """The verdict under the picture."""
    where = f"{slots} slots, {load}:"
    if run is None:
        return f"<span class='verdict'>{where} measuring …</span>"
    busy = "" if run.occupancy != run.occupancy else f" slots {run.occupancy:.0%} in use while somebody waits;"
    return (
        f"<span class='verdict'>{where} <b>{run.throughput:.0f} tok/s</b>; time per output token p50 "
        f"{1e3 * run.tpot(50):.0f} ms, p99 {1e3 * run.tpot(99):.0f} ms;{busy} "
        f"first token p50 {1e3 * run.ttft(50):.0f} ms.</span>"
    )


def load_figure(kept: Mapping[str, Mapping[int, Run]], here: tuple[str, int] | None = None) -> Figure:
    """Output tok/s against time per output token: a line from p50 to p99 for each place that was measured."""
    fig, ax = figure(7.0, 3.7)
    for i, name in enumerate(LOADS):
        runs = kept.get(name, {})
        points = [(1e3 * run.tpot(50), 1e3 * run.tpot(99), run.throughput, slots) for slots, run in sorted(runs.items())]
        if not points:
            continue
        low, high, rate, _ = zip(*points, strict=True)
        ax.hlines(rate, low, high, color=COLOURS[i], linewidth=1.2)
        ax.plot(low, rate, color=COLOURS[i], marker=MARKERS[i], linewidth=0.8, linestyle=":", markersize=7, label=name)
        ax.plot(high, rate, color=COLOURS[i], marker="|", linestyle="none", markersize=9)
        for x, _, y, slots in points:
            weight = "bold" if here == (name, slots) else "normal"
            look: dict[str, Any] = {"fontsize": SMALL, "color": INK, "weight": weight, "ha": "right"}
            ax.annotate(f"{slots}", (x, y), (-4, 6), textcoords="offset points", **look)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    titled(ax, None, "time per output token, ms: marker p50, tick p99; number: slots", "output tokens per second")
    if ax.get_legend_handles_labels()[0]:
        legend(ax, "right")
    else:
        ax.text(0.5, 0.5, "nothing measured yet", transform=ax.transAxes, ha="center", color=SOFT)
    return fig

