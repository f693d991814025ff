"""4.1 core: write the allocator of a paged cache, which counts holders."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Iterable

import torch

from minillm import LLM, SamplingParams
from minillm.cache.block_pool import NULL_BLOCK, BlockPool
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_raises, is_whole, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_1_1.common import TINY
from minillm.course.tasks.ex_4_1.common import PROMPTS, B
from minillm.engine.batch import slots_at, slots_of
from minillm.model.transformer import Transformer


def _seen(a: Any) -> tuple[list[int], list[int]]:
    return sorted(a.free), list(a.refs)


def _sound(a: Any, what: str) -> None:
    """Every block is free once and held by nobody, or held and not free."""
    free = Counter(a.free)
    for block in range(1, len(a.refs)):
        if free[block] + (a.refs[block] > 0) != 1:
            raise Mismatch(f"{what}: block {block} is {free[block]} times free and has {a.refs[block]} holders")
    if strange := [b for b in free if b not in range(1, len(a.refs))]:
        raise Mismatch(f"{what}: block {strange[0]} is free, and there is no such block")


def _take(a: Any, n: int, what: str) -> list[int]:
    """n blocks that were free."""
    was_free = set(a.free)
    got = a.allocate(n)
    if not isinstance(got, list) or len(got) != n or not all(is_whole(b) for b in got):
        raise Mismatch(f"{what}: allocate({n}) gives a list of {n} blocks, got {got!r:.60}")
    if len(set(got)) < n or not was_free.issuperset(got):
        raise Mismatch(f"{what}: allocate({n}) gives {n} blocks that were free ({sorted(was_free)}), got {got}")
    return got


def _core_shape(cls: Any) -> None:
    a = cls(4, B)
    got = _take(a, 2, "a pool of 4 blocks")
    a.acquire(list(got))
    freed = a.release(list(got))
    if not isinstance(freed, list):
        raise Mismatch(f"release gives the list of blocks that became free, got {freed!r:.60}")
    if not is_whole(a.slot(got, 5)):
        raise Mismatch(f"slot gives a whole number, got {a.slot(got, 5)!r:.60}")


def _core_by_hand(cls: Any) -> None:
    a = cls(4, B)
    first = list(_take(a, 3, "4 blocks, all free"))
    a.acquire(first[:2])
    expect_equal([a.refs[b] for b in first], [2, 2, 1], what="holders, after two of three blocks were acquired")
    expect_equal(a.release(list(first)), first[2:], what="the first table is released: blocks that became free")
    before = _seen(a)
    expect_equal(a.allocate(3), None, what="allocate(3) of 2 free blocks")
    expect_equal(_seen(a), before, what="free blocks and holders after a refusal")
    expect_equal(a.release(first[:2]), [first[1], first[0]], what="the second table is released, tail first")
    _sound(a, "everything was released")
    expect_equal([cls(8, B).slot([3, 1, 7], p) for p in (0, 5, 11)], [12, 5, 31], what="slots of 0, 5, 11 in the table [3, 1, 7]")


def _core_random(cls: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    a = cls(9, B)
    tables: list[list[int]] = []
    for _ in range(200):
        kind = draw.choice("axr")
        if kind == "a":
            n = draw.randint(0, 4)
            if n > len(a.free):
                expect_equal(a.allocate(n), None, what=f"allocate({n}), {len(a.free)} are free")
            else:
                tables.append(list(_take(a, n, "drawn at random")))
        elif tables and kind == "x":
            table = draw.choice(tables)
            a.acquire(list(table))
            tables.append(list(table))
        elif tables:
            table = tables.pop(draw.randrange(len(tables)))
            left = Counter(b for t in tables for b in t)
            expect_equal(a.release(list(table)), [b for b in reversed(table) if not left[b]], what=f"release({table})")
        held = Counter(b for t in tables for b in t)
        expect_equal(list(a.refs), [held[b] for b in range(10)], what=f"holders of blocks 0 to 9, tables {tables}")
        _sound(a, f"tables {tables}")
    table = draw.sample(range(1, 10), 5)
    expected = slots_of(table, B, 0, 5 * B).tolist()
    expect_equal([int(a.slot(table, p)) for p in range(5 * B)], expected, what=f"slots of the table {table}")


def _core_edges(cls: Any) -> None:
    a = cls(1, 1)
    expect_equal(a.allocate(0), [], what="allocate(0)")
    only = list(_take(a, 1, "a pool of one block"))
    expect_equal(a.allocate(0), [], what="allocate(0) of a pool that is used up")
    expect_equal(a.allocate(1), None, what="allocate(1) of a pool that is used up")
    expect_equal(a.slot(only, 0), 1, what="the slot of position 0, blocks of one token")
    expect_equal((a.release([]), a.release(only)), ([], [1]), what="releasing nothing, and the only block")


def _core_misuse(cls: Any) -> None:
    a = cls(4, B)
    held = list(_take(a, 1, "4 blocks, all free"))
    free = next(b for b in range(1, 5) if b not in held)
    before = _seen(a)
    expect_raises(RuntimeError, lambda: a.acquire([*held, free]), what=f"acquire of the free block {free}")
    expect_equal(_seen(a), before, what="free blocks and holders after acquire was refused")
    expect_raises(RuntimeError, lambda: a.release([free]), what=f"release of the free block {free}")
    expect_equal(_seen(a), before, what="free blocks and holders after release was refused")


def _core_state(cls: Any) -> None:
    a, other = cls(4, B), cls(4, B)
    table = a.allocate(3)
    expect_equal(len(other.free), 4, what="free blocks of another pool")
    kept = list(table)
    with unchanged(table=table):
        a.acquire(table)
        a.slot(table, 7)
        a.release(table)
    table.append(99)  # the table is its request's now
    a.release(kept)
    _sound(a, "the table that allocate gave was extended by its request")


class InEngine:
    """An answer as the pool of an engine without a prefix cache, which would ask for more."""

    num_cached, cached_blocks = 0, ()

    def __init__(self, cls: Any, num_blocks: int, block_size: int) -> None:
        self.answer, self.num_blocks, self.fewest_free = cls(num_blocks, block_size), num_blocks, num_blocks

    @property
    def num_free(self) -> int:
        return len(self.answer.free)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_shared(self) -> int:
        return sum(self.answer.refs) - self.num_referenced

    @property
    def free_blocks(self) -> tuple[int, ...]:
        return tuple(self.answer.free)

    def ref_count(self, block: int) -> int:
        return 0 if block == NULL_BLOCK else self.answer.refs[block]

    def allocate(self, n: int, side_by_side: bool = False) -> list[int] | None:
        blocks = self.answer.allocate(n)
        self.fewest_free = min(self.fewest_free, self.num_free)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        self.answer.acquire(list(blocks))

    def release(self, blocks: Iterable[int], keep: Iterable[int] = ()) -> list[int]:
        return list(self.answer.release(list(blocks)))

    def uncache(self, blocks: Iterable[int]) -> None:
        raise RuntimeError("nothing is cached here")


def _served(cls: Any, num_blocks: int, n: int = 1) -> tuple[list[Any], Any]:
    """Tokens of five requests, and the pool; cls None: the engine's own."""
    llm = LLM(Transformer.random(TINY), dtype="float32", block_size=B, num_blocks=num_blocks, max_num_seqs=6)
    if cls is not None:
        llm.engine.cache.pool = InEngine(cls, num_blocks, B)  # type: ignore[assignment]
    params = [SamplingParams(max_tokens=9 + i, ignore_eos=True, n=n) for i in range(len(PROMPTS))]
    outputs = llm.generate([list(p) for p in PROMPTS], params)
    return [o.token_ids for o in outputs], llm.engine.cache.pool


