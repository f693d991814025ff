"""Wrong answers to exercise 1.3, each with the check that must catch it."""

from __future__ import annotations

from collections import OrderedDict


def _seconds(offer, n, once=True, past=True, rest=True):
    """What the core's answers below are variations of."""
    held = offer.tiers[:n]
    if once:
        loads = sum(offer.links[t].seconds(held.count(t) * offer.block_bytes) for t in dict.fromkeys(held))
    else:
        loads = sum(offer.links[t].seconds(offer.block_bytes) for t in held)
    left = (len(offer.tiers) - n) * offer.block_size + offer.rest * rest
    return loads + offer.prefill((offer.past + n * offer.block_size) * past, left)


def gives_seconds(offer):
    return min(_seconds(offer, n) for n in range(len(offer.tiers) + 1))


def the_wrong_way_round(offer):
    return max(range(len(offer.tiers) + 1), key=lambda n: _seconds(offer, n))


def all_or_nothing(offer):
    return len(offer.tiers) if _seconds(offer, len(offer.tiers)) < _seconds(offer, 0) else 0


def block_by_block(offer):
    n = 0
    while n < len(offer.tiers) and _seconds(offer, n + 1) < _seconds(offer, n):
        n += 1
    return n


def a_start_for_every_block(offer):
    return min(range(len(offer.tiers) + 1), key=lambda n: _seconds(offer, n, once=False))


def forgets_what_is_before(offer):
    return min(range(len(offer.tiers) + 1), key=lambda n: _seconds(offer, n, past=False))


def forgets_what_is_behind(offer):
    return min(range(len(offer.tiers) + 1), key=lambda n: _seconds(offer, n, rest=False))


def a_tie_is_loaded(offer):
    return min(range(len(offer.tiers) + 1), key=lambda n: (round(_seconds(offer, n), 9), -n))


def asks_again_and_again(offer):
    best = 0
    for n in range(len(offer.tiers) + 1):
        if all(_seconds(offer, n) < _seconds(offer, m) for m in range(n)):
            best = n
    return best


class Right:
    """What the break's answers below are variations of."""

    name = "host"

    def __init__(self, limit):
        self.limit, self.used, self.items = limit, 0, OrderedDict()

    def has(self, key):
        return key in self.items

    def use(self, key):
        if key in self.items:
            self.items.move_to_end(key)
        return key in self.items

    def read(self, key):
        return self.items[key] if self.use(key) else None

    def victim(self, pending):
        return next((k for k in self.items if k not in pending), None)

    def write(self, items, pending):
        left = []
        for key, data in items:
            if self.use(key):
                continue
            while self.items and self.used + data.nbytes > self.limit:
                victim = self.victim(pending)
                if victim is None:
                    break
                gone = self.items.pop(victim)
                self.used -= gone.nbytes
                left.append((victim, gone))
            if self.used + data.nbytes > self.limit:
                left.append((key, data))
                continue
            self.items[key] = data
            self.used += data.nbytes
        return left


class GivesNothing(Right):
    def write(self, items, pending):
        super().write(items, pending)


class NewestLeaves(Right):
    def victim(self, pending):
        return next((k for k in reversed(self.items) if k not in pending), None)


class FirstInFirstOut(Right):
    def use(self, key):
        return key in self.items


class LosesWhatLeaves(Right):
    def write(self, items, pending):
        super().write(items, pending)
        return []


class GivesAwayWhatIsPending(Right):
    def victim(self, pending):
        return next(iter(self.items))


class GivesUpWhenTheOldestIsPending(Right):
    def victim(self, pending):
        oldest = next(iter(self.items))
        return None if oldest in pending else oldest


class NothingIsWrittenWhileAnythingIsPending(Right):
    def write(self, items, pending):
        return list(items) if pending else super().write(items, pending)


class FallsBackOnPending(Right):
    """Pending blocks go last, but go."""

    def victim(self, pending):
        found = super().victim(pending)
        return next(iter(self.items)) if found is None else found


class DropsWhatIsTooLarge(Right):
    def write(self, items, pending):
        return super().write([item for item in items if item[1].nbytes <= self.limit], pending)


def _load(keys, blocks, tiers, put, order=reversed, trust=False):
    """What the stretch's answers below are variations of."""
    contents = [None] * len(keys)
    for i in order(range(len(keys))):
        for tier in tiers:
            if contents[i] is None and tier.has(keys[i]):
                contents[i] = tier.read(keys[i])
                if trust:
                    break
    missing = next((i for i, data in enumerate(contents) if data is None), None)
    if missing is not None:
        return missing
    try:
        put(blocks, contents)
    except Exception:
        return 0
    return len(keys)


def gives_true(keys, blocks, tiers, put):
    return _load(keys, blocks, tiers, put) == len(keys)


def as_far_as_it_goes(keys, blocks, tiers, put):
    n = _load(keys, blocks, tiers, lambda *_: None)
    return _load(keys[:n], blocks[:n], tiers, put)


def zero_or_all(keys, blocks, tiers, put):
    return len(keys) if _load(keys, blocks, tiers, put) == len(keys) else 0


def head_first(keys, blocks, tiers, put):
    return _load(keys, blocks, tiers, put, order=iter)


def trusts_has(keys, blocks, tiers, put):
    return _load(keys, blocks, tiers, put, trust=True)


def lets_put_raise(keys, blocks, tiers, put):
    n = _load(keys, blocks, tiers, lambda *_: None)
    if n == len(keys):
        put(blocks, [next(d for t in tiers if (d := t.read(key)) is not None) for key in keys])
    return n


def reads_every_tier(keys, blocks, tiers, put):
    for key in reversed(keys):
        for tier in tiers:
            tier.read(key)
    return _load(keys, blocks, tiers, put)


def takes_keys_off_the_list(keys, blocks, tiers, put):
    n = _load(list(keys), list(blocks), tiers, put)
    keys.clear()
    return n


WRONG = {
    "1.3 core": [
        (gives_seconds, "shape"),
        (the_wrong_way_round, "exact: three blocks by hand"),
        (all_or_nothing, "random: against trying every number"),
        (block_by_block, "random: against trying every number"),
        (a_start_for_every_block, "random: against trying every number"),
        (forgets_what_is_before, "random: against trying every number"),
        (forgets_what_is_behind, "edges: what is behind the offer counts"),
        (a_tie_is_loaded, "edges: a tie is computed"),
        (asks_again_and_again, "budget: predictions"),
    ],
    "1.3 break": [
        (GivesNothing, "shape"),
        (NewestLeaves, "random: least recently used, against a model"),
        (FirstInFirstOut, "random: least recently used, against a model"),
        (LosesWhatLeaves, "random: least recently used, against a model"),
        (GivesAwayWhatIsPending, "edges: a block that is about to be read stays"),
        (GivesUpWhenTheOldestIsPending, "edges: a block that is about to be read stays"),
        (NothingIsWrittenWhileAnythingIsPending, "edges: a block that is about to be read stays"),
        (FallsBackOnPending, "edges: all blocks are about to be read"),
        (DropsWhatIsTooLarge, "edges: a block larger than the tier"),
    ],
    "1.3 stretch": [
        (gives_true, "shape"),
        (as_far_as_it_goes, "random: two tiers with holes"),
        (zero_or_all, "random: two tiers with holes"),
        (trusts_has, "edges: a damaged block, and a second copy"),
        (lets_put_raise, "edges: put fails"),
        (head_first, "state: the head is used last"),
        (takes_keys_off_the_list, "state: inputs unchanged"),
        (reads_every_tier, "budget: one put, one read a block"),
    ],
}
