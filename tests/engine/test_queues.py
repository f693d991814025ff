"""Lists of requests: what they hold, in which order, that changes are cheap, and that nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import SamplingParams
from minillm.engine.queues import CacheQueue, LengthQueue, RequestList, WaitingQueue
from minillm.engine.request import Request


def request(name: int, prompt: int = 1, max_tokens: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(str(name), prompt, [2] * prompt, params, 0, frozenset(), max_tokens)


def names(queue: RequestList) -> list[int]:
    return [int(r.request_id) for r in queue]


def nothing_cached(_: Request) -> int:
    return 0


@pytest.mark.parametrize("make", [RequestList, WaitingQueue, LengthQueue, lambda: CacheQueue(nothing_cached)])
def test_an_empty_list_has_nobody_in_it(make):
    queue = make()
    assert not queue and len(queue) == 0 and list(queue) == [] and request(1) not in queue


kinds = st.sampled_from(["add", "add_first", "add_again", "remove", "start"])


@settings(max_examples=60)
@given(
    st.sampled_from(["arrival", "length", "cache"]),
    st.lists(st.tuples(kinds, st.integers(1, 4), st.integers(1, 4)), max_size=60),
)
def test_a_queue_holds_what_came_and_has_not_left_in_its_order(order, changes):
    """Against a plain list that is sorted anew each time."""
    queue = {"arrival": WaitingQueue, "length": LengthQueue, "cache": lambda: CacheQueue(nothing_cached, 3, 2)}[order]()
    model: list[tuple[tuple, Request]] = []
    left: list[Request] = []
    for i, (change, prompt, max_tokens) in enumerate(changes):
        if change.startswith("add"):  # one that was preempted comes a second time
            new = left.pop() if change == "add_again" and left else request(i, prompt, max_tokens)
            first = change != "add"
            (queue.add_first if first else queue.add)(new)
            length = (max_tokens, prompt) if order == "length" else ()
            model.append((((0,), -i) if first else ((1, *length), i), new))
            model.sort(key=lambda entry: entry[0])
        elif model:
            _, gone = model.pop(0 if change == "start" else prompt % len(model))
            getattr(queue, change)(gone)
            left.append(gone)
        assert list(queue) == [r for _, r in model] and len(queue) == len(model)
        assert all(r in queue for _, r in model) and request(0) not in queue
        if model:
            newest = max(model, key=lambda entry: entry[0]) if order != "length" else None
            assert newest is None or queue.last is newest[1]


def test_requests_that_left_a_sorted_queue_are_forgotten_by_it():
    queue = LengthQueue()
    for i in range(1000):
        queue.add(request(i, max_tokens=1000 - i))
        queue.remove(next(iter(queue)))
    assert len(queue._heap) < 100


def test_the_longest_cached_prefix_goes_first_and_equals_stay_in_order():
    cached = {"0": 0, "1": 4, "2": 8, "3": 4, "4": 0}
    queue = CacheQueue(lambda r: cached[r.request_id])
    for i in range(5):
        queue.add(request(i))
    assert names(queue) == [2, 1, 3, 0, 4]


def test_only_the_oldest_requests_are_asked_for_their_prefix():
    asked = []
    queue = CacheQueue(lambda r: asked.append(r) or int(r.request_id), window=3)
    for i in range(100):
        queue.add(request(i))
    assert names(queue)[:5] == [2, 1, 0, 3, 4] and len(asked) == 3


@pytest.mark.parametrize("patience", [0, 1, 5])
@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_the_oldest_is_overtaken_at_most_patience_times(patience, at_once):
    """It has no prefix in the cache, and requests that have one keep coming."""
    queue = CacheQueue(lambda r: int(r.request_id), window=32, patience=patience)
    for i in range(20):
        queue.add(request(i))
    started: list[int] = []
    for new in range(20, 60):
        for r in [r for _, r in zip(range(at_once), queue)]:
            queue.start(r)
            started.append(int(r.request_id))
        queue.add(request(new))
        if 0 in started:
            break
    assert started.index(0) == patience


def test_an_abort_of_the_oldest_gives_the_next_one_its_own_patience():
    queue = CacheQueue(lambda r: int(r.request_id), patience=2)
    for i in range(6):
        queue.add(request(i))
    oldest = next(r for r in queue if r.request_id == "0")
    queue.start(next(iter(queue)))
    queue.remove(oldest)
    assert names(queue) == [4, 3, 1, 2]


def test_a_preempted_request_is_overtaken_by_nobody():
    queue = CacheQueue(lambda r: int(r.request_id))
    for i in range(1, 4):
        queue.add(request(i))
    queue.add_first(request(0))
    assert names(queue) == [0, 3, 2, 1]


def test_a_request_that_left_a_sorted_queue_and_came_again_is_in_it_once():
    queue = LengthQueue()
    first, second = request(1, max_tokens=2), request(2, max_tokens=5)
    queue.add(first)
    queue.add(second)
    queue.remove(second)
    queue.add_first(second)
    assert names(queue) == [2, 1] and len(queue) == 2
