"""Wrong answers to exercise 6.2, each with the check that must catch it."""

from __future__ import annotations

import torch

from minillm.spec.draft import Draft
from minillm.spec.ngram import NgramProposer

# --- core ---


class Right:
    """What the core's answers below are variations of."""

    longest, latest, ahead = 3, True, True

    def propose(self, requests, lengths):
        return [Draft(self.continuation(r.token_ids, n)) for r, n in zip(requests, lengths)]

    def continuation(self, ids, length):
        sizes = range(min(self.longest, len(ids) - 1), 0, -1)
        for size in sizes if self.ahead else reversed(sizes):
            places = range(len(ids) - size - 1, -1, -1)
            for start in places if self.latest else reversed(places):
                if ids[start : start + size] == ids[-size:]:
                    return tuple(ids[start + size : start + size + length])
        return ()


class GivesTuples(Right):
    def propose(self, requests, lengths):
        return [self.continuation(r.token_ids, n) for r, n in zip(requests, lengths)]


class ForgetsTheLength(Right):
    def continuation(self, ids, length):
        return super().continuation(ids, 64)


class SaysHowSureItIs(Right):
    def propose(self, requests, lengths):
        drafts = super().propose(requests, lengths)
        return [Draft(d.token_ids, torch.ones(len(d), 8)) for d in drafts]


class TheFirstPlace(Right):
    latest = False


class TheShortestSuffix(Right):
    ahead = False


class OneTokenOnly(Right):
    longest = 1


class FourTokens(Right):
    longest = 4


