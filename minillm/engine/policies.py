"""Batching policies: how one step's tokens are shared out. A policy sees numbers only; the scheduler finds the slots."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Iterable, Literal, Protocol, Sequence

Prefill = Literal["chunked", "first"]


class BatchingPolicy(Protocol):
    """What a policy of one's own must have. It may also have ``padded`` (True: each row is padded to the longest, and a row that
    ended stays until the last one has) and ``order`` ("arrival", "length" or "cache": who waits in front), and keeps no state."""

    def grants(self, running: Sequence[int], waiting: Iterable[int], budget: int, limit: int) -> Sequence[int]:
        """How many tokens each request computes in the next step.

        running: tokens that each running request has left to compute, oldest first; 1 for one that decodes, 0 for one that
        only waits for its last token, which a step in flight samples (with overlap). waiting: tokens left
        for waiting requests in their order, worked out as they are taken: take no more than needed. budget: tokens of
        the step. limit: requests that may run at once. Returns one number for each running request, 0 for one that sits
        this step out, then one for each waiting request that starts.
        """
        ...


def share(left: Iterable[int], budget: int) -> list[int]:
    """Oldest first, each as much as it wants while the budget lasts."""
    grants = []
    for n in left:
        grants.append(min(n, budget))
        budget -= grants[-1]
    return grants


def start(waiting: Iterable[int], room: int, budget: int) -> list[int]:
    """Let up to ``room`` waiting requests start while the budget lasts; the last one may get a part of its prompt."""
    grants: list[int] = []
    requests = iter(waiting)
    while len(grants) < room and budget > 0:
        left = next(requests, None)
        if left is None:
            break
        grants.append(min(left, budget))
        budget -= grants[-1]
    return grants


@dataclass(frozen=True)
class Continuous:
    """A request joins as soon as a slot is free and leaves with its last token (Yu et al. 2022, Orca).

    prefill="chunked": running requests go first; what the budget leaves is given to prompts, piece by piece (Agrawal et al. 2024,
    arXiv 2403.02310). prefill="first": prompts go first and alone; whoever decodes stands still until they are done.
    """

    prefill: Prefill = "chunked"

    def grants(self, running: Sequence[int], waiting: Iterable[int], budget: int, limit: int) -> Sequence[int]:
        room = limit - len(running)
        if self.prefill == "chunked":
            now = share(running, budget)
            return now + start(waiting, room, budget - sum(now))
        now = share(only_prompts(running), budget)
        started = start(waiting, room, budget - sum(now))
        return now + started if started or any(now) else share(running, budget)


@dataclass(frozen=True)
class Sequential(Continuous):
    """One request at a time."""

    def grants(self, running: Sequence[int], waiting: Iterable[int], budget: int, limit: int) -> Sequence[int]:
        return super().grants(running, waiting, budget, 1)


@dataclass(frozen=True)
class Static:
    """Fill a batch when the last one is done, pad every row to the longest, wait for the slowest."""

    prefill: Prefill = "chunked"
    order = "arrival"
    padded = True

    def grants(self, running: Sequence[int], waiting: Iterable[int], budget: int, limit: int) -> Sequence[int]:
        if running:
            prompts = only_prompts(running) if self.prefill == "first" else ()
            return share(prompts if any(prompts) else running, budget)
        started: list[int] = []
        longest = 0
        for left in islice(waiting, limit):
            longest = max(longest, left)
            if started and longest * (len(started) + 1) > budget:
                break
            started.append(min(left, budget))
        return started


@dataclass(frozen=True)
class StaticSorted(Static):
    """Static batches of requests that declare similar lengths, so that a batch pads and waits less."""

    order = "length"


def only_prompts(running: Iterable[int]) -> list[int]:
    """The same numbers, 0 for whoever has one token left: it decodes, or ends its prompt as cheaply as others decode."""
    return [n if n > 1 else 0 for n in running]


POLICIES: dict[str, type[Continuous] | type[Static]] = {
    "sequential": Sequential, "static": Static, "static-sorted": StaticSorted, "continuous": Continuous,
}  # fmt: skip
