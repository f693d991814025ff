"""Wrong answers to exercise 5.1, each with the check that must catch it."""

from __future__ import annotations

import heapq

from minillm.engine.policies import Continuous, start


class Right:
    """What the core's answers below are variations of."""

    def grants(self, running, waiting, budget, limit):
        answer = []
        for left in running:
            answer.append(min(left, budget))
            budget -= answer[-1]
        return answer + self.start(iter(waiting), budget, limit - len(running))

    def start(self, queue, budget, room):
        started = []
        while budget > 0 and len(started) < room:
            left = next(queue, None)
            if left is None:
                break
            started.append(min(left, budget))
            budget -= started[-1]
        return started


class OnlyRunning(Right):
    def start(self, queue, budget, room):
        return []


class APair(Right):
    def grants(self, running, waiting, budget, limit):
        answer = super().grants(running, waiting, budget, limit)
        return answer[: len(running)], answer[len(running) :]


class WholePromptsOnly(Right):
    def start(self, queue, budget, room):
        started = []
        for left in queue:
            if left > budget or len(started) >= room:
                break
            started.append(left)
            budget -= left
        return started


class NobodyJoins(Right):
    """Starts requests when nobody runs: a static batch."""

    def grants(self, running, waiting, budget, limit):
        return super().grants(running, waiting if not running else (), budget, limit)


