"""Exercise 1.2: a prefix cache of one's own, names of blocks that forget what came before, and the order of eviction."""

from __future__ import annotations

import functools
import random
from typing import Any, Callable, Iterator, Sequence

from minillm import LLM, SamplingParams
from minillm.cache.prefix import HashPrefixCache
from minillm.cache.radix import RadixPrefixCache
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_1_1 import TINY
from minillm.model.transformer import Transformer

B = 4
SHARED = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = (
    [*SHARED, 5, 3, 5], [*SHARED, 5, 3, 5, 8, 9, 7], [*SHARED, 5, 3, 9, 9], SHARED[:3], SHARED, [2, 7, *SHARED],
    [*SHARED, 5, 3, 5], [9] * 13, [*SHARED, 5, 3, 5, 8, 9, 7], [2, 7, *SHARED], [9] * 13,
)  # fmt: skip
COLLIDING = 2**61 - 1
"""Python's hash of this number is 0, and so is the hash of 0."""


class Token(int):
    """A token id that counts how often any of its kind is hashed: what it costs to name or look up a prompt."""

    hashed = 0

    def __hash__(self) -> int:
        Token.hashed += 1
        return int.__hash__(self)


class Prefixes:
    """The oracle: every kept prefix spelled out, whole blocks only."""

    def __init__(self, size: int) -> None:
        self.size, self.block_of = size, dict[tuple[int, ...], int]()

    def match(self, ids: Sequence[int]) -> list[int]:
        found = []
        for end in range(self.size, len(ids) + 1, self.size):
            if tuple(ids[:end]) not in self.block_of:
                break
            found.append(self.block_of[tuple(ids[:end])])
        return found

    def insert(self, ids: Sequence[int], blocks: Sequence[int]) -> None:
        for i, block in enumerate(blocks):
            self.block_of.setdefault(tuple(ids[: (i + 1) * self.size]), block)

    def holds(self, block: int) -> bool:
        return block in self.block_of.values()

    def forget(self, gone: Sequence[int]) -> None:
        self.block_of = {prefix: block for prefix, block in self.block_of.items() if block not in gone}

    def possible(self, evictable: Callable[[int], bool]) -> int:
        """How many blocks can go when none may go before what follows it."""
        stay = [prefix for prefix, block in self.block_of.items() if not evictable(block)]
        return sum(not any(p[: len(prefix)] == prefix for p in stay) for prefix in self.block_of)

    def orphans(self) -> list[int]:
        """Blocks whose beginning is gone: they take room and cannot be found."""
        return [b for p, b in self.block_of.items() if len(p) > self.size and p[: -self.size] not in self.block_of]


def always(block: int) -> bool:
    return True


def outside(in_use: Sequence[int]) -> Callable[[int], bool]:
    return lambda block: block not in in_use


def answers(
    cache: Any, num_blocks: int, prompts: Sequence[Sequence[int]] = PROMPTS
) -> tuple[list[tuple[int, ...]], list[int], Any]:
    """Greedy tokens of prompts that are sent one after the other, the cached tokens of each, and the engine."""
    llm = LLM(Transformer.random(TINY), dtype="float32", block_size=B, num_blocks=num_blocks, prefix_cache=cache)
    outs = [llm.generate(list(p), SamplingParams(max_tokens=6, ignore_eos=True))[0] for p in prompts]
    llm.engine.cache.pool.check()
    return [o.token_ids for o in outs], [o.num_cached_tokens for o in outs], llm.engine


@functools.cache
def ours(kind: str, num_blocks: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Tokens and hits of PROMPTS with a cache of the engine's own, or with none."""
    return answers(kind, num_blocks)[:2]


def _prompt(n: int, values: int = 2) -> list[int]:
    return [random.randrange(values) for _ in range(n)]


# 1.2 core: a prefix cache -----------------------------------------------------------------------------------------------------


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
            ids = _prompt(random.randrange(14))
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
    ids = [Token(t) for t in _prompt(n, 50_000)]
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


# 1.2 break: names of blocks ---------------------------------------------------------------------------------------------------


class Named:
    """A prefix cache that believes in names: a table from names to blocks, and nothing else is compared."""

    def __init__(self, names: Callable[[Sequence[int], int], Sequence[Any]], size: int = B) -> None:
        self.names, self.size = names, size
        self.block_of: dict[Any, int] = {}

    def match(self, ids: Sequence[int]) -> list[int]:
        found = []
        for name in self.names(list(ids), self.size):
            if name not in self.block_of:
                break
            found.append(self.block_of[name])
        return found

    def insert(self, ids: Sequence[int], blocks: Sequence[int]) -> None:
        for name, block in zip(self.names(list(ids), self.size), blocks, strict=True):
            self.block_of.setdefault(name, block)

    def holds(self, block: int) -> bool:
        return block in self.block_of.values()

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        gone = [b for b in reversed(self.block_of.values()) if evictable(b)][:n]
        self.block_of = {name: b for name, b in self.block_of.items() if b not in gone}
        return gone


def _compare_names(f: Any, a: list[int], b: list[int], size: int = B) -> None:
    """Names agree exactly as far as whole blocks from the beginning do."""
    common = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b))) // size
    left, right = list(f(list(a), size)), list(f(list(b), size))
    for i, (x, y) in enumerate(zip(left, right)):
        if (x == y) != (i < common):
            said = "has the same name in both" if x == y else "has two names"
            raise Mismatch(f"block {i} of {a} and {b}, blocks of {size}: it {said}, and {common} blocks begin alike")


