"""Lists of requests in which every change is cheap, however many stand in them, and the orders in which waiting ones start."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from typing import Callable, Iterator

from minillm.engine.request import Request


class RequestList:
    """Requests in order of arrival, first to last. Adding at either end and removing from anywhere take constant time."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    @property
    def last(self) -> Request:
        return next(reversed(self._requests.values()))

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def add_first(self, request: Request) -> None:
        """Put a request before all others: one that was preempted has waited longer than they have."""
        self.add(request)
        self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]


class WaitingQueue(RequestList):
    """First come, first served. Iterating gives the order in which requests are to start; those behind cost nothing."""

    def start(self, request: Request) -> None:
        """One of the requests that iterating gave starts now."""
        self.remove(request)


class LengthQueue(WaitingQueue):
    """Shortest first, by the lengths that requests declare: max_tokens, then tokens to compute. Preempted ones still go before.

    A long request waits for as long as shorter ones keep coming: an order for batches that are known in advance.
    """

    def __init__(self) -> None:
        super().__init__()
        # entries of requests that have left, or left and came again, stay for a while: _entry says which one counts
        self._heap: list[tuple[tuple[int, ...], int, Request]] = []
        self._entry: dict[str, int] = {}
        self._count = itertools.count(1)

    def add(self, request: Request) -> None:
        super().add(request)
        self._push((1, request.max_tokens, request.num_tokens), next(self._count), request)

    def add_first(self, request: Request) -> None:
        super().add(request)
        self._push((0,), -next(self._count), request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        del self._entry[request.request_id]
        if len(self._heap) > 2 * len(self) + 16:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def _push(self, key: tuple[int, ...], tie: int, request: Request) -> None:
        self._entry[request.request_id] = tie
        heapq.heappush(self._heap, (key, tie, request))

    def _counts(self, entry: tuple[tuple[int, ...], int, Request]) -> bool:
        return self._entry.get(entry[2].request_id) == entry[1]

    def __iter__(self) -> Iterator[Request]:
        """Walks the heap without taking it apart: k requests cost k log k."""
        heap = self._heap
        while heap and not self._counts(heap[0]):
            heapq.heappop(heap)
        edge = [(heap[0][:2], 0)] if heap else []
        while edge:
            _, i = heapq.heappop(edge)
            for child in (2 * i + 1, 2 * i + 2):
                if child < len(heap):
                    heapq.heappush(edge, (heap[child][:2], child))
            if self._counts(heap[i]):
                yield heap[i][2]


class CacheQueue(WaitingQueue):
    """Longest cached prefix first (Zheng et al. 2023, SGLang, arXiv 2312.07104), among the ``window`` oldest requests.

    Starvation is bounded: once the oldest request was overtaken ``patience`` times, it is next.
    cached_tokens: tokens of a request that a prefix cache holds; asking must change nothing.
    """

    def __init__(self, cached_tokens: Callable[[Request], int], window: int = 32, patience: int = 16):
        super().__init__()
        self._cached_tokens = cached_tokens
        self.window, self.patience = window, patience
        self._overtaken = 0  # how often the oldest request was

    def __iter__(self) -> Iterator[Request]:
        arrived = super().__iter__()
        window = list(itertools.islice(arrived, self.window))
        if not window:
            return
        oldest = window[0]
        window.sort(key=self._cached_tokens, reverse=True)  # stable: equals stay in order of arrival
        before = window.index(oldest)
        early = min(before, max(self.patience - self._overtaken, 0))
        yield from window[:early]
        yield oldest
        yield from (r for r in window[early:] if r is not oldest)
        yield from arrived

    def start(self, request: Request) -> None:
        self._overtaken += 1  # unless it is the oldest itself: then remove starts a new count
        self.remove(request)

    def remove(self, request: Request) -> None:
        if request is next(super().__iter__()):
            self._overtaken = 0
        super().remove(request)

    def add_first(self, request: Request) -> None:
        super().add_first(request)
        self._overtaken = self.patience  # it has run before: nobody overtakes it
