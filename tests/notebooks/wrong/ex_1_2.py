"""Wrong answers to exercise 1.2, each with the check that must catch it."""

from __future__ import annotations

from collections import OrderedDict

from minillm.cache.radix import RadixPrefixCache


def whole_blocks(token_ids, block_size):
    return [tuple(token_ids[end - block_size : end]) for end in range(block_size, len(token_ids) + 1, block_size)]


class Right:
    """What the core's answers below are variations of."""

    def __init__(self, block_size=16):
        self.block_size = block_size
        self.children = {}
        self.place = {}

    def match(self, token_ids):
        children, found = self.children, []
        for piece in whole_blocks(token_ids, self.block_size):
            if piece not in children:
                break
            block, children = children[piece]
            found.append(block)
        return found

    def insert(self, token_ids, blocks):
        children = self.children
        for piece, block in zip(whole_blocks(token_ids, self.block_size), blocks):
            if piece not in children:
                children[piece] = (block, {})
                self.place[block] = (children, piece)
            children = children[piece][1]

    def holds(self, block):
        return block in self.place

    def evict(self, n, evictable):
        gone = []
        for block in reversed(list(self.place)):
            siblings, piece = self.place[block]
            if len(gone) < n and not siblings[piece][1] and evictable(block):
                del siblings[piece], self.place[block]
                gone.append(block)
        return gone


class Keyed(Right):
    """A flat table from a block's name to its number."""

    def __init__(self, block_size=16):
        self.block_size = block_size
        self.block_of = {}

    def names(self, token_ids):
        return [tuple(token_ids[:end]) for end in range(self.block_size, len(token_ids) + 1, self.block_size)]

    def match(self, token_ids):
        found = []
        for name in self.names(token_ids):
            if name not in self.block_of:
                break
            found.append(self.block_of[name])
        return found

    def insert(self, token_ids, blocks):
        for name, block in zip(self.names(token_ids), blocks):
            self.block_of.setdefault(name, block)

    def holds(self, block):
        return block in self.block_of.values()

    def evict(self, n, evictable):
        gone = []
        for name, block in sorted(self.block_of.items(), key=lambda item: -len(item[0]) if isinstance(item[0], tuple) else 0):
            standing = any(isinstance(p, tuple) and len(p) > len(name) and p[: len(name)] == name for p in self.block_of)
            if len(gone) < n and evictable(block) and not standing:
                gone.append(block)
                del self.block_of[name]
        return gone


class KeepsNothing(Right):
    def insert(self, token_ids, blocks):
        pass


class GivesNone(Right):
    def match(self, token_ids):
        return super().match(token_ids) or None


class MatchesThePartialBlock(Right):
    """Finds a block when the prompt ends inside it: keys and values of tokens that were never asked for."""

    def match(self, token_ids):
        found, children = [], self.children
        for start in range(0, len(token_ids), self.block_size):
            piece = tuple(token_ids[start : start + self.block_size])
            piece = next((p for p in children if p[: len(piece)] == piece), None)
            if piece is None:
                break
            block, children = children[piece]
            found.append(block)
        return found


class ForgetsTheBlockSize(Right):
    def __init__(self, block_size=4):
        super().__init__(block_size)


class ByItsOwnTokens(Keyed):
    """The fault of the break task, in the core."""

    def names(self, token_ids):
        return whole_blocks(token_ids, self.block_size)

    def evict(self, n, evictable):
        gone = [b for b in reversed(list(self.block_of.values())) if evictable(b)][:n]
        self.block_of = {name: b for name, b in self.block_of.items() if b not in gone}
        return gone


class EvictsTheOldest(Right):
    """The beginning goes first, and what followed it is kept where nobody finds it."""

    def evict(self, n, evictable):
        gone = [block for block in self.place if evictable(block)][:n]
        for block in gone:
            siblings, piece = self.place.pop(block)
            siblings.pop(piece, None)
        return gone


class EvictsTooFew(Right):
    def evict(self, n, evictable):
        return super().evict(min(n, 1), evictable)


class EvictsWhatIsInUse(Right):
    def evict(self, n, evictable):
        return super().evict(n, lambda block: True)


class TakesTheNewest(Right):
    """The second copy replaces the first, whose blocks others may hold."""

    def insert(self, token_ids, blocks):
        children = self.children
        for piece, block in zip(whole_blocks(token_ids, self.block_size), blocks):
            if piece not in children or children[piece][0] != block:
                below = children[piece][1] if piece in children else {}
                children[piece] = (block, below)
                self.place[block] = (children, piece)
            children = children[piece][1]


