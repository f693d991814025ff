"""Block tables: gives requests the slots they need and takes them back. The only caller of the pool and the prefix cache."""

from __future__ import annotations

from minillm.cache.block_pool import BlockPool
from minillm.cache.prefix import PrefixCache
from minillm.engine.request import Request


class CacheManager:
    """Allocation over one pool. ``request.blocks[i]`` holds positions i * block_size … (i + 1) * block_size - 1."""

    def __init__(self, pool: BlockPool, prefix: PrefixCache, block_size: int):
        self.pool = pool
        self.prefix = prefix
        self.block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def capacity(self) -> int:
        """Tokens that fit when one request has the whole pool."""
        return self.pool.num_blocks * self.block_size

    def match(self, request: Request) -> list[int]:
        """Cached blocks for a request without KV. One token is always left to compute: its logits are needed."""
        blocks = list(self.prefix.match(request.token_ids[: request.num_tokens - 1]))
        return blocks[: (request.num_tokens - 1) // self.block_size]

    def allocate(self, request: Request, num_tokens: int, matched: list[int] | None = None) -> list[int] | None:
        """Let the request hold KV for num_tokens tokens; matched blocks come first in the table of a request that has none.

        Returns the fresh blocks, or None with nothing changed when the pool cannot give them.
        """
        matched = matched or []
        need = self.blocks_for(num_tokens) - len(request.blocks) - len(matched)
        if need <= 0:
            fresh: list[int] | None = []
        else:
            self._make_room(need, protected=set(matched))
            fresh = self.pool.allocate(need)
        if fresh is None:
            return None
        self.pool.acquire(matched)
        request.blocks.extend(matched + fresh)
        return fresh

    def _make_room(self, need: int, protected: set[int]) -> None:
        missing = need - self.pool.num_free
        cached = self.pool.num_cached - sum(self.pool.ref_count(b) == 0 for b in protected)
        if 0 < missing <= cached:
            self.pool.uncache(self.prefix.evict(missing, lambda b: self.pool.ref_count(b) == 0 and b not in protected))

    def free(self, request: Request) -> None:
        """Take all blocks back. Full blocks of computed tokens are offered to the prefix cache first."""
        blocks, request.blocks = request.blocks, []
        keep: list[int] = []
        try:
            full = request.num_computed_tokens // self.block_size
            if full:
                self.prefix.insert(request.token_ids[: full * self.block_size], blocks[:full])
            keep = [b for b in blocks if self.prefix.holds(b)]
        finally:  # a prefix cache that raises costs its prefix, not the blocks
            self.pool.release(blocks, keep=keep)
