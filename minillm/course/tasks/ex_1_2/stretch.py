"""1.2 stretch: evict in the right order, the least recently used block that nothing stands on."""

from __future__ import annotations

import random
from typing import Any, Callable, Iterator, Sequence

from minillm.cache.prefix import HashPrefixCache
from minillm.cache.radix import RadixPrefixCache
from minillm.course.expect import expect_at_most, expect_equal, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_1_2.common import Named, Prefixes, Token, always, answers, ours, outside


class Chains:
    """The oracle: uses counted, and the least recently used block without a kept successor found by looking at all."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.parent: dict[int, int | None] = {}
        self.uses = 0

    def touch(self, chain: Sequence[int]) -> None:
        self.uses += 1
        for before, block in zip([None, *chain], chain):
            self.last[block], self.parent[block] = self.uses, before

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        gone: list[int] = []
        while len(gone) < n:
            standing = {self.parent[b] for b in self.last}
            leaves = [b for b in self.last if b not in standing and evictable(b)]
            if not leaves:
                break
            gone.append(min(leaves, key=lambda b: self.last[b]))
            del self.last[gone[-1]], self.parent[gone[-1]]
        return gone


class Ordered(Named):
    """A right cache that leaves the choice of what goes to somebody else."""

    def __init__(self, order: Any) -> None:
        def spelled(ids: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
            return (tuple(ids[:end]) for end in range(size, len(ids) + 1, size))

        super().__init__(spelled)  # type: ignore[arg-type]
        self.order = order

    def match(self, ids: Sequence[int]) -> list[int]:
        found = super().match(ids)
        if found:
            self.order.touch(list(found))
        return found

    def insert(self, ids: Sequence[int], blocks: Sequence[int]) -> None:
        super().insert(ids, blocks)
        self.match(ids)

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        gone: list[int] = list(self.order.evict(n, evictable))
        self.block_of = {name: b for name, b in self.block_of.items() if b not in gone}
        return gone


def _touched(order: Any, *chains: list[int]) -> Any:
    made = order()
    for chain in chains:
        made.touch(list(chain))
    return made


def _order_shape(order: Any) -> None:
    expect_equal(order().evict(3, always), [], what="evict(3, ...) of nothing")
    expect_equal(_touched(order, [5]).evict(3, always), [5], what="evict(3, ...) of one block")


def _order_by_hand(order: Any) -> None:
    expect_equal(_touched(order, [1, 2, 3]).evict(2, always), [3, 2], what="evict(2, ...) after touch([1, 2, 3])")
    o = _touched(order, [1, 2], [1, 3], [4])
    expect_equal(o.evict(2, always), [2, 3], what="evict(2, ...) after touch([1, 2]), touch([1, 3]), touch([4])")
    expect_equal(o.evict(5, always), [1, 4], what="and evict(5, ...) after that")


def _order_used_again(order: Any) -> None:
    o = _touched(order, [1], [2], [3], [1])
    expect_equal(o.evict(3, always), [2, 3, 1], what="evict(3, ...) after 1, 2, 3 and 1 again")


def _order_random(order: Any) -> None:
    for _ in range(10):
        o, truth, chains = order(), Chains(), [[i] for i in range(1, 5)]
        for block in range(5, 45):
            base = random.choice(chains)[: random.randint(1, 6)]
            chain = base if random.random() < 0.3 else [*base, block]
            if not all(b in truth.last for b in chain if b != block):  # a part of it has been evicted: it begins anew
                chain = [block]
            chains.append(chain)
            o.touch(list(chain))
            truth.touch(chain)
            if random.random() < 0.4:
                n, in_use = random.randint(0, 3), random.sample(range(1, 45), 6)
                expected = truth.evict(n, outside(in_use))
                expect_equal(o.evict(n, outside(in_use)), expected, what=f"evict({n}, ...) with {sorted(in_use)} in use")


def _order_passed_over(order: Any) -> None:
    o = _touched(order, [1], [2], [3])
    expect_equal(o.evict(1, outside([1])), [2], what="evict(1, ...) with the oldest in use")
    expect_equal(o.evict(1, always), [1], what="evict(1, ...) when it is free again: being passed over is no use")


def _order_stands(order: Any) -> None:
    o = _touched(order, [1, 2, 3], [4])
    expect_equal(o.evict(9, outside([3])), [4], what="evict(9, ...) with the end of a chain in use")
    expect_equal(o.evict(9, outside([2])), [3], what="evict(9, ...) with the middle of a chain in use")
    expect_equal(o.evict(0, always), [], what="evict(0, ...)")


def _order_grows(order: Any) -> None:
    o = _touched(order, [1, 2], [3], [1, 2, 4])
    expect_equal(o.evict(3, always), [3, 4, 2], what="evict(3, ...) after a chain has grown")


def _order_state(order: Any) -> None:
    o, chain = order(), [1, 2, 3]
    with unchanged(chain=chain):
        o.touch(chain)
    chain.reverse()
    expect_equal(o.evict(1, always), [3], what="evict(1, ...) after the caller reversed its list")
    expect_equal(order().evict(1, always), [], what="another order")
    o.touch([9])
    o.evict(9, always)
    o.touch([2, 8])
    expect_equal(o.evict(9, always), [8, 2], what="blocks that come back in another chain")


def _order_engine(order: Any) -> None:
    (cold, _), (_, found, _) = ours("none", 64), answers(Ordered(Chains()), 9)
    got, hits, _ = answers(Ordered(order()), 9)
    expect_equal(got, cold, what="tokens of the prompts, a pool of 9 blocks")
    expect_equal(hits, found, what="cached tokens of the prompts, a pool of 9 blocks")


def _order_budget(order: Any) -> None:
    o, asked = order(), []
    for block in range(0, 4000, 2):
        o.touch([Token(block), Token(block + 1)])
    Token.hashed = 0

    def ask(block: int) -> bool:
        asked.append(block)
        return True

    for _ in range(10):
        o.evict(1, ask)
    expect_at_most(len(asked), 40, "blocks looked at to evict ten of 4,000, one at a time, with none in use")
    expect_at_most(Token.hashed, 1000, "blocks hashed to evict ten of 4,000")


STRETCH = Task(
    "1.2 stretch",
    "Evict in the right order",
    (
        NamedCheck("shape: nothing, and one block", _order_shape, hint=2),
        NamedCheck("exact: chains by hand", _order_by_hand, hint=1),
        NamedCheck("exact: used again", _order_used_again, hint=1),
        NamedCheck("random: against looking at every block", _order_random, hint=3),
        NamedCheck("edges: passed over while in use", _order_passed_over, hint=2),
        NamedCheck("edges: a block in use keeps what it stands on", _order_stands, hint=2),
        NamedCheck("edges: a chain grows", _order_grows, hint=3),
        NamedCheck("state: nothing is shared, nothing is left behind", _order_state, hint=3),
        NamedCheck("engine: the same hits as the check's own order", _order_engine, hint=3),
        NamedCheck("budget: ten evictions among 4,000 blocks", _order_budget, hint=1),
    ),
    (
        "Keep the blocks in the order of their last use, the oldest first. In which order must the blocks of one chain be put\n"
        "at the end, so that the oldest of all is never one that something stands on?",
        "An OrderedDict from block to the block before it: move_to_end is O(1), and iterating begins at the oldest. Beside it,\n"
        "how many kept blocks stand on each. A block that is passed over keeps its place.",
        "touch: for each block of the chain, last one first: note what it stands on and count it there when it is new; move it\n"
        "to the end. evict: one walk from the oldest: take what nothing stands on and is evictable, and count it off; stop at n.",
    ),
    references=(HashPrefixCache, RadixPrefixCache, Prefixes, Chains),
)