class HoldsCopies(Right):
    def insert(self, token_ids, blocks):
        super().insert(token_ids, blocks)
        self.offered = getattr(self, "offered", set()) | set(blocks)

    def holds(self, block):
        return block in getattr(self, "offered", ())

    def evict(self, n, evictable):
        gone = super().evict(n, evictable)
        self.offered = getattr(self, "offered", set()) - set(gone)
        return gone


class BelievesHashes(Keyed):
    """The chain of hashes, without a look at the tokens."""

    def __init__(self, block_size=16):
        super().__init__(block_size)
        self.parent = {}

    def names(self, token_ids):
        name, out = None, []
        for piece in whole_blocks(token_ids, self.block_size):
            before, name = name, hash((name, piece))
            self.parent[name] = before
            out.append(name)
        return out

    def evict(self, n, evictable):
        gone = []
        for name in reversed(list(self.block_of)):
            block = self.block_of[name]
            standing = any(self.parent[other] == name for other in self.block_of)
            if len(gone) < n and evictable(block) and not standing:
                gone.append(block)
                del self.block_of[name]
        return gone


class SpelledOut(Keyed):
    """Right, and hashes the whole beginning for every block."""


class Borrowed(Right):
    def __init__(self, block_size=16):
        super().__init__(block_size)
        self.theirs = RadixPrefixCache(block_size)

    def match(self, token_ids):
        return self.theirs.match(token_ids)


# --- break ---


def shipped(token_ids, block_size):
    ends = range(block_size, len(token_ids) + 1, block_size)
    return [hash((end, tuple(token_ids[end - block_size : end]))) for end in ends]


def with_the_partial_block(token_ids, block_size):
    name, out = None, []
    for start in range(0, len(token_ids), block_size):
        name = hash((name, tuple(token_ids[start : start + block_size])))
        out.append(name)
    return out


