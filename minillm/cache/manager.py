"""Block tables: gives requests the slots they need and takes them back. The only caller of the pool and the prefix cache."""

from __future__ import annotations

import contextlib
import logging
from typing import Callable, Iterable, Sequence

from minillm.attention.window import Window
from minillm.cache.block_pool import NULL_BLOCK, BlockPool
from minillm.cache.copies import Copies
from minillm.cache.prefix import NoPrefixCache, PrefixCache
from minillm.cache.snapshot import CacheSnapshot
from minillm.cache.tiered import Found, TieredCache
from minillm.engine.request import Request, Status

log = logging.getLogger("minillm")
DENSE = Window()
Reservation = Callable[[Request], int]
"""Tokens that a request is given room for when it is admitted."""


def reservation(strips: str | None, max_model_len: int) -> Reservation | None:
    """How long a request's strip is; None where it gets single blocks, as it grows."""
    if strips == "reserve":
        return lambda request: max_model_len
    if strips == "exact":
        return lambda request: request.prompt_len + request.max_tokens - 1  # the last token is sampled, never computed
    return None


class CacheManager:
    """Allocation over one pool. ``request.blocks[i]`` holds positions i * block_size … (i + 1) * block_size - 1, or is the null
    block where no later query sees them.

    window: what a query sees. reserve: tokens that a request is given room for at its admission, side by side and for good; None
    gives it blocks as it grows, and takes back those that the window has left behind.
    """

    def __init__(
        self, pool: BlockPool, prefix: PrefixCache, block_size: int,
        window: Window = DENSE, reserve: Reservation | None = None,
    ):  # fmt: skip
        self.pool = pool
        self.prefix = prefix
        self.block_size = block_size
        self.tiers = prefix if isinstance(prefix, TieredCache) else None
        self.window = window
        self.reserve = reserve
        self.copies = Copies(pool, self.release)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def most_slots(self, num_tokens: int, chunk: int) -> int:
        """Slots that a request of so many tokens, up to ``chunk`` computed in a step, holds at most."""
        if self.reserve is not None:
            return num_tokens
        return min(num_tokens, self.window.most_blocks(num_tokens, chunk, self.block_size) * self.block_size)

    @property
    def capacity(self) -> int:
        """Tokens that fit when one request has the whole pool."""
        return self.pool.num_blocks * self.block_size

    def match(self, request: Request) -> list[int]:
        """Cached blocks for a request without KV. One token is always left to compute: its logits are needed."""
        blocks = list(self.prefix.match(request.token_ids[: request.num_tokens - 1]))
        return blocks[: (request.num_tokens - 1) // self.block_size]

    def cached_tokens(self, request: Request) -> int:
        """Tokens that match or fork would spare a request without KV; asking changes nothing where the cache can peek."""
        ids = request.token_ids[: request.num_tokens - 1]
        peek = getattr(self.prefix, "peek", None)
        blocks = peek(ids) if peek else len(self.prefix.match(ids))
        return max(min(blocks, len(ids) // self.block_size) * self.block_size, self.fork(request)[1])

    def admit(self, request: Request, n: int) -> tuple[int, int] | None:
        """Give a request without KV what is computed of it, by a sibling or in the prefix cache and its tiers, and slots for
        n tokens more.

        Returns the tokens of the prefix, whose KV is there, and those that have slots, n or what is left; None, with nothing
        changed, when the pool cannot give the slots. What cannot be loaded is left to compute.
        """
        matched = self.match(request)
        shared, taken_over = self.fork(request)
        if taken_over > len(matched) * self.block_size:
            n = min(n, request.num_tokens - taken_over)
            request.num_loaded_tokens = 0
            return None if self.allocate(request, taken_over + n, shared, taken_over) is None else (taken_over, n)
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
                self.release(blocks)
        return loaded

    def fork(self, request: Request) -> tuple[list[int], int]:
        """Blocks of a running sibling that has the prompt's KV, and how many tokens in them to take over; ([], 0) if none has it.

        The last block may be a partial one: ``allocate`` replaces it by a copy, since it will be written to.
        """
        hit = min(request.prompt_len, request.num_tokens - 1)
        out_of_sight = self.window.unseen_blocks(hit, self.block_size)
        for other in request.family:
            table = other.blocks[: self.blocks_for(hit)]
            holes = (i for i, block in enumerate(table) if block == NULL_BLOCK)
            running = other is not request and other.status is Status.RUNNING
            if running and 0 < hit <= other.num_landed_tokens and all(i in out_of_sight for i in holes):
                return table, hit
        return [], 0

    def awaits_prompt(self, request: Request, starting: Sequence[Request] = ()) -> bool:
        """Whether a sibling computes the prompt, or is among those starting, so that waiting is cheaper than doing it twice."""
        if len(request.family) < 2 or request.prompt_len < 2:
            return False
        computing = any(
            other is not request and other.max_tokens > 1  # one that is gone with its prompt has nothing to share
            and other.num_landed_tokens < other.prompt_len
            and (other.status is Status.RUNNING or other in starting) for other in request.family
        )  # fmt: skip
        return computing and self.fork(request)[1] == 0

    def allocate(
        self, request: Request, num_tokens: int, matched: Sequence[int] = (), hit: int | None = None
    ) -> list[int] | None:
        """Let the request hold KV for num_tokens tokens; matched blocks come first in the table of a request that has none, and
        hit tokens of them are computed (all, unless said).

        Returns the fresh blocks, or None with nothing changed when the pool cannot give them. Copy on write: a block of several
        holders that is about to be written to is replaced by a fresh one, and ``copies.planned`` says so.
        """
        if not matched and self._has_room(request, num_tokens):
            return []
        table = [*request.blocks, *matched]
        start = len(matched) * self.block_size if hit is None else hit
        first = (start if matched else request.num_computed_tokens) // self.block_size
        others = 0 if matched else 1  # holders of a block that nobody but this request has
        written = range(first, min(self.blocks_for(num_tokens), len(table)))
        shared = [i for i in written if self.copies.holders(table[i]) > others]
        total = self.blocks_for(num_tokens if self.reserve is None else max(num_tokens, self.reserve(request)))
        need = len(shared) + max(0, total - len(table))
        self._make_room(need, protected=set(matched))
        fresh = self.pool.allocate(need, side_by_side=self.reserve is not None)
        if fresh is None:
            return None
        self.pool.acquire(b for b in matched if b != NULL_BLOCK)
        for i, target in zip(shared, fresh, strict=False):
            self.copies.plan(table[i], target)
            self.pool.release([table[i]])  # others hold it: it becomes neither free nor cached, and nobody need be asked
            table[i] = target
        request.blocks[:] = table + fresh[len(shared) :]
        return fresh

    def _has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request holds what it needs, and alone where it writes: so it is in nearly every decoding step."""
        if self.reserve is not None or num_tokens > len(request.blocks) * self.block_size:
            return False
        first, last = request.num_computed_tokens // self.block_size, (num_tokens - 1) // self.block_size
        if first == last:
            return self.pool.ref_count(request.blocks[first]) == 1
        return max(map(self.pool.ref_count, request.blocks[first : last + 1]), default=1) == 1

    def _make_room(self, need: int, protected: set[int]) -> None:
        missing = need - self.pool.num_free
        cached = self.pool.num_cached - sum(b != NULL_BLOCK and self.pool.ref_count(b) == 0 for b in protected)
        if 0 < missing <= cached:
            self.pool.uncache(self.prefix.evict(missing, lambda b: self.pool.ref_count(b) == 0 and b not in protected))

    def offer_prompt(self, request: Request) -> list[int]:
        """Let others find the full blocks of a computed prompt while its request still runs; once, until it loses its KV.

        Where the cache keeps another copy of a block, the request moves to that one and gives its own up: what a request holds
        is then held from the beginning of the prefix on. Returns what it gave up, for ``release`` once no step reads it.
        """
        full = self._full_blocks(request, min(request.num_computed_tokens, request.prompt_len))
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
    def free_unseen(self, request: Request) -> None:
        """Take back the blocks that no later query of the request sees; its table then has the null block there."""
        if self.window.size is None or self.reserve is not None or not request.blocks:
            return
        unseen = []
        # a draft that a step computed may be refused yet: the next query stands behind the tokens known before that step
        query = min(request.num_landed_tokens, len(request.token_ids))
        if query == request.prompt_len and len(request.family) > 1:
            query -= 1  # where its siblings start, which may take the prompt over before the next step
        for i in reversed(self.window.unseen_blocks(query, self.block_size)):
            if request.blocks[i] == NULL_BLOCK:
                break
            unseen.append(request.blocks[i])
            request.blocks[i] = NULL_BLOCK
        self.release(reversed(unseen))

    def free(self, request: Request) -> None:
        """Take all blocks back. Full blocks of computed tokens are offered to the prefix cache first, up to one that is gone."""
        # a step in flight may have computed a token whose id its request never got: something failed when it was to be appended
        full = self._full_blocks(request, min(request.num_computed_tokens, len(request.token_ids)))
        blocks, request.blocks = request.blocks, []
        request.prompt_offered = False
        try:
            if full:
                self.prefix.insert(request.token_ids[: full * self.block_size], blocks[:full])
        finally:
            self.release(b for b in blocks if b != NULL_BLOCK)

    def _full_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks from the beginning that are full with these tokens, up to the first that the window has left behind."""
        full = num_tokens // self.block_size
        return request.blocks.index(NULL_BLOCK, 0, full) if NULL_BLOCK in request.blocks[:full] else full

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference on blocks that have left a table. What nobody holds is cached or free, and copied to no more."""
        blocks, keep = list(blocks), []
        try:
            keep = [b for b in blocks if self.prefix.holds(b)]
        except BaseException as fault:
            self._do_without_prefixes(fault)
            raise
        finally:  # a prefix cache that raises costs its prefixes, not the blocks
            self.copies.forget(self.pool.release(blocks, keep))

    def _do_without_prefixes(self, fault: BaseException) -> None:
        """What the prefix cache remembers is not to be believed any more: it was not asked about blocks that others get now."""
        log.warning("the prefix cache is switched off: %s: %s", type(fault).__name__, fault)
        self.prefix = NoPrefixCache()
        self.pool.uncache(self.pool.cached_blocks)

    def tokens_without_slots(self, requests: Iterable[Request]) -> int:
        """Computed tokens of these requests without a slot of their own: another request has it, or the window left it behind."""
        gone = sum(r.blocks.count(NULL_BLOCK) for r in requests) if self.window.size is not None else 0
        # what is shared is full: a partial block is replaced before it is written to
        return (gone + self.pool.num_shared - self.copies.num_sharing) * self.block_size
