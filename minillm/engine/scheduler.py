"""Who computes how many tokens in the next step: every request catches up with its own tokens, under a token budget."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Callable, Iterable, Iterator, Sequence

from minillm.cache.manager import CacheManager
from minillm.config import EngineConfig
from minillm.engine.policies import POLICIES, BatchingPolicy, Continuous
from minillm.engine.queues import CacheQueue, LengthQueue, RequestList, WaitingQueue
from minillm.engine.request import Request, Status
from minillm.spec.draft import NO_DRAFT, Draft


class Scheduled:
    """One request's share of a step: its next num_tokens tokens, from position start on; the last of them may be a draft.

    catches_up: whether the request has nothing left to compute afterwards, so that a token can be sampled.
    """

    __slots__ = ("request", "num_tokens", "draft", "start", "catches_up")  # no dataclass: a thousand are made in a step

    def __init__(self, request: Request, num_tokens: int, draft: Draft = NO_DRAFT):
        self.request, self.num_tokens, self.draft = request, num_tokens, draft
        # fixed when the step is planned: the request moves on while the step is in flight
        self.start = start = request.num_computed_tokens
        self.catches_up = start + num_tokens - len(draft.token_ids) == request.num_tokens

    def with_draft(self, draft: Draft) -> "Scheduled":
        """The same share and these tokens behind it."""
        return Scheduled(self.request, self.num_tokens + len(draft), draft) if draft else self


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. copies: (source, target) blocks to copy before the model runs. padded_tokens and padded_rows belong to no
    request: a padded batch computes them for nobody."""

    scheduled: list[Scheduled]
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    padded_tokens: int = 0
    padded_rows: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


