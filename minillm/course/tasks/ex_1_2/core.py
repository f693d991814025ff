"""1.2 core: write a prefix cache that finds, keeps and evicts blocks."""

from __future__ import annotations

import random
from typing import Any, Sequence

from minillm.cache.prefix import HashPrefixCache
from minillm.cache.radix import RadixPrefixCache
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_1_2.common import SHARED, B, Prefixes, Token, always, answers, ours, outside, random_prompt

COLLIDING = 2**61 - 1
"""Python's hash of this number is 0, and so is the hash of 0."""


def _cache_shapes(cache: Any) -> None:
    c = cache(B)
    expect_equal(c.match([]), [], what="match([]) of a new cache")
    expect_equal(c.match([1, 2, 3, 4, 5]), [], what="match(...) of a new cache")
    expect_equal(c.holds(1), False, what="holds(1) of a new cache")
    expect_equal(c.evict(2, always), [], what="evict(2, ...) of a new cache")
    c.insert([], [])
    c.insert(list(range(B)), [3])
    expect_equal(c.match(list(range(B))), [3], what="match of an inserted block")
    expect_equal(c.holds(3), True, what="holds of an inserted block")


def _cache_by_hand(cache: Any) -> None:
    c = cache(2)
    c.insert([1, 2, 3, 4], [7, 9])
    for ids, found in (([1, 2, 3, 4, 5], [7, 9]), ([1, 2, 3], [7]), ([1, 2, 8, 4], [7]), ([3, 4], []), ([1, 2, 3, 4], [7, 9])):
        expect_equal(c.match(ids), found, what=f"match({ids})")
    c.insert([1, 2, 5, 6], [7, 4])
    expect_equal(c.match([1, 2, 5, 6]), [7, 4], what="match([1, 2, 5, 6]) after a second prompt")
    expect_equal(c.match([1, 2, 3, 4]), [7, 9], what="match([1, 2, 3, 4]) after a second prompt")


def _cache_default(cache: Any) -> None:
    c = cache()
    c.insert(list(range(32)), [1, 2])
    expect_equal(c.match(list(range(31))), [1], what="match of 31 tokens, blocks of 16 where nothing else is said")


def _cache_random(cache: Any) -> None:
    for _ in range(12):
        size = random.randint(1, 4)
        c, truth, fresh = cache(size), Prefixes(size), iter(range(1, 9999))
        for _ in range(25):
            ids = random_prompt(random.randrange(14))
            expect_equal(c.match(list(ids)), truth.match(ids), what=f"match({ids}), blocks of {size}")
            if random.random() < 0.25:
                in_use = random.sample(range(1, 30), 8)
                _evict(c, truth, random.randrange(5), in_use)
                continue
            known = truth.match(ids)
            whole = len(ids) // size
            blocks = [*known, *(next(fresh) for _ in range(whole - len(known)))]
            c.insert(ids[: whole * size], list(blocks))
            truth.insert(ids[: whole * size], blocks)


def _evict(c: Any, truth: Prefixes, n: int, in_use: Sequence[int]) -> None:
    possible = truth.possible(outside(in_use))
    gone = c.evict(n, outside(in_use))
    if not isinstance(gone, list):
        raise Mismatch(f"evict gives the list of blocks that it forgot, got {type(gone).__name__}")
    bad = [b for b in gone if b in in_use or not truth.holds(b)]
    if bad or len(set(gone)) < len(gone):
        raise Mismatch(f"evict({n}, ...) gave {gone}: {'blocks in use or not kept: ' + str(bad) if bad else 'a block twice'}")
    if len(gone) < min(n, possible):
        raise Mismatch(f"evict({n}, ...) forgot {len(gone)} blocks, {possible} could go")
    truth.forget(gone)
    if truth.orphans():
        raise Mismatch(f"after evict({n}, ...) gave {gone}, block {truth.orphans()[0]} is kept but its beginning is gone")
    for block in gone:
        expect_equal(c.holds(block), False, what=f"holds({block}) after it was evicted")