def _names_shape(f: Any) -> None:
    for n in (0, 1, B - 1, B, B + 1, 3 * B):
        expect_equal(len(f(list(range(n)), B)), n // B, what=f"names of {n} tokens, blocks of {B}")
    hash(tuple(f(list(range(9)), B)))


def _names_exact(f: Any) -> None:
    _compare_names(f, [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], 2)
    _compare_names(f, [1, 2, 3, 4], [1, 2, 3, 9], 2)


def _names_random(f: Any) -> None:
    for _ in range(30):
        shared = _prompt(random.randrange(14), 1000)
        _compare_names(f, shared + _prompt(9, 1000), shared + _prompt(9, 1000), random.randint(1, 4))


def _names_beginning(f: Any) -> None:
    _compare_names(f, [1, 1, 5, 6], [2, 1, 5, 6], 2)


def _names_far(f: Any) -> None:
    same = [5, 6, 7, 8, 9, 10, 11, 12]
    _compare_names(f, [1, 1, *same], [2, 1, *same], 2)
    _compare_names(f, [3, 3, 1, 1, *same], [3, 3, 2, 1, *same], 2)


def _names_order(f: Any) -> None:
    _compare_names(f, [1, 2, 3, 4, 9, 9], [3, 4, 1, 2, 9, 9], 2)
    _compare_names(f, [5, 5, 5, 5, 7, 7], [6, 6, 6, 6, 7, 7], 2)


def _names_cut(f: Any) -> None:
    _compare_names(f, [1, 12, 3, 4], [11, 2, 3, 4], 2)
    _compare_names(f, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], 3)


def _names_state(f: Any) -> None:
    ids = list(range(9))
    with unchanged(token_ids=ids):
        first = list(f(ids, B))
    expect_equal(list(f(ids, B)), first, what="names of the same prompt, a second time")


def _names_engine(f: Any) -> None:
    middle = [8, 2, 8, 1, 8, 2, 8, 4]
    prompts = [[first, 1, 1, 1, *middle, 7] for first in (5, 6, 5, 9)]
    cold, _, _ = answers("none", 64, prompts)
    got, hits, _ = answers(Named(f), 64, prompts)
    expect_equal(got, cold, what="tokens of four prompts with the same middle, on your names")
    expect_equal(hits, [0, 0, 12, 0], what="cached tokens of the four prompts")


def _names_budget(f: Any) -> None:
    ids = [Token(t) for t in _prompt(2048, 50_000)]
    Token.hashed = 0
    hash(tuple(f(ids, 16)))
    expect_at_most(Token.hashed, 4 * len(ids), f"tokens hashed to name and look up the blocks of {len(ids)} tokens")


BREAK = Task(
    "1.2 break",
    "Find out why two guests get each other's answers",
    (
        NamedCheck("shape: one name a full block", _names_shape, hint=2),
        NamedCheck("exact: two pairs by hand", _names_exact, hint=1),
        NamedCheck("random: prompts that begin alike and go on differently", _names_random, hint=2),
        NamedCheck("edges: the same block behind another beginning", _names_beginning, hint=1),
        NamedCheck("edges: the difference is several blocks back", _names_far, hint=3),
        NamedCheck("edges: the same blocks in another order", _names_order, hint=3),
        NamedCheck("edges: tokens that look alike when written side by side", _names_cut, hint=2),
        NamedCheck("state: inputs unchanged, the same names again", _names_state),
        NamedCheck("engine: four prompts with the same middle", _names_engine, hint=1),
        NamedCheck("budget: tokens hashed for a long prompt", _names_budget, hint=3),
    ),
    (
        "A block's keys and values depend on every token before it. What does the shipped name of a block depend on?\n"
        "Write two prompts that differ in their first token and agree in the second block, and look at the second names.",
        "One hashable name for each full block. name[i] must differ whenever any token of blocks 0 … i differs, wherever it is,\n"
        "and be equal when all of them are equal.",
        "Carry the name of the block before: name = hash((name, tuple(tokens of this block))), starting from None.\n"
        "Naming each block by all tokens so far is right too, and costs the square of the prompt's length.",
    ),
    references=(HashPrefixCache, RadixPrefixCache, Prefixes),
)


# 1.2 stretch: the order of eviction -------------------------------------------------------------------------------------------


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

TASKS = (CORE, BREAK, STRETCH)
