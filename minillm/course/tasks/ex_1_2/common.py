"""Prompts, an oracle and a cache that believes in names, for the tasks of exercise 1.2."""

from __future__ import annotations

import functools
import random
from typing import Any, Callable, Sequence

from minillm import LLM, SamplingParams
from minillm.course.tasks.ex_1_1.common import TINY
from minillm.model.transformer import Transformer

B = 4
SHARED = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = (
    [*SHARED, 5, 3, 5], [*SHARED, 5, 3, 5, 8, 9, 7], [*SHARED, 5, 3, 9, 9], SHARED[:3], SHARED, [2, 7, *SHARED],
    [*SHARED, 5, 3, 5], [9] * 13, [*SHARED, 5, 3, 5, 8, 9, 7], [2, 7, *SHARED], [9] * 13,
)  # fmt: skip


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


def random_prompt(n: int, values: int = 2) -> list[int]:
    return [random.randrange(values) for _ in range(n)]


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
