"""Tiers around a prefix cache: what the pool evicts goes to host memory, what that pushes out goes to disk, and a prefix that is
found there is loaded instead of computed where that is faster (Qin et al. 2024, Mooncake, arXiv 2407.00079; SGLang's HiCache)."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence

from torch import Tensor

from minillm.cache.block_io import BlockIO
from minillm.cache.prefix import PrefixCache
from minillm.cache.tiers import Item, Tier, chain_keys
from minillm.perf.transfer import Link, LoadOffer, PrefillRate

log = logging.getLogger("minillm")
LoadPolicy = Callable[[LoadOffer], int]


def load_always(offer: LoadOffer) -> int:
    """Whatever is found is loaded; no clock is read."""
    return len(offer.tiers)


@dataclass
class Traffic:
    """Bytes that entered and left one tier since the engine started."""

    written_bytes: int = 0
    read_bytes: int = 0


@dataclass(frozen=True)
class Found:
    """Blocks of a request that are in a tier and are worth loading: they continue what is in the pool."""

    keys: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)


class TieredCache:
    """A PrefixCache over another one. Blocks are known by the hash of their whole prefix, so a tier needs no tree.

    write="back": a block is copied down when the pool evicts it, before anybody may reuse it. write="through": it is copied into
    every tier as soon as it is offered, so that eviction copies nothing. A fault of a tier costs its blocks, never a request.
    """

    def __init__(
        self, inner: PrefixCache, tiers: Sequence[Tier], io: BlockIO, root: bytes, write: str = "back",
        policy: LoadPolicy = load_always,
    ):  # fmt: skip
        self.inner, self.io, self.root, self.through, self.policy = inner, io, root, write == "through", policy
        self.tiers = list(tiers)
        self.traffic = {tier.name: Traffic() for tier in self.tiers}
        self.links: dict[str, Link] = {}
        self.prefill: PrefillRate | None = None
        self._key_of: dict[int, bytes] = {}  # of every block that the inner cache holds
        self._pending: set[bytes] = set()
        self._reported = (0, 0)

    # --- the prefix cache that the manager sees ---

    def match(self, token_ids: Sequence[int]) -> list[int]:
        return self.inner.match(token_ids)

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        self.inner.insert(token_ids, blocks)
        for block in blocks:
            self._key_of.pop(block, None)
        keys = chain_keys(self.root, token_ids, self.io.block_size)
        kept = dict(zip(self.inner.match(token_ids), keys))  # the inner cache's own word: it may know another copy, or keep less
        self._key_of.update(kept)
        if self.through:
            self._copy_down(list(kept)[::-1], self.tiers)  # tail first, so that the head is the last to be pushed out

    def __getattr__(self, name: str) -> Any:
        if name in ("peek", "tree"):  # optional parts of the seam: there if the inner cache has them
            return getattr(self.inner, name)
        raise AttributeError(name)

    def take_traffic(self) -> tuple[int, int]:
        """Bytes read from all tiers and written to them since the last call."""
        read, written = (sum(getattr(t, name) for t in self.traffic.values()) for name in ("read_bytes", "written_bytes"))
        before, self._reported = self._reported, (read, written)
        return read - before[0], written - before[1]

    def holds(self, block: int) -> bool:
        return self.inner.holds(block)

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        gone = self.inner.evict(n, evictable)
        if not self.through:
            self._copy_down(gone, self.tiers[:1])
        for block in gone:
            self._key_of.pop(block, None)
        return gone

    # --- down ---

    def _copy_down(self, blocks: Sequence[int], targets: Sequence[Tier]) -> None:
        """Give blocks to the target tiers. Nothing raises: a copy is never vital."""
        known = [(self._key_of[b], b) for b in blocks if b in self._key_of]
        data: dict[bytes, Tensor] = {}
        try:
            for tier in targets:
                absent = [(key, b) for key, b in known if not tier.use(key)]
                uncopied = [(key, b) for key, b in absent if key not in data]
                if uncopied:
                    data |= zip((key for key, _ in uncopied), self.io.get([b for _, b in uncopied]))
                self._write(tier, [(key, data[key]) for key, _ in absent])
        except Exception as fault:  # of a store or a tier of somebody's own
            self.switch_off(fault)

    def _write(self, tier: Tier, items: list[Item]) -> None:
        """Into a tier, and what it pushes out into the one below, and so on."""
        if not items:
            return
        left = tier.write(items, self._pending)
        self.traffic[tier.name].written_bytes += sum(data.nbytes for key, data in items if tier.has(key))
        below = self.tiers[self.tiers.index(tier) + 1 :]
        if below and not self.through:  # written through, the tier below has its own copy already
            self._write(below[0], [(key, data) for key, data in left if not below[0].use(key)])

    def switch_off(self, fault: Exception) -> None:
        """Go on without tiers, with a warning."""
        self.tiers = []
        log.warning("the host and disk tiers are switched off: %s: %s", type(fault).__name__, fault)

    # --- up ---

    def find(self, token_ids: Sequence[int], num_matched: int, limit: int) -> Found:
        """What tiers continue a match of num_matched blocks with, up to `limit` blocks in all, as far as loading pays."""
        if not self.tiers or limit <= num_matched:
            return Found()
        keys = chain_keys(self.root, token_ids[: limit * self.io.block_size], self.io.block_size)[num_matched:]
        names: list[str] = []
        for key in keys:
            tier = self._holder(key)
            if tier is None:
                break
            names.append(tier.name)
        if not names:
            return Found()
        size = self.io.block_size
        past, rest = num_matched * size, len(token_ids) - (num_matched + len(names)) * size
        offer = LoadOffer(past, rest, tuple(names), size, self.io.nbytes, dict(self.links), self._prefill_seconds)
        return Found(tuple(keys[: self._decide(offer)]))

    def _holder(self, key: bytes) -> Tier | None:
        try:
            return next((tier for tier in self.tiers if tier.has(key)), None)
        except Exception as fault:
            self.switch_off(fault)
            return None

    def _decide(self, offer: LoadOffer) -> int:
        answer = self.policy(offer)
        try:
            blocks = operator.index(answer)
        except TypeError:
            blocks = -1
        if isinstance(answer, bool) or not 0 <= blocks <= len(offer.tiers):
            raise ValueError(f"tier_policy answers how many of the {len(offer.tiers)} offered blocks to load, got {answer!r:.60}")
        return blocks

    def _prefill_seconds(self, past: int, new: int) -> float:
        if self.prefill is None:
            raise ValueError("prefill was not measured; this engine cannot predict its time")
        return self.prefill.seconds(past, new)

    @contextlib.contextmanager
    def pending(self, found: Found) -> Iterator[None]:
        """While it lasts, no tier lets the found blocks go: their copies are under way."""
        before, self._pending = self._pending, self._pending | set(found.keys)
        try:
            yield
        finally:
            self._pending = before

    def load(self, found: Found, blocks: Sequence[int]) -> int:
        """Fill blocks with what was found: all of it, or nothing. Returns the number of blocks filled, and if it is not all,
        how many could be read before the first that could not; none of these was written."""
        contents: list[Tensor] = []
        times: list[tuple[str, float]] = []
        for i in reversed(range(len(found))):  # tail first, so that the head is used last and outlives what follows it
            data = self._read(found.keys[i], times)
            if data is None:
                return i
            contents.append(data)
        started = time.perf_counter()
        try:
            self.io.put(blocks, contents[::-1])
        except Exception as fault:
            log.warning("a cached prefix could not be loaded and is computed again: %s: %s", type(fault).__name__, fault)
            return 0
        self._observe(times, (time.perf_counter() - started) / max(len(times), 1))
        return len(found)

    def _read(self, key: bytes, times: list[tuple[str, float]]) -> Tensor | None:
        """The block from the first tier that has it whole."""
        for tier in self.tiers:
            started = time.perf_counter()
            try:
                data = tier.read(key) if tier.has(key) else None
            except Exception as fault:
                self.switch_off(fault)
                return None
            if data is not None and data.numel() == self.io.nbytes:
                self.traffic[tier.name].read_bytes += data.nbytes
                times.append((tier.name, time.perf_counter() - started))
                return data
        return None

    def _observe(self, times: Sequence[tuple[str, float]], put_seconds: float) -> None:
        """What this load says about the links, which serve the next decision and nothing else."""
        for name in dict.fromkeys(name for name, _ in times):
            seconds = [s + put_seconds for tier, s in times if tier == name]
            if name in self.links:
                self.links[name] = self.links[name].observed(len(seconds) * self.io.nbytes, sum(seconds))
