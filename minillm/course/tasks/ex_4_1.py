"""Exercise 4.1: an allocator that counts holders, a copy on write that is forgotten, and what a life in blocks wastes."""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any, Iterable, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.cache import manager
from minillm.cache.block_pool import NULL_BLOCK, BlockPool
from minillm.cache.kv_store import PlainKVStore, copy_slots
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_raises, is_whole, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_1_1 import TINY
from minillm.engine.batch import ForwardBatch, Row, slots_at, slots_of
from minillm.engine.runner import ModelRunner
from minillm.model.transformer import Transformer
from minillm.traffic.occupancy import occupancy

B = 4
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 6, 1, 8, 0, 3], [5] * 12, [4, 4, 4])


# 4.1 core: an allocator -------------------------------------------------------------------------------------------------------


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


# 4.1 break: before a write ----------------------------------------------------------------------------------------------------


def _prepared(f: Any, blocks: int, table: int, holders: Sequence[int], start: int, stop: int) -> tuple[Any, list[int], BlockPool]:
    """What f gives for a table of that many blocks, the i-th of which has holders[i]; its table, and the pool afterwards."""
    pool = BlockPool(blocks)
    mine = pool.allocate(table) or []
    for block, n in zip(mine, holders):
        for _ in range(n - 1):
            pool.acquire([block])
    return f(pool, mine, start, stop, B), mine, pool


def _case(
    f: Any, blocks: int, holders: Sequence[int], start: int, stop: int, copies: list[tuple[int, int]] | None, table: list[int],
    what: str,
) -> None:  # fmt: skip
    got, mine, pool = _prepared(f, blocks, len(holders), holders, start, stop)
    case = f"{what} (positions {start} to {stop - 1}, holders {list(holders)})"
    expect_equal(got, copies, what=f"{case}: (source, target) of the copies")
    expect_equal(mine, table, what=f"{case}: the table")
    sources = [source for source, _ in copies or ()]
    left = [n - ((i + 1) in sources) for i, n in enumerate(holders)]
    expect_equal([pool.ref_count(i + 1) for i in range(len(holders))], left, what=f"{case}: holders of the old blocks")
    expect_equal(pool.num_free, blocks - len({*range(1, len(holders) + 1), *table}), what=f"{case}: free blocks")


def _break_shape(f: Any) -> None:
    got = _prepared(f, 8, 2, (1, 2), 6, 7)[0]
    if not isinstance(got, list) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in got):
        raise Mismatch(f"it gives a list of (source, target), got {got!r:.60}")


def _break_by_hand(f: Any) -> None:
    _case(f, 8, (2, 2), 6, 7, [(2, 3)], [1, 3], "two samples, one more token")
    _case(f, 8, (1, 1), 6, 7, [], [1, 2], "nobody shares")
    _case(f, 8, (2, 2), 8, 9, [], [1, 2, 3], "two samples, the shared blocks are full")