class Scheduler:
    """Asks a batching policy who computes how much, and finds the slots for it.

    When the pool is full, the youngest running request is preempted: it loses its KV and computes it again later. keep_kv=False
    forgets all KV after each step: a request is computed whole or not at all.
    """

    def __init__(
        self, cache: CacheManager, max_num_seqs: int, max_num_batched_tokens: int, keep_kv: bool = True,
        policy: BatchingPolicy | None = None, waiting: WaitingQueue | None = None,
    ):  # fmt: skip
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.keep_kv = keep_kv
        self.policy: BatchingPolicy = Continuous() if policy is None else policy
        self.waiting = WaitingQueue() if waiting is None else waiting
        self.running = RequestList()
        self.num_live_tokens = 0  # of all running requests: their num_computed_tokens
        self.observers: list[Callable[[SchedulerOutput], None]] = []  # called with every step that was chosen, before it runs
        self._batch_size = 0
        self.num_preemptions = 0
        # samples of one prompt wait for the first of them to compute it; a padded batch starts as one, with nothing computed
        self.shares_prompts = keep_kv and cache.reserve is None and not getattr(self.policy, "padded", False)

    @classmethod
    def from_options(cls, options: EngineConfig, cache: CacheManager) -> "Scheduler":
        """The scheduler that an engine with these options has; a simulation without a model has the same."""
        named = isinstance(options.batching, str)
        policy = POLICIES[options.batching](options.prefill) if named else options.batching
        order = getattr(policy, "order", "arrival") if options.queue_order == "arrival" else options.queue_order
        waiting = CacheQueue(cache.cached_tokens) if order == "cache" else LengthQueue() if order == "length" else WaitingQueue()
        limits = options.max_num_seqs, options.max_num_batched_tokens
        return cls(cache, *limits, options.kv_cache != "none", policy, waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and give them slots."""
        scheduled: list[Scheduled] = []
        admitted: list[Scheduled] = []
        preempted: list[Request] = []
        candidates: Iterable[Request] = self.waiting
        while not scheduled:
            running = list(self.running)
            granted, starting = self._ask(running, candidates)
            victims = len(preempted)
            scheduled, short = self._advance(zip(running, granted, strict=True), preempted)
            if not short:  # who was pushed out, or found no slots, shall not find newcomers in its place
                admitted = self._admit(starting)
                scheduled += admitted
            if not self.running or (not candidates and len(preempted) == victims):
                break  # also when all wait for what is in flight
            candidates = ()  # if nobody could start, or the only one granted anything was preempted, the others go on
        if len(admitted) == len(self.running):
            self._batch_size = len(admitted)
        tokens, rows = self._padding(scheduled)
        output = SchedulerOutput(scheduled, [s.request for s in admitted], preempted, self.cache.copies.planned, tokens, rows)
        for observe in self.observers if scheduled else ():
            observe(output)
        return output

    def _ask(self, running: Sequence[Request], candidates: Iterable[Request]) -> tuple[list[int], Iterator[tuple[Request, int]]]:
        """The policy's grants for running requests, and for waiting ones that are to start; ValueError if it breaks a rule."""
        left = [r.num_left for r in running]
        seen: list[Request] = []

        def waiting() -> Iterator[int]:
            for request in candidates:
                if self.cache.awaits_prompt(request, seen):
                    continue
                seen.append(request)
                left.append(request.num_tokens - self.cache.cached_tokens(request))
                yield left[-1]

        answer = self.policy.grants(tuple(left), waiting(), self.budget, self.max_num_seqs)
        grants = self._checked(answer, left, len(running))
        if not self.keep_kv:
            grants = [n if n == wanted else 0 for n, wanted in zip(grants, left, strict=False)]
        return grants[: len(running)], zip(seen, grants[len(running) :], strict=False)

    def _checked(self, answer: Iterable[int], left: Sequence[int], num_running: int) -> list[int]:
        name = type(self.policy).__name__
        try:
            grants = list(map(operator.index, answer))
        except TypeError:
            raise ValueError(f"batching policy {name} must return a sequence of whole numbers, got {answer!r:.80}") from None
        if not num_running <= len(grants) <= len(left):
            raise ValueError(
                f"batching policy {name} returned {len(grants)} grants for {num_running} running requests and the "
                f"{len(left) - num_running} waiting ones that it took"
            )
        if grants and (min(grants) < 0 or any(map(operator.gt, grants, left))):
            i = next(i for i, n in enumerate(grants) if not 0 <= n <= left[i])
            raise ValueError(f"batching policy {name} granted {grants[i]} tokens to a request that has {left[i]} left")
        if sum(grants) > self.budget:
            raise ValueError(f"batching policy {name} granted {sum(grants)} tokens; the budget of a step is {self.budget}")
        rows = num_running + sum(n > 0 for n in grants[num_running:])
        if rows > self.max_num_seqs:
            raise ValueError(f"batching policy {name} would run {rows} requests at once; the limit is {self.max_num_seqs}")
        return grants

    def _advance(self, shares: Iterable[tuple[Request, int]], preempted: list[Request]) -> tuple[list[Scheduled], bool]:
        """What the running requests compute, and whether slots were short."""
        scheduled, allocate = [], self.cache.allocate
        for request, n in shares:
            if n and request.status is Status.RUNNING:
                if allocate(request, request.num_computed_tokens + n) is not None or self._find_slots(request, n, preempted):
                    scheduled.append(Scheduled(request, n))
                elif request.status is Status.RUNNING:
                    return scheduled, True  # those after it wait as well: they are next to be preempted for it
        return scheduled, bool(preempted)

    def _find_slots(self, request: Request, n: int, preempted: list[Request]) -> bool:
        """Slots for n more tokens, taken from the youngest if they must be. False: the request was preempted itself, or the
        youngest has a step in flight that reads its blocks, and the request has to sit this step out."""
        while self.cache.allocate(request, request.num_computed_tokens + n) is None:
            victim = self.running.last
            if victim.num_in_flight:
                return False
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.waiting.add_first(victim)
        victim.status = Status.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        try:
            self.cache.free(victim)
        finally:
            self._set_computed(victim, 0)

    def _admit(self, starting: Iterable[tuple[Request, int]]) -> list[Scheduled]:
        admitted = []
        for request, n in starting:
            if n == 0:
                continue
            n = self._start(request, n)
            if n == 0:
                break  # nobody overtakes a request that the pool has no room for yet
            self.waiting.start(request)
            request.status = Status.RUNNING
            self.running.add(request)
            admitted.append(Scheduled(request, n))
        return admitted

    def _start(self, request: Request, n: int) -> int:
        """Give a waiting request what is computed of it already and slots for n tokens more; 0, and nothing changed, if that
        cannot be."""
        admitted = self.cache.admit(request, n)
        if admitted is None:
            return 0
        hit, n = admitted
        self._set_computed(request, hit)
        request.num_cached_tokens = hit
        return n

    def _set_computed(self, request: Request, n: int) -> None:
        self.num_live_tokens += n - request.num_computed_tokens
        request.num_computed_tokens = n

    def _padding(self, scheduled: list[Scheduled]) -> tuple[int, int]:
        """Tokens and rows to pad this step with: a padded batch keeps its size until its last request ends."""
        if not getattr(self.policy, "padded", False) or not scheduled:
            return 0, 0
        used = sum(s.num_tokens for s in scheduled)
        padded = min(self._batch_size * max(s.num_tokens for s in scheduled), self.budget)
        return max(padded - used, 0), self._batch_size - len(scheduled)

    def launched(self, output: SchedulerOutput) -> None:
        """The step is on its way: the next one may be planned on its tokens, computed or sampled."""
        self.cache.copies.launched()
        self.num_live_tokens += output.num_tokens
        for s in output.scheduled:
            request = s.request
            request.num_computed_tokens += s.num_tokens
            request.num_tokens_in_flight += s.num_tokens
            request.num_pending += s.catches_up
            request.num_in_flight += 1

    def update(self, output: SchedulerOutput) -> None:
        """The step has run: its tokens are computed. Sampled tokens are appended by the engine afterwards."""
        try:
            self._land(output)
        finally:
            self.cache.copies.done(output.copies)
        if not self.keep_kv:
            for s in output.scheduled:
                self.cache.free(s.request)
                self._set_computed(s.request, 0)
        elif self.cache.window.size is not None:
            for s in output.scheduled:
                self.cache.free_unseen(s.request)

    def refuse(self, request: Request, n: int) -> None:
        """The last n tokens that a step computed for this request were drafts that are not its own."""
        self._set_computed(request, request.num_computed_tokens - n)

    def undo(self, output: SchedulerOutput) -> None:
        """The step has failed: nothing of it counts, and what is left to do is planned again. Youngest step first."""
        for s in output.scheduled:
            if s.request.status is Status.RUNNING:
                self._set_computed(s.request, s.start)
            else:
                s.request.num_computed_tokens = s.start
        self.cache.copies.failed(output.copies)
        self._land(output)

    def _land(self, output: SchedulerOutput) -> None:
        faults = []
        for s in output.scheduled:
            request = s.request
            request.num_tokens_in_flight -= s.num_tokens
            request.num_pending -= s.catches_up
            request.num_in_flight -= 1
            if request.status is Status.FINISHED and not request.num_in_flight:  # it ended while the step was in flight
                try:
                    self.cache.free(request)
                except Exception as fault:  # a prefix cache of somebody's own; the others' blocks come back all the same
                    faults.append(fault)
        if faults:
            raise faults[0]

    def finish(self, request: Request, reason: str) -> None:
        """End a waiting or running request and take its blocks back, once no step in flight can read them."""
        if request.status is Status.RUNNING:
            # an accepted draft that goes on behind the end of the text was computed, and belongs to nobody
            self._set_computed(request, min(request.num_computed_tokens, request.num_tokens))
            self.running.remove(request)
            self.num_live_tokens -= request.num_computed_tokens
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        if not request.num_in_flight:
            self.cache.free(request)
