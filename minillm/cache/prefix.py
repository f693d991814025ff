"""The seam for prefix caches: who remembers which blocks hold which tokens."""

from __future__ import annotations

from typing import Callable, Protocol, Sequence


class PrefixCache(Protocol):
    """Maps token prefixes to blocks whose KV is already computed. It never touches reference counts: CacheManager does."""

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix of token_ids, whole blocks only, in order."""
        ...

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Offer the blocks of final tokens; blocks[i] holds token_ids[i * block_size : (i + 1) * block_size], all full."""
        ...

    def holds(self, block: int) -> bool:
        """Whether the cache wants to keep this block when nobody references it."""
        ...

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        """Forget at least n blocks for which evictable(block) is true, fewer only if there are no more; return them."""
        ...


class NoPrefixCache:
    """The plain implementation: remembers nothing."""

    def match(self, token_ids: Sequence[int]) -> list[int]:
        return []

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        return None

    def holds(self, block: int) -> bool:
        return False

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        return []
