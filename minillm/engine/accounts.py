"""The engine's side of the meter: what the scheduler decided about a step, and what the cache holds beside it."""

from __future__ import annotations

from minillm.engine.runner import Step
from minillm.engine.scheduler import Scheduler, SchedulerOutput
from minillm.perf.meter import Meter, StepCounts


class Accounts:
    """Counts, and never a clock. What a step computes is counted by the parts that compute it (``Step.work``)."""

    def __init__(self, meter: Meter, scheduler: Scheduler, kv_bytes_per_token: int):
        self.meter, self.scheduler, self.cache = meter, scheduler, scheduler.cache
        self.kv_bytes_per_token = kv_bytes_per_token

    def counts(self, plan: SchedulerOutput, step: Step) -> StepCounts:
        """The scheduler's side of the step's counts, taken before the step moves anybody on."""
        requests = [s.request for s in plan.scheduled]
        decoding = [r for r in self.scheduler.running if r.num_tokens > r.prompt_len and r.num_left]
        if any(r.num_computed_tokens < r.prompt_len for r in requests) and self.scheduler.keep_kv:
            stalled = len(decoding)
        else:
            scheduled = set(map(id, requests))
            stalled = sum(id(r) not in scheduled for r in decoding)
        allocated, live = self.kv_bytes(plan.num_tokens)
        return StepCounts(
            tokens=plan.num_tokens, reused_tokens=sum(r.num_computed_tokens for r in requests),
            prefix_tokens=sum(r.num_cached_tokens for r in plan.admitted),
            loaded_tokens=sum(r.num_loaded_tokens for r in plan.admitted),
            padded_tokens=plan.padded_tokens + step.padding,
            rows=len(requests), padded_rows=plan.padded_rows + step.padding,
            idle_rows=self.scheduler.max_num_seqs - len(requests) - plan.padded_rows - step.padding,
            stalled_tokens=stalled, sampled_rows=len(step.seats), kv_allocated=allocated, kv_live=live,
            drafted=sum(len(seat.draft) for seat in step.seats),
        )  # fmt: skip

    def weigh(self) -> None:
        """After requests gave blocks back: what is held, and what went to and came from the tiers."""
        self.meter.hold_kv(*self.kv_bytes())
        if self.cache.tiers is not None:
            self.meter.move_tiers(*self.cache.tiers.take_traffic())

    def kv_bytes(self, computing: int = 0) -> tuple[int, int]:
        """Bytes of KV allocated and live, now or while a step computes that many tokens."""
        allocated = self.cache.pool.num_referenced * self.cache.block_size
        live = self.scheduler.num_live_tokens + computing - self.cache.tokens_without_slots(self.scheduler.running)
        return allocated * self.kv_bytes_per_token, live * self.kv_bytes_per_token
