"""Blocks of KV slots: who holds them, and which are free."""

from __future__ import annotations

from collections import deque
from typing import Iterable

import numpy as np

NULL_BLOCK = 0
"""Block 0 belongs to no request: padding rows write there, and nobody reads it."""


class BlockPool:
    """Reference counts and a free list over blocks 1 … num_blocks (Kwon et al. 2023, arXiv 2309.06180).

    A block is free, referenced by at least one request, or cached (kept by a prefix cache, referenced by nobody):
    ``num_free + num_referenced + num_cached == num_blocks`` at all times.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._refs = [0] * (num_blocks + 1)
        self._cached: set[int] = set()
        self._total_refs = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_shared(self) -> int:
        """References beyond the first of each block: what sharing saves."""
        return self._total_refs - self.num_referenced

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """In the order in which they will be handed out."""
        return tuple(self._free)

    @property
    def cached_blocks(self) -> tuple[int, ...]:
        return tuple(sorted(self._cached))

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def allocate(self, n: int, side_by_side: bool = False) -> list[int] | None:
        """n fresh blocks, each with one reference; None, and nothing changed, when fewer are free.

        side_by_side: consecutive blocks, from the first gap that is wide enough; None also when no gap is.
        """
        if n > len(self._free):
            return None
        blocks = self._take_gap(n) if side_by_side and n else [self._free.popleft() for _ in range(n)]
        if blocks is None:
            return None
        for block in blocks:
            self._refs[block] = 1
        self._total_refs += n
        return blocks

    def _take_gap(self, n: int) -> list[int] | None:
        free = np.sort(np.fromiter(self._free, dtype=np.int64))
        starts = np.flatnonzero(free[n - 1 :] - free[: len(free) - n + 1] == n - 1)
        if not len(starts):
            return None
        first = int(free[starts[0]])
        self._free = deque(b for b in self._free if not first <= b < first + n)
        return list(range(first, first + n))

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference on blocks that are referenced or cached already; RuntimeError, and nothing changed, for others."""
        blocks = list(blocks)
        for block in blocks:
            if block not in self._cached and not (block in range(1, self.num_blocks + 1) and self._refs[block]):
                raise RuntimeError(f"block {block!r} is neither referenced nor cached: it holds nothing to share")
        for block in blocks:
            if self._refs[block] == 0:
                self._cached.remove(block)
            self._refs[block] += 1
            self._total_refs += 1

    def release(self, blocks: Iterable[int], keep: Iterable[int] = ()) -> list[int]:
        """Drop one reference each, tail first, so that a prefix outlives what follows it. Unreferenced blocks become
        cached where ``keep`` names them and free otherwise; the freed ones are returned."""
        kept, freed = set(keep), []
        for block in reversed(list(blocks)):
            if self._refs[block] < 1:
                raise RuntimeError(f"block {block} was released more often than it was acquired")
            self._refs[block] -= 1
            self._total_refs -= 1
            if self._refs[block] == 0:
                if block in kept:
                    self._cached.add(block)
                else:
                    self._free.append(block)
                    freed.append(block)
        return freed

    def uncache(self, blocks: Iterable[int]) -> None:
        """Cached, unreferenced blocks become free: a prefix cache evicted them. RuntimeError, and nothing changed, for others."""
        blocks = list(blocks)
        if len(set(blocks)) < len(blocks) or not self._cached.issuperset(blocks):
            raise RuntimeError(f"a prefix cache evicted {blocks}: each must be cached, referenced by nobody, and named once")
        for block in blocks:
            self._cached.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Raise RuntimeError unless every block is in exactly one place."""
        free = list(self._free)
        referenced = [b for b in range(1, self.num_blocks + 1) if self._refs[b] > 0]
        places = sorted(free + referenced + list(self._cached))
        if places != list(range(1, self.num_blocks + 1)):
            raise RuntimeError(
                f"{len(free)} free + {len(referenced)} referenced + {len(self._cached)} cached != {self.num_blocks} blocks"
            )
        if self._total_refs != sum(self._refs):
            raise RuntimeError(f"{sum(self._refs)} references on blocks, {self._total_refs} counted")