def _core_engine(cls: Any) -> None:
    expected, _ = _served(None, 64)
    for num_blocks, n in ((64, 1), (9, 1), (64, 3), (12, 3)):
        got, pool = _served(cls, num_blocks, n)
        case = f"engine on your pool of {num_blocks} blocks, {n} samples each"
        expect_equal(got, [tokens for tokens in expected for _ in range(n)], what=f"tokens, {case}")
        expect_equal(len(pool.answer.free), num_blocks, what=f"free blocks at the end, {case}")
        _sound(pool.answer, case)


def _core_budget(cls: Any) -> None:
    """Three samples of 15 prompt tokens that say 4: three full blocks once, and two blocks for each sample."""
    llm = LLM(Transformer.random(TINY), dtype="float32", block_size=B, num_blocks=32)
    pool = InEngine(cls, 32, B)
    llm.engine.cache.pool = pool  # type: ignore[assignment]
    llm.generate([1] * 15, SamplingParams(max_tokens=4, ignore_eos=True, n=3))
    one_copied = 1  # the source of a copy is held until the copy has run
    expect_at_most(32 - pool.fewest_free, 3 + 3 * 2 + one_copied, "blocks for three samples of a prompt of 15 tokens")


CORE = Task(
    "4.1 core",
    "Write the allocator of a paged cache",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: four blocks and two tables by hand", _core_by_hand, hint=1),
        NamedCheck("random: against tables written down", _core_random, hint=3),
        NamedCheck("edges: nothing, and a pool of one block", _core_edges, hint=2),
        NamedCheck("edges: blocks that nobody holds", _core_misuse, hint=3),
        NamedCheck("state: pools and tables are independent", _core_state, hint=3),
        NamedCheck("engine: preemption and samples on your pool", _core_engine, hint=1),
        NamedCheck("budget: blocks for three samples", _core_budget, hint=1),
    ),
    (
        "A block is in the free list, or it has holders; refs says how many. Whoever gives a block back only takes one holder\n"
        "away: the block is free when none is left.",
        "allocate: a list of n numbers, or None. Compare n with len(self.free) before anything changes. release goes through\n"
        "the table from its end and gives the blocks that became free, in order. slot: a number, block * block_size + offset.",
        "allocate: if n > len(self.free): return None; blocks = [self.free.popleft() for _ in range(n)]; refs of each = 1.\n"
        "acquire: first look whether all have holders (RuntimeError), then add. release: for block in reversed(blocks): check\n"
        "refs, subtract 1, and at 0 append it to free and to the answer. Change no list that you were given.",
    ),
    references=(BlockPool, slots_of, slots_at),
)