class EvenShares:
    def grants(self, running, waiting, budget, limit):
        room = limit - len(running)
        left = [*running, *[n for _, n in zip(range(room), waiting)]]
        each = max(budget // max(len(left), 1), 1)
        answer = []
        for n in left:
            answer.append(min(n, each, budget))
            budget -= answer[-1]
        return answer


class WaitingFirst(Right):
    def grants(self, running, waiting, budget, limit):
        started = self.start(iter(waiting), budget, limit - len(running))
        budget -= sum(started)
        answer = []
        for left in running:
            answer.append(min(left, budget))
            budget -= answer[-1]
        return answer + started


class ForgetsTheLimit(Right):
    def start(self, queue, budget, room):
        return super().start(queue, budget, 10**9)


class StartsWithNothing(Right):
    """Hands out slots when the budget is used up: a grant of 0 for one that starts."""

    def start(self, queue, budget, room):
        started = []
        for left, _ in zip(queue, range(room)):
            started.append(min(left, budget))
            budget -= started[-1]
        return started


class SkipsThoseOutOfBudget(Right):
    def grants(self, running, waiting, budget, limit):
        answer = [n for n in super().grants(running, waiting, budget, limit) if n]
        return answer or [0] * len(running)


class LooksAtAll(Right):
    """Right, with every waiting request looked up."""

    def start(self, queue, budget, room):
        return super().start(iter(list(queue)), budget, room)


class LooksOneTooFar(Right):
    def start(self, queue, budget, room):
        started = []
        for left in queue:
            if budget <= 0 or len(started) >= room:
                break
            started.append(min(left, budget))
            budget -= started[-1]
        return started


class KeepsCount(Right):
    """Remembers how many have started, and believes that they still run."""

    def __init__(self):
        self.started = 0

    def start(self, queue, budget, room):
        started = super().start(queue, budget, max(room - self.started, 0))
        self.started += len(started)
        return started


class Borrows:
    def grants(self, running, waiting, budget, limit):
        return Continuous().grants(running, waiting, budget, limit)


class BorrowsTheStart(Right):
    def start(self, queue, budget, room):
        return start(queue, room, budget)


HAND, RANDOM = "exact: three steps by hand", "random: against one request after the other"
LOOKS = "budget: requests looked at, steps taken"
CORE = (
    (OnlyRunning, "shape"), (APair, "shape"), (NobodyJoins, "shape"), (WholePromptsOnly, HAND), (EvenShares, HAND),
    (WaitingFirst, HAND), (ForgetsTheLimit, HAND), (StartsWithNothing, HAND), (SkipsThoseOutOfBudget, HAND),
    (LooksAtAll, LOOKS), (LooksOneTooFar, LOOKS), (KeepsCount, "state: nothing is remembered, inputs unchanged"),
    (Borrows, "shape"), (BorrowsTheStart, "shape"),
)  # fmt: skip


# --- break ---


def shipped(prompt_len, num_tokens, num_computed, budget):
    if num_tokens == prompt_len:
        tokens = min(prompt_len - num_computed, budget)
        return tokens, num_computed + tokens == prompt_len
    return min(1, budget), budget > 0


def prompt_again_then_one_by_one(prompt_len, num_tokens, num_computed, budget):
    if num_computed < prompt_len:
        tokens = min(prompt_len - num_computed, budget)
        return tokens, num_computed + tokens == prompt_len
    return min(1, budget), budget > 0


def prompt_again_then_the_rest(prompt_len, num_tokens, num_computed, budget):
    if num_computed < prompt_len:
        tokens = min(prompt_len - num_computed, budget)
        return tokens, num_computed + tokens == prompt_len
    tokens = min(num_tokens - num_computed, budget)
    return tokens, tokens > 0 and num_computed + tokens == num_tokens


def ignores_the_budget(prompt_len, num_tokens, num_computed, budget):
    return num_tokens - num_computed, True


def samples_always(prompt_len, num_tokens, num_computed, budget):
    return min(num_tokens - num_computed, budget), True


def samples_behind_the_prompt(prompt_len, num_tokens, num_computed, budget):
    tokens = min(num_tokens - num_computed, budget)
    return tokens, num_computed + tokens >= prompt_len


def never_nothing(prompt_len, num_tokens, num_computed, budget):
    tokens = max(min(num_tokens - num_computed, budget), 1)
    return tokens, num_computed + tokens == num_tokens


def only_tokens(prompt_len, num_tokens, num_computed, budget):
    return min(num_tokens - num_computed, budget)


PREEMPTED, CHUNKS = "edges: preempted after three tokens", "exact: a prompt of 33 in chunks of 8"
BREAK = (
    (shipped, PREEMPTED), (prompt_again_then_one_by_one, PREEMPTED), (prompt_again_then_the_rest, PREEMPTED),
    (ignores_the_budget, CHUNKS), (samples_always, CHUNKS), (samples_behind_the_prompt, PREEMPTED),
    (never_nothing, "edges: no budget is left"), (only_tokens, "shape"),
)  # fmt: skip


# --- stretch ---


def steps(lengths, slots, batching):
    if batching == "continuous":
        ends = [0] * slots
        for length in lengths:
            heapq.heapreplace(ends, ends[0] + length)
        return max(ends)
    if batching == "static-sorted":
        lengths = sorted(lengths)
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


def shared_evenly(lengths, slots, batching):
    return -(-sum(lengths) // slots) if batching == "continuous" else steps(lengths, slots, batching)


def continuous_is_sorted(lengths, slots, batching):
    return steps(sorted(lengths) if batching == "continuous" else lengths, slots, batching)


def longest_first(lengths, slots, batching):
    if batching == "static-sorted":
        return steps(sorted(lengths, reverse=True), slots, "static")
    return steps(lengths, slots, batching)


def sorts_in_place(lengths, slots, batching):
    if batching == "static-sorted":
        lengths.sort()
    return steps(lengths, slots, batching)


def drops_the_rest(lengths, slots, batching):
    if batching == "continuous":
        return steps(lengths, slots, batching)
    full = len(lengths) - len(lengths) % slots
    return steps(sorted(lengths)[:full] if batching == "static-sorted" else lengths[:full], slots, "static")


def nobody_is_an_error(lengths, slots, batching):
    if batching == "continuous":
        return steps(lengths, slots, batching)
    ordered = sorted(lengths) if batching == "static-sorted" else lengths
    return max(ordered[:slots]) + steps(ordered[slots:], slots, "static")


def step_by_step(lengths, slots, batching):
    if batching != "continuous":
        return steps(lengths, slots, batching)
    queue, running, taken = list(lengths), [], 0
    while queue or running:
        while queue and len(running) < slots:
            running.append(queue.pop(0))
        taken += 1
        running = [left - 1 for left in running if left > 1]
    return taken


def a_float(lengths, slots, batching):
    return float(steps(lengths, slots, batching))


BY_HAND, ORACLE = "exact: four requests on two slots by hand", "random: against the engine's scheduler"
EDGES = "edges: nobody, one slot, equal lengths, a batch that is not full"
STRETCH = (
    (a_float, "shape"), (shared_evenly, BY_HAND), (continuous_is_sorted, ORACLE), (longest_first, ORACLE),
    (sorts_in_place, "state: lengths unchanged"), (drops_the_rest, ORACLE), (nobody_is_an_error, EDGES),
    (step_by_step, "budget: work that does not grow with the lengths"),
)  # fmt: skip

WRONG = {"5.1 core": CORE, "5.1 break": BREAK, "5.1 stretch": STRETCH}
