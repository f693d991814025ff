"""Block tables: gives requests the slots they need and takes them back. The only caller of the pool and the prefix cache."""

from __future__ import annotations

import contextlib
from typing import Iterable

from minillm.cache.block_pool import BlockPool
from minillm.cache.prefix import PrefixCache
from minillm.cache.snapshot import CacheSnapshot
from minillm.cache.tiered import Found, TieredCache
from minillm.engine.request import Request


class CacheManager:
    """Allocation over one pool. ``request.blocks[i]`` holds positions i * block_size … (i + 1) * block_size - 1."""

    def __init__(self, pool: BlockPool, prefix: PrefixCache, block_size: int):
        self.pool = pool
        self.prefix = prefix
        self.block_size = block_size
        self.tiers = prefix if isinstance(prefix, TieredCache) else None

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

    def cached_tokens(self, request: Request) -> int:
        """Tokens that match would spare a request without KV; asking changes nothing where the cache can peek."""
        ids = request.token_ids[: request.num_tokens - 1]
        peek = getattr(self.prefix, "peek", None)
        blocks = peek(ids) if peek else len(self.prefix.match(ids))
        return min(blocks, len(ids) // self.block_size) * self.block_size

    def admit(self, request: Request, n: int) -> tuple[int, int] | None:
        """Give a request without KV its cached prefix, from the pool and from the tiers below, and slots for n tokens more.

        Returns the tokens of the prefix, whose KV is there, and those that have slots, n or what is left; None, with nothing
        changed, when the pool cannot give the slots. What cannot be loaded is left to compute.
        """
        matched = self.match(request)
        limit = (request.num_tokens - 1) // self.block_size
        while True:
            found = self.tiers.find(request.token_ids, len(matched), limit) if self.tiers else Found()
            hit = (len(matched) + len(found)) * self.block_size
            n = min(n, request.num_tokens - hit)
            with self.tiers.pending(found) if self.tiers and found else contextlib.nullcontext():
                if self.allocate(request, hit + n, matched) is None:
                    return None
                loaded = self._load(request, found, len(matched))
            if loaded == len(found):
                request.num_loaded_tokens = loaded * self.block_size
                return hit, n
            limit = len(matched) + loaded  # once more, with what could be read

    def _load(self, request: Request, found: Found, num_matched: int) -> int:
        """Blocks loaded: all that were found, or fewer and then the request has no blocks again."""
        loaded = 0
        if self.tiers is None or not found:
            return loaded
        try:
            loaded = self.tiers.load(found, request.blocks[num_matched : num_matched + len(found)])
        finally:
            if loaded < len(found):
                blocks, request.blocks = request.blocks, []
                self.pool.release(blocks, keep=[b for b in blocks if self.prefix.holds(b)])
        return loaded

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

    def offer_prompt(self, request: Request) -> list[int]:
        """Let others find the full blocks of a computed prompt while its request still runs; once, until it loses its KV.

        Where the cache keeps another copy of a block, the request moves to that one and gives its own up: what a request holds
        is then held from the beginning of the prefix on. Returns what it gave up, for ``release`` once no step reads it.
        """
        full = min(request.num_computed_tokens, request.prompt_len) // self.block_size
        if request.prompt_offered or not full:
            return []
        request.prompt_offered = True
        ids = request.token_ids[: full * self.block_size]
        self.prefix.insert(ids, request.blocks[:full])
        spare = []
        for i, kept in enumerate(list(self.prefix.match(ids))[:full]):
            mine = request.blocks[i]
            if kept != mine:
                self.pool.acquire([kept])
                request.blocks[i] = kept
                spare.append(mine)
        return spare

    def release(self, blocks: list[int]) -> None:
        """Drop one reference on blocks that are in nobody's table any more."""
        keep: list[int] = []
        try:
            keep = [b for b in blocks if self.prefix.holds(b)]
        finally:
            self.pool.release(blocks, keep=keep)

    def snapshot(self, requests: Iterable[Request] = ()) -> CacheSnapshot:
        """Who holds which block now. requests: those whose tables are wanted."""
        pool, tree = self.pool, getattr(self.prefix, "tree", None)
        requests = list(requests)
        return CacheSnapshot(
            block_size=self.block_size, num_blocks=pool.num_blocks,
            tables={r.request_id: tuple(r.blocks) for r in requests},
            computed={r.request_id: r.num_computed_tokens for r in requests},
            ref_counts=tuple(pool.ref_count(b) for b in range(pool.num_blocks + 1)),
            free=pool.free_blocks, cached=pool.cached_blocks,
            tree=tree(lambda b: pool.ref_count(b) > 0) if tree else None,
        )  # fmt: skip

    def free(self, request: Request) -> None:
        """Take all blocks back. Full blocks of computed tokens are offered to the prefix cache first."""
        blocks, request.blocks = request.blocks, []
        request.prompt_offered = False
        keep: list[int] = []
        try:
            full = request.num_computed_tokens // self.block_size
            if full:
                self.prefix.insert(request.token_ids[: full * self.block_size], blocks[:full])
            keep = [b for b in blocks if self.prefix.holds(b)]
        finally:  # a prefix cache that raises costs its prefix, not the blocks
            self.pool.release(blocks, keep=keep)
