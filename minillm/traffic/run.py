"""What a trace did on an engine, real or simulated: one record per request, one per step, and the numbers made of them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Sequence

from minillm.engine.scheduler import Scheduler, SchedulerOutput
from minillm.perf.timing import Timing
from minillm.perf.work import visible_pairs
from minillm.traffic.trace import Arrival


class Row(NamedTuple):
    """One request's share of a step: tokens whose KV was there, tokens computed, and whether it got a token."""

    request_id: str
    past: int
    new: int
    samples: bool


@dataclass(frozen=True)
class Step:
    """One step. waiting: requests that it left in the queue. limit: slots. padded_rows, padded_tokens: computed for nobody.
    start, end: seconds after the start of the trace."""

    rows: tuple[Row, ...]
    waiting: int
    limit: int
    padded_rows: int = 0
    padded_tokens: int = 0
    preempted: tuple[str, ...] = ()
    start: float = 0.0
    end: float = 0.0

    @classmethod
    def of(cls, plan: SchedulerOutput, scheduler: Scheduler) -> "Step":
        rows = tuple(Row(s.request.request_id, s.start, s.num_tokens, s.catches_up) for s in plan.scheduled)
        gone = tuple(r.request_id for r in plan.preempted)
        return cls(rows, len(scheduler.waiting), scheduler.max_num_seqs, plan.padded_rows, plan.padded_tokens, gone)

    def at(self, start: float, end: float) -> "Step":
        return replace(self, start=start, end=end)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def tokens(self) -> int:
        """Computed in this step, padding included."""
        return sum(r.new for r in self.rows) + self.padded_tokens

    @property
    def samples(self) -> int:
        return sum(r.samples for r in self.rows)

    @property
    def kv_tokens(self) -> int:
        """Tokens that this step's attention sees."""
        return sum(r.past + r.new for r in self.rows)

    @property
    def pairs(self) -> int:
        """Query-key pairs under a causal mask."""
        return sum(visible_pairs(r.new, r.past + r.new) for r in self.rows)


@dataclass(frozen=True)
class SLO:
    """What users are promised: seconds to the first token, and per token after it."""

    ttft: float
    tpot: float


@dataclass(frozen=True)
class Served:
    """One request: when it arrived, and when each of its tokens was there, in seconds after the start of the trace."""

    request_id: str
    arrival: Arrival
    token_times: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Time to first token; waiting in the queue counts."""
        return self.token_times[0] - self.arrival.time

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 for a request of one token."""
        after = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / after if after else 0.0

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def latency(self) -> float:
        return self.token_times[-1] - self.arrival.time

    def meets(self, slo: SLO) -> bool:
        return self.ttft <= slo.ttft and self.tpot <= slo.tpot


@dataclass(frozen=True)
class Run:
    """A whole trace, served. requests are in order of arrival, steps in order of time."""

    name: str
    requests: tuple[Served, ...]
    steps: tuple[Step, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("a run needs at least one request, got none")
        for r in self.requests:
            if not r.token_times:
                raise ValueError(f"a run is of requests that were served; {r.request_id!r} has no token times")

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(r.token_times[-1] for r in self.requests) - min(r.arrival.time for r in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(len(r.token_times) for r in self.requests)

    @property
    def throughput(self) -> float:
        """Output tokens per second; infinite where all of them took no time."""
        return _rate(self.output_tokens, self.seconds)

    def ttft(self, q: float) -> float:
        """Seconds to the first token, percentile q in 0..100 over requests."""
        return Timing(tuple(r.ttft for r in self.requests)).percentile(q)

    def tpot(self, q: float) -> float:
        """Seconds per output token after the first, percentile over the requests that have more than one."""
        return _percentile([r.tpot for r in self.requests if len(r.token_times) > 1], q)

    def itl(self, q: float) -> float:
        """Inter-token latency, percentile over all gaps of all requests."""
        return _percentile([gap for r in self.requests for gap in r.gaps], q)

    def latency(self, q: float) -> float:
        return Timing(tuple(r.latency for r in self.requests)).percentile(q)

    @property
    def occupancy(self) -> float:
        """Mean share of slots that a request used, over the steps that left somebody waiting: by count, not by time.

        A padded row is not in use. NaN where nobody ever waited."""
        shares = [len(s.rows) / s.limit for s in self.steps if s.waiting]
        return statistics.fmean(shares) if shares else math.nan

    def attainment(self, slo: SLO) -> float:
        """Share of requests that were served within both limits."""
        return sum(r.meets(slo) for r in self.requests) / len(self.requests)

    def goodput(self, slo: SLO) -> float:
        """Requests per second that were served within both limits (Zhong et al. 2024, DistServe, arXiv 2401.09670)."""
        return _rate(sum(r.meets(slo) for r in self.requests), self.seconds)

    def slots(self) -> list[dict[int, Row]]:
        """For each step {slot: row}: a timeline. A request keeps its slot while it runs; then the next that starts has it."""
        slot_of: dict[str, int] = {}
        last_step = {row.request_id: i for i, step in enumerate(self.steps) for row in step.rows}
        timeline = []
        for i, step in enumerate(self.steps):
            for gone in step.preempted:
                slot_of.pop(gone, None)
            for row in step.rows:
                if row.request_id not in slot_of:
                    slot_of[row.request_id] = next(s for s in range(len(slot_of) + 1) if s not in slot_of.values())
            timeline.append({slot_of[row.request_id]: row for row in step.rows})
            for row in step.rows:
                if last_step[row.request_id] == i:
                    del slot_of[row.request_id]
        return timeline

    def __str__(self) -> str:
        ms = [f"{1e3 * x:.0f}" for x in (self.ttft(50), self.ttft(99), self.tpot(50), self.tpot(99), self.itl(99))]
        return (
            f"{self.name}: {len(self.requests)} requests, {self.output_tokens} tokens in {self.seconds:.2f} s and "
            f"{len(self.steps)} steps: {self.throughput:.0f} tok/s; TTFT p50/p99 {ms[0]}/{ms[1]} ms, "
            f"TPOT {ms[2]}/{ms[3]} ms, ITL p99 {ms[4]} ms"
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else math.inf if count else 0.0


def _percentile(values: Sequence[float], q: float) -> float:
    return Timing(tuple(values)).percentile(q) if values else 0.0