class NoOverlap(Right):
    """Only earlier places that end before the suffix begins."""

    def continuation(self, ids, length):
        for size in range(min(3, len(ids) // 2), 0, -1):
            for start in range(len(ids) - 2 * size, -1, -1):
                if ids[start : start + size] == ids[-size:]:
                    return tuple(ids[start + size : start + size + length])
        return ()


class NothingIsAnError(Right):
    def continuation(self, ids, length):
        if len(ids) < 2:
            raise ValueError("too short")
        return super().continuation(ids, length)


class TheFirstLengthForAll(Right):
    def propose(self, requests, lengths):
        return super().propose(requests, [lengths[0]] * len(requests))


class Remembers(Right):
    def __init__(self):
        self.texts = {}

    def propose(self, requests, lengths):
        kept = [self.texts.setdefault(id(r), list(r.token_ids)) for r in requests]
        return [Draft(self.continuation(ids, n)) for ids, n in zip(kept, lengths)]


class Consumes(Right):
    def continuation(self, ids, length):
        found = super().continuation(ids, length)
        ids.pop()
        return found


class ReadsTheRestEachTime(Right):
    def continuation(self, ids, length):
        for size in range(min(3, len(ids) - 1), 0, -1):
            for start in range(len(ids) - size - 1, -1, -1):
                rest = ids[start:]
                if rest[:size] == ids[-size:]:
                    return tuple(rest[size : size + length])
        return ()


class Borrows(NgramProposer):
    pass


class IndexesById(Right):
    """Adds to an index of each request what is new in its text, and never lets go of it."""

    def __init__(self):
        self.known = {}

    def propose(self, requests, lengths):
        return [Draft(self.look(r, n)) for r, n in zip(requests, lengths)]

    def look(self, request, length):
        ids, (done, places) = request.token_ids, self.known.get(request.request_id, (0, {}))
        for end in range(max(done, 1), len(ids)):
            places.update({tuple(ids[end - size : end]): end for size in (1, 2, 3) if size <= end})
        self.known[request.request_id] = len(ids), places
        at = next((places[tuple(ids[-size:])] for size in (3, 2, 1) if tuple(ids[-size:]) in places and size < len(ids)), None)
        return () if at is None else tuple(ids[at : at + length])


HAND, RANDOM = "exact: what followed, the latest, the longest", "random: against trying every place"
CORE = (
    (GivesTuples, "shape"), (ForgetsTheLength, "shape"), (SaysHowSureItIs, "shape"), (Borrows, "shape"), (TheFirstPlace, HAND),
    (TheShortestSuffix, HAND), (OneTokenOnly, HAND), (FourTokens, RANDOM), (NoOverlap, RANDOM), (NothingIsAnError, RANDOM),
    (TheFirstLengthForAll, "shape"), (Consumes, "state: requests unchanged, nothing remembered"),
    (IndexesById, "state: requests unchanged, nothing remembered"),
    (Remembers, "state: requests unchanged, nothing remembered"), (ReadsTheRestEachTime, "budget: tokens read"),
)  # fmt: skip


# --- break ---


def same(fed, ids):
    n = 0
    while n < min(len(fed), len(ids) - 1) and fed[n] == ids[n]:
        n += 1
    return n


def shipped(fed, ids):
    return min(len(fed), len(ids) - 1)


def everything_anew(fed, ids):
    return 0


def the_last_token_is_held(fed, ids):
    n = 0
    while n < min(len(fed), len(ids)) and fed[n] == ids[n]:
        n += 1
    return n


def one_back(fed, ids):
    return max(0, same(fed, ids) - 1)


def a_draft_back(fed, ids):
    """Steps back by as many tokens as differ at the end."""
    back = sum(a != b for a, b in zip(fed, ids))
    return max(0, min(len(fed), len(ids) - 1) - back)


def counts_all_that_are_equal(fed, ids):
    return sum(a == b for a, b in zip(fed, ids[:-1]))


def cuts_what_was_fed(fed, ids):
    n = same(fed, ids)
    del fed[n:]
    return n


def says_true(fed, ids):
    return fed == ids


BY_HAND = "exact: a full acceptance, and a refusal with a pause behind it"
BREAK = (
    (says_true, "shape"), (shipped, BY_HAND), (everything_anew, BY_HAND), (one_back, BY_HAND),
    (the_last_token_is_held, "random: any text"), (a_draft_back, "random: any text"),
    (counts_all_that_are_equal, "random: any text"), (cuts_what_was_fed, "state: inputs unchanged"),
)  # fmt: skip


# --- stretch ---


def speeds(shares, c, v):
    return [(1 + sum(shares[:n])) / (n * c + v[n]) for n in range(len(shares) + 1)]


def right(shares, c, v):
    found = speeds(shares, c, v)
    return found.index(max(found))


def stops_at_the_first_fall(shares, c, v):
    found = speeds(shares, c, v)
    return next((n for n in range(len(shares)) if found[n + 1] <= found[n]), len(shares))


def always_drafts(shares, c, v):
    found = speeds(shares, c, v)[1:]
    return 1 + found.index(max(found)) if found else 0


def the_longest_of_equals(shares, c, v):
    found = speeds(shares, c, v)
    return max(range(len(found)), key=lambda n: (found[n], n))


def a_power_of_the_first(shares, c, v):
    alpha = shares[0] if shares else 0.0
    return right([alpha ** (k + 1) for k in range(len(shares))], c, v)


def forgets_the_check(shares, c, v):
    return right(shares, c, [1.0] * len(v))


def forgets_the_targets_own_token(shares, c, v):
    found = [sum(shares[:n]) / (n * c + v[n]) for n in range(len(shares) + 1)]
    return found.index(max(found))


def a_speed(shares, c, v):
    return max(speeds(shares, c, v))


def sorts(shares, c, v):
    n = right(shares, c, v)
    shares.sort()
    return n


EXACT, TRIED = "exact: three shares, and a drafter that is too dear", "random: against trying every length"
STRETCH = (
    (a_speed, "shape"), (always_drafts, EXACT), (the_longest_of_equals, EXACT), (a_power_of_the_first, EXACT),
    (forgets_the_targets_own_token, EXACT), (forgets_the_check, TRIED), (stops_at_the_first_fall, TRIED),
    (sorts, "state: inputs unchanged"),
)  # fmt: skip

WRONG = {"6.2 core": CORE, "6.2 break": BREAK, "6.2 stretch": STRETCH}