def _break_random(f: Any) -> None:
    for _ in range(60):
        computed, others = int(torch.randint(1, 20, ())), int(torch.randint(1, 4, ()))
        n = -(-computed // B)
        if computed % B:
            _case(f, 9, [others] * n, computed, computed + 1, [(n, n + 1)] if others > 1 else [],
                  [*range(1, n), n + 1 if others > 1 else n], "one token, drawn at random")  # fmt: skip
        else:
            _case(f, 9, [others] * n, computed, computed + 1, [], [*range(1, n + 2)], "one token, drawn at random")


def _break_crossing(f: Any) -> None:
    _case(f, 8, (2, 2), 6, 11, [(2, 3)], [1, 3, 4], "five tokens, across the end of the shared block")
    _case(f, 8, (3, 3, 3), 4, 14, [(2, 4), (3, 5)], [1, 4, 5, 6], "two shared blocks are written to")
    _case(f, 8, (2, 2), 6, 8, [(2, 3)], [1, 3], "up to the end of the block, not over it")


def _break_refused(f: Any) -> None:
    _case(f, 2, (2, 2), 6, 7, None, [1, 2], "no block for the copy")
    _case(f, 3, (2, 2), 6, 9, None, [1, 2], "one block, where the copy and the next block need two")
    _case(f, 2, (1, 1), 8, 9, None, [1, 2], "no block to grow")
    _case(f, 2, (1, 1), 6, 8, [], [1, 2], "no block is free, and none is needed")


def _break_engine(f: Any) -> None:
    """Three samples of one prompt on a loop of their own; each is given words to say and goes on from there."""
    model, prompt = Transformer.random(TINY), PROMPTS[0][:6]
    said = ([5, 3, 5, 8, 9], [9], [2, 6, 5, 3, 5, 8, 9])
    plain = LLM(model, dtype="float32", num_blocks=32)
    expected = [list(plain.generate([*prompt, *s], SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids) for s in said]
    pool, store = BlockPool(24), PlainKVStore.allocate(model.config, 25 * B, torch.float32)
    runner = ModelRunner(model, store, TorchAttention(), B)

    def compute(ids: Sequence[int], start: int, table: list[int]) -> int:
        copies = f(pool, table, start, start + len(ids), B)
        for source, target in copies:
            slots = (torch.arange(block * B, (block + 1) * B) for block in (source, target))
            copy_slots(store, model.config.num_layers, *slots)
        with torch.inference_mode():
            logits, _ = runner.forward(ForwardBatch.build([Row(list(ids), start, table)], B))
        return int(logits[0].argmax())

    first: list[int] = []
    compute(prompt, 0, first)
    tables = [first, list(first), list(first)]
    pool.acquire(first * 2)
    texts = [[compute(words, len(prompt), table)] for words, table in zip(said, tables)]
    for _ in range(4):
        for words, text, table in zip(said, texts, tables):
            text.append(compute(text[-1:], len(prompt) + len(words) + len(text) - 1, table))
    expect_equal(texts, expected, what="tokens of three samples that share a prompt, and of each alone")


BREAK = Task(
    "4.1 break",
    "Find the write that reaches another's block",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: one more token", _break_by_hand, hint=2),
        NamedCheck("random: one token at a time", _break_random, hint=2),
        NamedCheck("edges: a write across blocks", _break_crossing, hint=1),
        NamedCheck("edges: a pool that is used up", _break_refused, hint=3),
        NamedCheck("engine: three samples that share a prompt", _break_engine, hint=1),
    ),
    (
        "The code grows the table or copies a block. When does a write need both? Think of a sample that is given five tokens\n"
        "at once, in a prompt's last, half full block.",
        "Blocks that are written to: start // block_size up to the block of stop - 1. Those among them that the table has\n"
        "already and somebody else holds need a copy each; those that it lacks are fresh. Both come from one allocate.",
        "shared = [i for i in range(start // block_size, min(len(table), last)) if pool.ref_count(table[i]) > 1], where last =\n"
        "-(-stop // block_size). fresh = pool.allocate(len(shared) + max(0, last - len(table))); None is passed on before\n"
        "anything has changed. A copied block loses this holder: pool.release([source]).",
    ),
    references=(manager.CacheManager,),
)


# 4.1 stretch: a life in blocks ------------------------------------------------------------------------------------------------


def _life(prompt: int, output: int, block_size: int) -> tuple[int, int]:
    lengths = range(prompt, prompt + output)
    return sum(-(-n // block_size) * block_size for n in lengths), sum(lengths)


def _lived(f: Any, prompt: int, output: int, block_size: int, expected: tuple[int, int], what: str = "") -> None:
    expect_equal(tuple(f(prompt, output, block_size)), expected, what=f"{what}held_over_life({prompt}, {output}, {block_size})")


def _stretch_shape(f: Any) -> None:
    got = f(3, 4, 4)
    if not isinstance(got, tuple) or len(got) != 2 or not all(is_whole(n) for n in got):
        raise Mismatch(f"it gives (allocated, live), two whole numbers, got {got!r:.60}")


def _stretch_by_hand(f: Any) -> None:
    _lived(f, 3, 4, 4, (4 + 4 + 8 + 8, 3 + 4 + 5 + 6))
    _lived(f, 5, 1, 4, (8, 5))


def _stretch_random(f: Any) -> None:
    for _ in range(60):
        prompt, output, block = (int(torch.randint(1, high, ())) for high in (60, 60, 20))
        _lived(f, prompt, output, block, _life(prompt, output, block))


def _stretch_edges(f: Any) -> None:
    for prompt, output, block, what in (
        (1, 1, 16, "one token"), (7, 9, 1, "blocks of one token"), (16, 1, 16, "a full block"), (16, 17, 16, "from full to full"),
        (3, 5, 1000, "a block that never fills"), (10**9, 10, 16, "a very long prompt"),
    ):  # fmt: skip
        _lived(f, prompt, output, block, _life(prompt, output, block), f"{what}: ")


def _stretch_engine(f: Any) -> None:
    for block in (1, 4, 16):
        for prompt, output in ((3, 40), (64, 33)):
            steps = occupancy([(prompt, output)], 512, 256, block_size=block)
            held = sum(s.allocated for s in steps), sum(s.live for s in steps)
            _lived(f, prompt, output, block, held, "what the engine's scheduler held: ")


def _lines_run(f: Any, *args: int) -> int:
    """Lines of Python that a call runs."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        f(*args)
    finally:
        sys.settrace(before)
    return count


def _stretch_budget(f: Any) -> None:
    short = _lines_run(f, 37, 60, 16)
    what = f"lines of Python run for an answer of 6,000 tokens; one of 60 tokens took {short}"
    expect_at_most(_lines_run(f, 37, 6000, 16), short + 8, what)


STRETCH = Task(
    "4.1 stretch",
    "What a life in blocks holds, without living it",
    (
        NamedCheck("shape", _stretch_shape, hint=2),
        NamedCheck("exact: four tokens by hand", _stretch_by_hand, hint=2),
        NamedCheck("random: against one step after the other", _stretch_random, hint=3),
        NamedCheck("edges: one token, blocks of one, full blocks", _stretch_edges, hint=3),
        NamedCheck("engine: what the engine's scheduler holds", _stretch_engine, hint=2),
        NamedCheck("budget: work that does not grow with the answer", _stretch_budget, hint=3),
    ),
    (
        "Live tokens are an arithmetic series. Blocks are one too, in groups: the lengths 1 to B hold one block, the next B\n"
        "hold two, and so on. Sum from the first token on, and take off what was before the prompt.",
        "Steps: output of them, with prompt, prompt + 1 … prompt + output - 1 tokens. (allocated, live), both in tokens, summed\n"
        "over these steps.",
        "blocks(n) = sum of -(-k // B) for k = 1 … n: with q, r = divmod(n, B) it is B * q * (q + 1) // 2 + r * (q + 1).\n"
        "allocated = B * (blocks(prompt + output - 1) - blocks(prompt - 1)); live = output * (2 * prompt + output - 1) // 2.",
    ),
    references=(_life, occupancy),
)

TASKS = (CORE, BREAK, STRETCH)
