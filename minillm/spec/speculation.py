"""Who drafts how much in a step: drafts ride along where the step has room for them, and never push anybody out."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Sequence

from minillm.cache.manager import CacheManager
from minillm.engine.request import Request, Status
from minillm.engine.runner import Seat, StepResult
from minillm.engine.scheduler import SchedulerOutput
from minillm.perf.work import Work
from minillm.spec.draft import NO_DRAFT, Draft, checked
from minillm.spec.length import CHECK_PRICE, DraftLength
from minillm.spec.proposer import Proposer

log = logging.getLogger("minillm")


class Speculation:
    """Adds drafts to a scheduled step.

    longest: tokens of one draft. room: tokens of a step up to which one more is nearly free, because the weights are read once
    for all of them; a step that already has as many, from many requests or from a prompt, gets no drafts. adaptive: choose the
    length by each request's own acceptance, else always the longest.
    """

    def __init__(self, proposer: Proposer, longest: int, room: int, vocab_size: int, adaptive: bool = True):
        self.proposer, self.longest, self.room, self.vocab_size, self.adaptive = proposer, longest, room, vocab_size, adaptive
        name, price = type(proposer).__name__, getattr(proposer, "price", 0.0)
        if not isinstance(price, (int, float)) or not 0 <= price < float("inf"):
            raise ValueError(f"price of proposer {name}, in steps for one drafted token, must be at least 0, got {price!r:.60}")
        if self.wants_states and not callable(getattr(proposer, "observe", None)):
            raise ValueError(f"proposer {name} wants_hidden, and has no observe(requests, states) to be shown them with")
        self._lengths: dict[str, DraftLength] = {}

    def extend(self, plan: SchedulerOutput, cache: CacheManager, budget: int) -> SchedulerOutput:
        """The same step with drafts behind the last token of every request that only decodes. budget: tokens of a step at most.

        A request that the pool has no slots for drafts without; ValueError for a draft that breaks the proposer's promises."""
        decoding = [s.request for s in plan.scheduled if s.catches_up and s.num_tokens == 1]
        free = min(self.room, budget) - plan.num_tokens
        if free <= 0 or not decoding:
            return plan
        lengths = [self._reserve(request, free // len(decoding), cache) for request in decoding]
        if not any(lengths):
            return plan
        drafts = dict(zip(decoding, self._checked(self.proposer.propose(decoding, lengths), decoding, lengths), strict=True))
        scheduled = [s.with_draft(drafts.get(s.request, NO_DRAFT)) for s in plan.scheduled]
        return replace(plan, scheduled=scheduled, copies=cache.copies.planned)  # slots for drafts may have asked for more of them

    def _reserve(self, request: Request, share: int, cache: CacheManager) -> int:
        """Tokens to draft for this request, with slots for them."""
        to_come = request.max_tokens - request.num_output_tokens - 1  # the last one is the target's own
        wanted = min(share, to_come)
        if wanted <= 0:
            return 0
        n = min(wanted, self._length(request).next() if self.adaptive else self.longest)
        if n and cache.allocate(request, request.num_computed_tokens + 1 + n) is None:
            return 0
        return n

    def _length(self, request: Request) -> DraftLength:
        if request.request_id not in self._lengths:
            price = CHECK_PRICE + getattr(self.proposer, "price", 0.0)
            self._lengths[request.request_id] = DraftLength(self.longest, price)
        return self._lengths[request.request_id]

    def _checked(self, answer: Sequence[Draft], requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        name = type(self.proposer).__name__
        try:
            drafts = iter(answer)
        except TypeError:
            raise ValueError(f"proposer {name} must return one draft for each request, got {answer!r:.60}") from None
        found = list(drafts)
        if len(found) != len(requests):
            raise ValueError(f"proposer {name} returned {len(found)} drafts for {len(requests)} requests")
        try:
            return [checked(draft, length, self.vocab_size) for draft, length in zip(found, lengths, strict=True)]
        except ValueError as fault:
            raise ValueError(f"proposer {name} {fault}") from None

    @property
    def wants_states(self) -> bool:
        return bool(getattr(self.proposer, "wants_hidden", False))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the proposer holds beside the target's."""
        return int(getattr(self.proposer, "weight_bytes", 0))

    def learn(self, seats: Sequence[Seat], result: StepResult) -> None:
        """What the target made of the drafts of a step. Requests that have ended are no longer known."""
        going = [(i, seat) for i, seat in enumerate(seats) if seat.request.status is Status.RUNNING]
        for _, seat in going:
            if self.adaptive and seat.draft:
                self._length(seat.request).tell(len(seat.draft), len(result.tokens[seat.request]) - 1)
        if result.states is not None and going:
            observer: Any = self.proposer
            observer.observe([seat.request for _, seat in going], result.states[[i for i, _ in going]])

    def forget(self, request_id: str) -> None:
        """The request has ended. A proposer of somebody's own that fails here is reported: it must not cost the answer."""
        self._lengths.pop(request_id, None)
        try:
            getattr(self.proposer, "forget", lambda _: None)(request_id)
        except Exception as fault:
            log.warning("proposer %s could not forget %s: %s", type(self.proposer).__name__, request_id, fault)

    def take_work(self) -> Work:
        """What the proposer has computed since this was called last."""
        take = getattr(self.proposer, "take_work", None)
        return take() if take else Work()