def _cache_short(cache: Any) -> None:
    c = cache(B)
    c.insert(SHARED, [1, 2])
    for n in range(len(SHARED) + 3):
        ids = [*SHARED, 8, 8][:n]
        expect_equal(c.match(ids), [1, 2][: min(n, 8) // B], what=f"match of the first {n} tokens, blocks of {B}")


def _cache_parts(cache: Any) -> None:
    c = cache(B)
    c.insert(SHARED, [1, 2])
    other = [*SHARED[:6], 7, 7]
    expect_equal(c.match(other), [1], what="a prompt that parts inside the second block")
    c.insert(other, [1, 5])
    expect_equal((c.match(other), c.match(SHARED)), ([1, 5], [1, 2]), what="both prompts, once both are kept")


def _cache_beginning(cache: Any) -> None:
    c = cache(B)
    c.insert(SHARED, [1, 2])
    expect_equal(c.match([0, 0, 0, 0, *SHARED[4:]]), [], what="the second block's tokens behind another beginning")
    expect_equal(c.match(SHARED[4:]), [], what="the second block's tokens at the beginning")


def _cache_copy(cache: Any) -> None:
    c = cache(B)
    c.insert(SHARED, [1, 2])
    c.insert(SHARED, [8, 9])
    expect_equal(c.match(SHARED), [1, 2], what="match after a second copy was offered")
    expect_equal((c.holds(8), c.holds(9)), (False, False), what="holds of the second copy's blocks: nobody can find them")


def _cache_collision(cache: Any) -> None:
    c = cache(2)
    c.insert([0, 5, 6, 7], [1, 2])
    expect_equal(c.match([COLLIDING, 5, 6, 7]), [], what=f"another first token, {COLLIDING}, with the same hash")
    expect_equal(c.match([0, 5, 6, 7]), [1, 2], what="the prompt that was inserted")


def _cache_again(cache: Any) -> None:
    c = cache(B)
    c.insert(SHARED, [1, 2])
    expect_equal(c.evict(1, always)[:1], [2], what="evict(1, ...): the end goes first")
    c.insert([9] * B, [2])
    expect_equal(c.match(SHARED), [1][: len(c.match(SHARED))], what="a prompt whose second block now holds other tokens")
    expect_equal(c.match([9] * B), [2], what="what the block holds now")


def _cache_inputs(cache: Any) -> None:
    c = cache(B)
    ids, blocks, wanted = list(SHARED), [1, 2], [*SHARED, 4]
    with unchanged(token_ids=ids, blocks=blocks):
        c.insert(ids, blocks)
    with unchanged(token_ids=wanted):
        found = c.match(wanted)
    found.append(99)
    ids[0] = blocks[0] = 77
    expect_equal(c.match(wanted), [1, 2], what="match after the caller changed its own lists")


def _cache_apart(cache: Any) -> None:
    a, b = cache(B), cache(B)
    a.insert(SHARED, [1, 2])
    expect_equal((b.match(SHARED), b.holds(1)), ([], False), what="another cache")


def _cache_in_use(cache: Any) -> None:
    c, truth = cache(B), Prefixes(B)
    for ids, blocks in ((SHARED, [1, 2]), ([*SHARED[:4], 9, 9, 9, 9], [1, 3]), ([7] * 4, [4])):
        c.insert(ids, blocks)
        truth.insert(ids, blocks)
    for n, in_use in ((1, [1, 2]), (2, [1]), (0, []), (9, [])):
        _evict(c, truth, n, in_use)


def _cache_engine(cache: Any) -> None:
    (cold, _), (_, found) = ours("none", 64), ours("radix", 64)
    got, hits, _ = answers(cache(B), 64)
    expect_equal(got, cold, what="tokens of the prompts, room for all")
    expect_equal(hits, found, what="cached tokens of the prompts, room for all")


def _cache_small_pool(cache: Any) -> None:
    cold, _ = ours("none", 64)
    got, hits, engine = answers(cache(B), 7)
    expect_equal(got, cold, what="tokens of the prompts, a pool of 7 blocks")
    held = sum(bool(engine.cache.prefix.holds(b)) for b in range(1, 8))
    expect_equal(held, engine.cache.pool.num_cached, what="blocks that the cache holds when nothing runs")
    if not sum(hits):
        raise Mismatch("no prompt found anything in a pool of 7 blocks")


def _cache_budget(cache: Any) -> None:
    c, n = cache(16), 1024
    ids = [Token(t) for t in random_prompt(n, 50_000)]
    Token.hashed = 0
    c.insert(ids, list(range(1, 1 + n // 16)))
    expect_at_most(Token.hashed, 6 * n, f"tokens hashed to insert {n} tokens")
    Token.hashed = 0
    expect_equal(len(c.match(ids)), n // 16, what=f"blocks found of {n} tokens")
    expect_at_most(Token.hashed, 4 * n, f"tokens hashed to look up {n} tokens")


CORE = Task(
    "1.2 core",
    "Write a prefix cache",
    (
        NamedCheck("shape: an empty cache and one block", _cache_shapes, hint=2),
        NamedCheck("exact: two prompts by hand", _cache_by_hand, hint=1),
        NamedCheck("exact: blocks of 16 where nothing else is said", _cache_default, hint=2),
        NamedCheck("random: against all prefixes spelled out", _cache_random, hint=3),
        NamedCheck("edges: prompts of every length up to two blocks", _cache_short, hint=1),
        NamedCheck("edges: two prompts part inside a block", _cache_parts, hint=1),
        NamedCheck("edges: the same block behind another beginning", _cache_beginning, hint=1),
        NamedCheck("edges: a second copy is offered", _cache_copy, hint=2),
        NamedCheck("edges: tokens whose hashes collide", _cache_collision, hint=1),
        NamedCheck("edges: a block comes back with other tokens", _cache_again, hint=3),
        NamedCheck("state: nothing is shared with the caller", _cache_inputs, hint=3),
        NamedCheck("state: two caches are apart", _cache_apart, hint=3),
        NamedCheck("state: what is in use stays, and what it stands on", _cache_in_use, hint=3),
        NamedCheck("engine: the same tokens as cold, the same hits as the tree", _cache_engine, hint=3),
        NamedCheck("engine: a pool of seven blocks", _cache_small_pool, hint=3),
        NamedCheck("budget: tokens hashed for a long prompt", _cache_budget, hint=1),
    ),
    (
        "Keep a tree of blocks: below each block, what follows it, by the tokens of the next block. Matching is walking down. A\n"
        "dictionary compares its keys when their hashes agree, so tuples of tokens as keys cannot be mistaken for others.",
        "Children: a dictionary {tokens of a block: (its number, its own children)}, and one for the beginning. Beside it, for\n"
        "holds and evict, where each kept block is. What is known already keeps its block; the offered copy is not kept.",
        "match: children = the beginning's; for each whole block: stop if its tokens are not there, collect the number, go\n"
        "down. insert: the same walk, adding what is missing. evict: a dictionary remembers the order of insertion, and what\n"
        "follows a block came after it: walk it backwards, take what has no children and is evictable, until n are gone.",
    ),
    Seam("prefix_cache", "prefix cache", lambda cls: {"prefix_cache": cls()}),
    (HashPrefixCache, RadixPrefixCache, Prefixes),
)
