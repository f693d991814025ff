"""Who computes how many tokens in the next step. One rule: every request catches up with its own tokens, under a token budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from minillm.cache.manager import CacheManager
from minillm.engine.request import Request, Status


@dataclass(frozen=True)
class Scheduled:
    """One request's share of a step: its next num_tokens tokens."""

    request: Request
    num_tokens: int

    @property
    def catches_up(self) -> bool:
        """Whether the request has nothing left to compute afterwards, so that a token can be sampled."""
        return self.request.num_computed_tokens + self.num_tokens == self.request.num_tokens


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. padded_tokens and padded_rows belong to no request: a padded batch computes them for nobody."""

    scheduled: list[Scheduled]
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    padded_tokens: int = 0
    padded_rows: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


class Scheduler:
    """Continuous batching with chunked prefill (Yu et al. 2022, Orca; Agrawal et al. 2024, arXiv 2403.02310).

    Running requests go first, in order of arrival; what the budget leaves is given to waiting ones. When the pool is full, the
    youngest running request is preempted: it loses its KV and computes it again later. keep_kv=False forgets all KV
    after each step.
    """

    def __init__(self, cache: CacheManager, max_num_seqs: int, max_num_batched_tokens: int, keep_kv: bool = True):
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.keep_kv = keep_kv
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and give them slots."""
        scheduled, preempted = self._advance_running()
        admitted = [] if preempted else self._admit(self.budget - sum(s.num_tokens for s in scheduled))
        scheduled += admitted
        tokens, rows = self._padding(scheduled)
        return SchedulerOutput(scheduled, [s.request for s in admitted], preempted, tokens, rows)

    def _advance_running(self) -> tuple[list[Scheduled], list[Request]]:
        scheduled: list[Scheduled] = []
        preempted: list[Request] = []
        budget, i = self.budget, 0
        while i < len(self.running):
            request = self.running[i]
            n = self._share(request.num_tokens - request.num_computed_tokens, budget)
            if n and not self._find_slots(request, n, preempted):
                break  # the request itself was preempted: it was the last one
            if n:
                scheduled.append(Scheduled(request, n))
                budget -= n
            i += 1
        return scheduled, preempted

    def _share(self, wanted: int, budget: int) -> int:
        """Tokens granted: what is left of the budget, but all or nothing where KV does not outlive the step."""
        return min(wanted, budget) if self.keep_kv or wanted <= budget else 0

    def _find_slots(self, request: Request, n: int, preempted: list[Request]) -> bool:
        while self.cache.allocate(request, request.num_computed_tokens + n) is None:
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        victim.status = Status.WAITING
        victim.num_preemptions += 1
        try:
            self.cache.free(victim)
        finally:
            victim.num_computed_tokens = 0

    def _admit(self, budget: int) -> list[Scheduled]:
        admitted: list[Scheduled] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            n = self._start(self.waiting[0], budget)
            if n == 0:
                break
            admitted.append(self._take_first(n))
            budget -= n
        return admitted

    def _take_first(self, n: int) -> Scheduled:
        request = self.waiting.popleft()
        request.status = Status.RUNNING
        self.running.append(request)
        return Scheduled(request, n)

    def _start(self, request: Request, budget: int) -> int:
        """Give a waiting request its cached prefix and slots for its first tokens; 0, with nothing changed, if that cannot be."""
        matched = self.cache.match(request)
        hit = len(matched) * self.cache.block_size
        n = self._share(request.num_tokens - hit, budget)
        if n == 0 or self.cache.allocate(request, hit + n, matched) is None:
            return 0
        request.num_computed_tokens = request.num_cached_tokens = hit
        return n

    def _padding(self, scheduled: list[Scheduled]) -> tuple[int, int]:
        """Tokens and rows to pad this step with."""
        return 0, 0

    def update(self, output: SchedulerOutput) -> None:
        """The step has run: its tokens are computed. Sampled tokens are appended by the engine afterwards."""
        for s in output.scheduled:
            s.request.num_computed_tokens += s.num_tokens
            if not self.keep_kv:
                self.cache.free(s.request)
                s.request.num_computed_tokens = 0

    def finish(self, request: Request, reason: str) -> None:
        """End a waiting or running request and take its blocks back."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        self.cache.free(request)


class StaticScheduler(Scheduler):
    """The old way, kept as a baseline: fill a batch when the last is done, pad every row to the longest, wait for the slowest."""

    _batch_size = 0

    def _admit(self, budget: int) -> list[Scheduled]:
        admitted: list[Scheduled] = []
        longest = 0
        while not (self.running and not admitted) and self.waiting and len(self.running) < self.max_num_seqs:
            longest = max(longest, self.waiting[0].num_tokens)
            if admitted and longest * (len(admitted) + 1) > budget:
                break
            n = self._start(self.waiting[0], budget)
            if n == 0:
                break
            admitted.append(self._take_first(n))
        if admitted:
            self._batch_size = len(admitted)
        return admitted

    def _padding(self, scheduled: list[Scheduled]) -> tuple[int, int]:
        if not scheduled:
            return 0, 0
        used = sum(s.num_tokens for s in scheduled)
        padded = min(self._batch_size * max(s.num_tokens for s in scheduled), self.budget)
        return max(padded - used, 0), self._batch_size - len(scheduled)
