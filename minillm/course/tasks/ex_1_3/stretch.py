"""1.3 stretch: load all blocks of a prefix or none, from tiers that may break their promise."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Sequence

from torch import Tensor

from minillm.cache.tiered import Found, TieredCache
from minillm.cache.tiers import HostTier
from minillm.course.expect import Mismatch, expect_at_most, expect_equal
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_1_3.common import BLOCK, FIRST, GREEDY, NOBODY, SECOND, cold, data_of, generated, make_llm


@dataclass
class Shelf:
    """A tier that notes what is asked of it. lies: keys that it has and cannot read."""

    content: dict[bytes, Tensor]
    lies: frozenset[bytes] = NOBODY
    reads: list[bytes] = field(default_factory=list)

    def has(self, key: bytes) -> bool:
        return key in self.content or key in self.lies

    def read(self, key: bytes) -> Tensor | None:
        self.reads.append(key)
        return None if key in self.lies else self.content.get(key)


class Pool:
    """Where blocks are put; breaks when told to."""

    def __init__(self, breaks: bool = False) -> None:
        self.blocks: dict[int, Tensor] = {}
        self.calls = 0
        self.breaks = breaks

    def put(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        self.calls += 1
        if len(blocks) != len(contents):
            raise Mismatch(f"put takes as many contents as blocks, got {len(contents)} for {len(blocks)}")
        if self.breaks:
            raise RuntimeError("the copy failed")
        self.blocks.update(zip(blocks, contents))


def _keys(n: int) -> list[bytes]:
    return [bytes([i]) for i in range(n)]


def _shelf(n: int) -> Shelf:
    return Shelf({key: data_of(key[0]) for key in _keys(n)})


def _load_shape(f: Any) -> None:
    pool = Pool()
    got = f(_keys(2), [5, 3], [_shelf(2)], pool.put)
    if isinstance(got, bool) or not isinstance(got, int):
        raise Mismatch(f"load gives the number of blocks, got {got!r:.60}")


def _load_by_hand(f: Any) -> None:
    pool = Pool()
    expect_equal(f(_keys(2), [5, 3], [_shelf(2)], pool.put), 2, what="two blocks that are there")
    expect_equal(pool.blocks, {5: data_of(0), 3: data_of(1)}, what="content of the pool's blocks")


def _load_random(f: Any) -> None:
    draw = random.Random(3)
    for _ in range(80):
        n = draw.randrange(1, 7)
        keys, blocks = _keys(n), draw.sample(range(20), n)
        shelves = [Shelf({k: data_of(k[0]) for k in keys if draw.random() < 0.7}) for _ in range(2)]
        there = [any(shelf.has(key) for shelf in shelves) for key in keys]
        pool = Pool()
        expected = n if all(there) else there.index(False)
        expect_equal(f(list(keys), list(blocks), shelves, pool.put), expected, what=f"blocks there: {there}")
        whole = {b: data_of(k[0]) for k, b in zip(keys, blocks)} if all(there) else {}
        expect_equal(pool.blocks, whole, what=f"what is in the pool; blocks there: {there}")


def _load_none(f: Any) -> None:
    expect_equal(f([], [], [Shelf({})], Pool().put), 0, what="no blocks")


def _load_lies(f: Any) -> None:
    keys = _keys(3)
    first = Shelf({keys[0]: data_of(0), keys[2]: data_of(2)}, lies=frozenset({keys[1]}))
    second = Shelf({key: data_of(key[0]) for key in keys})
    pool = Pool()
    expect_equal(f(_keys(3), [1, 2, 3], [first, second], pool.put), 3, what="block 1 is damaged in the first tier only")
    expect_equal(pool.blocks, {1: data_of(0), 2: data_of(1), 3: data_of(2)}, what="content of the pool's blocks")
    pool = Pool()
    expect_equal(f(_keys(3), [1, 2, 3], [first], pool.put), 1, what="block 1 is damaged in the only tier")
    expect_equal(pool.calls, 0, what="calls of put")


def _load_breaks(f: Any) -> None:
    pool = Pool(breaks=True)
    expect_equal(f(_keys(2), [1, 2], [_shelf(2)], pool.put), 0, what="put raises: blocks filled")


def _load_order(f: Any) -> None:
    tier = HostTier(30)
    tier.write([(key, data_of(key[0])) for key in _keys(3)], NOBODY)
    f(_keys(3), [1, 2, 3], [tier], Pool().put)
    (left, *_) = tier.write([(b"\x09", data_of(9))], NOBODY)
    expect_equal(left[0][0], 2, what="the block that leaves next; the tail of a prefix is of no use without its head")


def _load_state(f: Any) -> None:
    keys, blocks = _keys(3), [4, 5, 6]
    f(keys, blocks, [Shelf({key: data_of(key[0]) for key in keys})], Pool().put)
    expect_equal((keys, blocks), (_keys(3), [4, 5, 6]), what="keys and blocks after the call")


def _load_engine(f: Any) -> None:
    for damage in (None, 1):
        llm = make_llm(host_cache=10**6)
        tiers = llm.engine.cache.tiers
        assert tiers is not None
        loads: list[int] = []

        def load(found: Found, blocks: Sequence[int], tiers: TieredCache = tiers, loads: list[int] = loads) -> int:
            loads.append(f(list(found.keys), list(blocks), list(tiers.tiers), tiers.io.put))
            return loads[-1]

        tiers.load = load  # type: ignore[method-assign]
        expect_equal(generated(llm, [FIRST, SECOND]), cold([FIRST, SECOND]), what="tokens of two prompts")
        if damage is not None:
            found = tiers.find(FIRST, 0, 3)
            _damage(tiers.tiers[0], found.keys[damage])
        (out,) = llm.generate([FIRST], GREEDY)
        expect_equal(out.token_ids, cold([FIRST])[0], what="tokens of the first prompt again")
        expect_equal(out.num_loaded_tokens, BLOCK * (3 if damage is None else damage), what="tokens loaded")


def _damage(tier: Any, bad: bytes) -> None:
    read = tier.read
    tier.read = lambda key: None if key == bad else read(key)


def _load_budget(f: Any) -> None:
    keys = _keys(8)
    shelves = [Shelf({key: data_of(key[0]) for key in keys[4:]}), Shelf({key: data_of(key[0]) for key in keys})]
    pool = Pool()
    f(keys, list(range(8)), shelves, pool.put)
    expect_at_most(pool.calls, 1, "calls of put for eight blocks")
    expect_at_most(len(shelves[0].reads) + len(shelves[1].reads), 8, "reads of eight blocks, four in each tier")


STRETCH = Task(
    "1.3 stretch",
    "Load all or nothing",
    (
        NamedCheck("shape", _load_shape, hint=2),
        NamedCheck("exact: two blocks by hand", _load_by_hand, hint=2),
        NamedCheck("random: two tiers with holes", _load_random, hint=1),
        NamedCheck("edges: no blocks", _load_none, hint=3),
        NamedCheck("edges: a damaged block, and a second copy", _load_lies, hint=2),
        NamedCheck("edges: put fails", _load_breaks, hint=3),
        NamedCheck("state: the head is used last", _load_order, hint=1),
        NamedCheck("state: inputs unchanged", _load_state),
        NamedCheck("engine: damaged and whole", _load_engine, hint=1),
        NamedCheck("budget: one put, one read a block", _load_budget, hint=3),
    ),
    (
        "Read everything before anything is put. What was read last is what the tier lets go last, so read the tail first.",
        "A block comes from the first tier that has it and gives it: has may say True where read says None.\n"
        "The answer is len(keys), or the index of the first key that no tier gives.",
        "contents = [None] * len(keys); for i in reversed(range(len(keys))): for tier in tiers: contents[i] = …\n"
        "if any is None: return its index (the first). try: put(blocks, contents) except Exception: return 0",
    ),
    references=(TieredCache,),
)
