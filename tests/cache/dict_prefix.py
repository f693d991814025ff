"""A prefix cache as small as one can be: a dictionary from whole prefixes to blocks. It relies on what the seam promises."""

from __future__ import annotations

from typing import Callable, Sequence


class DictPrefixCache:
    """Every full block is known by all tokens up to its end."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.block_of: dict[tuple[int, ...], int] = {}
        self.prefix_of: dict[int, tuple[int, ...]] = {}
        self.evicted: list[int] = []

    def match(self, token_ids: Sequence[int]) -> list[int]:
        blocks = []
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            block = self.block_of.get(tuple(token_ids[:end]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        assert len(token_ids) == len(blocks) * self.block_size, "only full blocks are offered"
        for i, block in enumerate(blocks):
            prefix = tuple(token_ids[: (i + 1) * self.block_size])
            if prefix not in self.block_of:  # a second copy of the same tokens is not kept
                self.block_of[prefix], self.prefix_of[block] = block, prefix

    def holds(self, block: int) -> bool:
        return block in self.prefix_of

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        longest_first = sorted(self.prefix_of, key=lambda b: -len(self.prefix_of[b]))  # what extends a prefix goes before it
        gone = [b for b in longest_first if evictable(b)][:n]
        for block in gone:
            del self.block_of[self.prefix_of.pop(block)]
        self.evicted += gone
        return gone