def only_positions(token_ids, block_size):
    return list(range(len(token_ids) // block_size))


def a_new_name_each_time(token_ids, block_size):
    return [object() for _ in whole_blocks(token_ids, block_size)]


def with_the_block_before(token_ids, block_size):
    pieces = [None, *whole_blocks(token_ids, block_size)]
    return [hash((i, pieces[i], pieces[i + 1])) for i in range(len(pieces) - 1)]


def first_block_and_own(token_ids, block_size):
    pieces = whole_blocks(token_ids, block_size)
    return [hash((pieces[0], i, piece)) for i, piece in enumerate(pieces)]


def added_up(token_ids, block_size):
    total, out = 0, []
    for piece in whole_blocks(token_ids, block_size):
        total += hash(piece)
        out.append((len(out), total))
    return out


def joined_as_text(token_ids, block_size):
    ends = range(block_size, len(token_ids) + 1, block_size)
    return ["".join(str(int(t)) for t in token_ids[:end]) for end in ends]


def eats_its_input(token_ids, block_size):
    name, out = None, []
    while len(token_ids) >= block_size:
        name = hash((name, tuple(token_ids[:block_size])))
        del token_ids[:block_size]
        out.append(name)
    return out


def all_tokens_so_far(token_ids, block_size):
    return [hash(tuple(token_ids[:end])) for end in range(block_size, len(token_ids) + 1, block_size)]


# --- stretch ---


class RightOrder:
    def __init__(self):
        self.parent = OrderedDict()
        self.standing = {}

    def touch(self, chain):
        for block, below in zip(reversed(chain), [*reversed(chain[:-1]), None]):
            if block not in self.parent:
                self.parent[block] = below
                self.standing[below] = self.standing.get(below, 0) + 1
            self.parent.move_to_end(block)

    def evict(self, n, evictable):
        gone = []
        for block in self.parent:
            if len(gone) == n:
                break
            if not self.standing.get(block) and evictable(block):
                gone.append(block)
                self.standing[self.parent[block]] -= 1
        for block in gone:
            del self.parent[block]
            self.standing.pop(block, None)
        return gone


class BeginningFirst(RightOrder):
    """Puts the chain at the end in its own order and trusts that order."""

    def touch(self, chain):
        super().touch(chain)
        for block in chain:
            self.parent.move_to_end(block)

    def evict(self, n, evictable):
        gone = [b for b in self.parent if evictable(b)][:n]
        for block in gone:
            del self.parent[block]
        self.standing = {}
        return gone


class EvictsOne(RightOrder):
    def evict(self, n, evictable):
        return super().evict(min(n, 1), evictable)


class FirstUseCounts(RightOrder):
    def touch(self, chain):
        super().touch([*chain]) if any(b not in self.parent for b in chain) else None


class OnlyTheEndIsUsed(RightOrder):
    """The use of a chain does not reach its beginning."""

    def touch(self, chain):
        known = [b for b in chain[:-1] if b in self.parent]
        super().touch(chain)
        for block in known:
            self.parent.move_to_end(block, last=False)


class TrustsTheOrder(RightOrder):
    """Right until a leaf is in use: then what it stands on goes."""

    def evict(self, n, evictable):
        gone = [b for b in self.parent if evictable(b)][:n]
        for block in gone:
            del self.parent[block]
        return gone


class PassedOverIsUsed(RightOrder):
    def evict(self, n, evictable):
        passed = []
        gone = super().evict(n, lambda b: evictable(b) or bool(passed.append(b)))
        for block in passed:
            if block in self.parent:
                self.parent.move_to_end(block)
        return gone


class KeepsTheList(RightOrder):
    """Looks at the caller's list when it is asked, not when it is told."""

    def __init__(self):
        super().__init__()
        self.later = []

    def touch(self, chain):
        if len(chain) == 3 and not self.parent and not self.later:
            self.later.append(chain)
        else:
            super().touch(chain)

    def evict(self, n, evictable):
        for chain in self.later:
            super().touch(chain)
        self.later = []
        return super().evict(n, evictable)


class LooksAtAll(RightOrder):
    """Right: the smallest of all, found anew each time."""

    def __init__(self):
        self.last, self.parent, self.uses = {}, {}, 0

    def touch(self, chain):
        self.uses += 1
        for before, block in zip([None, *chain], chain):
            self.last[block], self.parent[block] = self.uses, before

    def evict(self, n, evictable):
        gone = []
        while len(gone) < n:
            standing = set(self.parent.values())
            leaves = [b for b in self.last if b not in standing and evictable(b)]
            if not leaves:
                break
            block = min(leaves, key=self.last.get)
            gone.append(block)
            del self.last[block], self.parent[block]
        return gone


WRONG = {
    "1.2 core": [
        (KeepsNothing, "shape: an empty cache and one block"),
        (GivesNone, "shape: an empty cache and one block"),
        (MatchesThePartialBlock, "exact: two prompts by hand"),
        (ForgetsTheBlockSize, "exact: blocks of 16 where nothing else is said"),
        (EvictsTheOldest, "random: against all prefixes spelled out"),
        (EvictsTooFew, "random: against all prefixes spelled out"),
        (EvictsWhatIsInUse, "random: against all prefixes spelled out"),
        (ByItsOwnTokens, "exact: two prompts by hand"),
        (TakesTheNewest, "edges: a second copy is offered"),
        (HoldsCopies, "edges: a second copy is offered"),
        (BelievesHashes, "edges: tokens whose hashes collide"),
        (SpelledOut, "budget: tokens hashed for a long prompt"),
        (Borrowed, "shape: an empty cache and one block"),
    ],
    "1.2 break": [
        (with_the_partial_block, "shape: one name a full block"),
        (only_positions, "exact: two pairs by hand"),
        (a_new_name_each_time, "exact: two pairs by hand"),
        (shipped, "edges: the same block behind another beginning"),
        (with_the_block_before, "edges: the difference is several blocks back"),
        (first_block_and_own, "edges: the difference is several blocks back"),
        (added_up, "edges: the same blocks in another order"),
        (joined_as_text, "edges: tokens that look alike when written side by side"),
        (eats_its_input, "state: inputs unchanged, the same names again"),
        (all_tokens_so_far, "budget: tokens hashed for a long prompt"),
    ],
    "1.2 stretch": [
        (EvictsOne, "exact: chains by hand"),
        (BeginningFirst, "exact: chains by hand"),
        (FirstUseCounts, "exact: used again"),
        (OnlyTheEndIsUsed, "random: against looking at every block"),
        (TrustsTheOrder, "random: against looking at every block"),
        (PassedOverIsUsed, "random: against looking at every block"),
        (KeepsTheList, "state: nothing is shared, nothing is left behind"),
        (LooksAtAll, "budget: ten evictions among 4,000 blocks"),
    ],
}
