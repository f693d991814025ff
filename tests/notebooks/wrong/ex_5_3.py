"""Wrong answers to exercise 5.3, each with the check that must catch it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from minillm.engine.graphs import PowersOfTwo


class Right:
    """What the core's answers below are variations of."""

    slot, kv_len = 0, 1

    def bucket(self, rows, most):
        size = 1
        while size < rows:
            size *= 2
        return min(size, most)

    def pad(self, batch, rows):
        more = rows - batch.num_rows
        zeros = torch.zeros(more, dtype=torch.int64)
        return replace(
            batch, token_ids=torch.cat([batch.token_ids, zeros]), positions=torch.cat([batch.positions, zeros]),
            slots=torch.cat([batch.slots, zeros + self.slot]), q_lens=batch.q_lens + (1,) * more,
            kv_lens=batch.kv_lens + (self.kv_len,) * more, tables=batch.tables + ((0,),) * more,
            num_padding=batch.num_padding + more,
        )  # fmt: skip


class AFloat(Right):
    def bucket(self, rows, most):
        return min(2 ** math.ceil(math.log2(rows)), most) * 1.0


class MultiplesOfEight(Right):
    def bucket(self, rows, most):
        return min(-(-rows // 8) * 8, most)


class AlwaysTheNextOne(Right):
    def bucket(self, rows, most):
        return min(2 ** rows.bit_length(), most)


class BeyondTheLargest(Right):
    def bucket(self, rows, most):
        return super().bucket(rows, 10**9)


class WritesALiveSlot(Right):
    slot = 4


class ReadsNothing(Right):
    kv_len = 0


class RepeatsTheLastRow(Right):
    """Harmless for the keys, and it computes a request twice."""

    def pad(self, batch, rows):
        more = rows - batch.num_rows
        last = {n: torch.cat([x, x[-1:].expand(more)]) for n in ("token_ids", "positions", "slots") for x in [getattr(batch, n)]}
        full = super().pad(batch, rows)
        return replace(full, **last, kv_lens=batch.kv_lens + batch.kv_lens[-1:] * more)


class WantsLogitsOfPadding(Right):
    def pad(self, batch, rows):
        return replace(super().pad(batch, rows), logit_indices=torch.arange(rows))


class ForgetsEarlierPadding(Right):
    def pad(self, batch, rows):
        return replace(super().pad(batch, rows), num_padding=rows - batch.num_rows)


class PadsAlwaysByOne(Right):
    def pad(self, batch, rows):
        return super().pad(batch, max(rows, batch.num_rows + 1))


class OverwritesTheBatch(Right):
    def pad(self, batch, rows):
        full = super().pad(batch, rows)
        batch.token_ids.zero_()
        return full


class Borrows(Right):
    def pad(self, batch, rows):
        return PowersOfTwo().pad(batch, rows)


SIZES, ROWS = "exact: sizes by hand", "exact: three rows padded to four by hand"
CORE = (
    (AFloat, "shape: a whole number, and a batch of so many rows"), (MultiplesOfEight, SIZES), (AlwaysTheNextOne, SIZES),
    (BeyondTheLargest, SIZES), (WritesALiveSlot, ROWS), (ReadsNothing, ROWS), (RepeatsTheLastRow, ROWS),
    (WantsLogitsOfPadding, ROWS), (PadsAlwaysByOne, "edges: nothing to pad"),
    (ForgetsEarlierPadding, "edges: a batch that has padding already"), (OverwritesTheBatch, "state: the batch is unchanged"),
    (Borrows, "shape: a whole number, and a batch of so many rows"),
)  # fmt: skip


class Ledger:
    def __init__(self):
        self.flights, self.leaving, self.free = [], [], []

    def launch(self, reads):
        self.flights.append(set(reads))

    def busy(self):
        return set().union(*self.flights)

    def end(self, blocks):
        busy = self.busy()
        self.free += [b for b in blocks if b not in busy]
        self.leaving += [b for b in blocks if b in busy]

    def land(self):
        self.flights.pop(0)
        blocks, self.leaving = self.leaving, []
        self.end(blocks)


class FreesAtOnce(Ledger):
    def busy(self):
        return set()


class LooksAtTheOldest(Ledger):
    def busy(self):
        return self.flights[0] if self.flights else set()


class LooksAtTheNewest(Ledger):
    def busy(self):
        return self.flights[-1] if self.flights else set()


class FreesWhenNothingFlies(Ledger):
    """Never too early, and under load never at all."""

    def end(self, blocks):
        self.leaving += blocks
        if not self.flights:
            self.free += self.leaving
            self.leaving = []


class FreesTwice(Ledger):
    def land(self):
        self.flights.pop(0)
        busy = self.busy()
        self.free += [b for b in self.leaving if b not in busy]


class NeverFrees(Ledger):
    def land(self):
        self.flights.pop(0)


ONE, TWO = "exact: one step in flight", "exact: two steps in flight"
BREAK = (
    (FreesAtOnce, ONE), (LooksAtTheOldest, "random: against a look at every step"),
    (LooksAtTheNewest, "random: against a look at every step"), (FreesWhenNothingFlies, "random: against a look at every step"),
    (FreesTwice, "random: against a look at every step"), (NeverFrees, ONE),
)  # fmt: skip


def spans_of(plan, run, hand, overlap, depth=1, waits=True, counts_hand=True):
    host, spans, landed = 0.0, [], 0
    for i in range(len(run)):
        host += plan[i]
        start = max(host, spans[-1][1] if spans and waits else 0.0)
        spans.append((start, start + run[i]))
        if len(spans) - landed > (depth if overlap else 0):
            host = max(host, spans[landed][1]) + (hand[landed] if counts_hand else 0.0)
            landed += 1
    return spans


def never_ahead(plan, run, hand, overlap):
    return spans_of(plan, run, hand, False)


def two_ahead(plan, run, hand, overlap):
    return spans_of(plan, run, hand, overlap, depth=2)


def two_at_once(plan, run, hand, overlap):
    return spans_of(plan, run, hand, overlap, waits=False)


def hands_out_for_nothing(plan, run, hand, overlap):
    return spans_of(plan, run, hand, overlap, counts_hand=False)


def the_longer_of_the_two(plan, run, hand, overlap):
    """The formula of the lesson, step by step: right in the middle of a long run only."""
    at, spans = plan[0] if plan else 0.0, []
    for p, r, h in zip(plan, run, hand, strict=True):
        spans.append((at, at + r))
        at += max(p + h, r) if overlap else p + r + h
    return spans


def only_the_lengths(plan, run, hand, overlap):
    return [stop - start for start, stop in spans_of(plan, run, hand, overlap)]


HAND = "exact: three steps by hand"
SLOW = "exact: a host that is slower than the device"
STRETCH = (
    (never_ahead, HAND), (two_ahead, SLOW), (two_at_once, HAND), (hands_out_for_nothing, HAND), (the_longer_of_the_two, SLOW),
    (only_the_lengths, "shape"),
)  # fmt: skip

WRONG = {"5.3 core": CORE, "5.3 break": BREAK, "5.3 stretch": STRETCH}
