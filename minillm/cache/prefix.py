"""The seam for prefix caches: who remembers which blocks hold which tokens. Two plain ones: none, and a table of hashes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Callable, Hashable, Protocol, Sequence

from minillm.cache.snapshot import TreeNode, nested


class PrefixCache(Protocol):
    """Maps token prefixes to blocks whose KV is already computed. It never touches reference counts: CacheManager does.

    Two more methods are optional. ``peek(token_ids) -> int`` says how many blocks ``match`` would find and leaves no trace;
    ``tree(locked) -> TreeNode`` draws what is kept, where ``locked(block)`` says whether a request holds the block.
    """

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix of token_ids, whole blocks only, in order."""
        ...

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Offer the blocks of final tokens; blocks[i] holds token_ids[i * block_size : (i + 1) * block_size], all full."""
        ...

    def holds(self, block: int) -> bool:
        """Whether the cache wants to keep this block when nobody references it. Asked about every block that is given back; after
        an error here the engine goes on without prefixes, since others now get blocks that the cache may still remember."""
        ...

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        """Forget at least n blocks for which evictable(block) is true, fewer only if there are no more; return them."""
        ...


class NoPrefixCache:
    """The plain implementation: remembers nothing."""

    def match(self, token_ids: Sequence[int]) -> list[int]:
        return []

    def peek(self, token_ids: Sequence[int]) -> int:
        return 0

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        return None

    def holds(self, block: int) -> bool:
        return False

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        return []


def cut(token_ids: Sequence[int], block_size: int) -> list[tuple[int, ...]]:
    """The tokens of each whole block; what does not fill the last one is left out."""
    stops = range(block_size, len(token_ids) + 1, block_size)
    return [tuple(token_ids[stop - block_size : stop]) for stop in stops]


def cut_for(token_ids: Sequence[int], blocks: Sequence[int], block_size: int) -> list[tuple[int, ...]]:
    """The tokens of each offered block. ValueError unless every block is full."""
    if len(token_ids) != len(blocks) * block_size:
        raise ValueError(f"{len(blocks)} blocks of {block_size} tokens were offered with {len(token_ids)} tokens")
    return cut(token_ids, block_size)


class _Entry:
    """One kept block: its tokens, and the entry of the block before it."""

    __slots__ = ("key", "parent", "tokens", "block", "last_use")

    def __init__(self, key: Hashable, parent: "_Entry | None", tokens: tuple[int, ...], block: int):
        self.key, self.parent, self.tokens, self.block = key, parent, tokens, block
        self.last_use = 0


class HashPrefixCache:
    """A flat table: the key of a block is the hash of the key before it and its own tokens, so it names all tokens up to its end
    (vLLM's automatic prefix caching; Kwon et al. 2023, arXiv 2309.06180). O(length) per call.

    Equal keys are no proof: a hit also needs the same tokens behind the same entry, so two prefixes whose keys collide are never
    taken for each other; the second one is not kept. Least recently used blocks go first, the end of a prefix before its
    beginning. hasher: (key before, tokens) → key.
    """

    def __init__(self, block_size: int, hasher: Callable[[Hashable, tuple[int, ...]], Hashable] | None = None):
        self.block_size = block_size
        self._hash = hasher or (lambda before, tokens: hash((before, tokens)))
        self._entries: dict[Hashable, _Entry] = {}
        self._kept: dict[int, _Entry] = {}
        self._order: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._in_use: set[int] = set()  # left out of the order since an eviction met them; the next use puts them back
        self._uses = 0

    def match(self, token_ids: Sequence[int]) -> list[int]:
        path = self._walk(cut(token_ids, self.block_size))
        self._touch(path)
        return [entry.block for entry in path]

    def peek(self, token_ids: Sequence[int]) -> int:
        """How many blocks match would find; the order of eviction stays as it is."""
        return len(self._walk(cut(token_ids, self.block_size)))

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        pieces = cut_for(token_ids, blocks, self.block_size)
        path = self._walk(pieces)
        for tokens, block in zip(pieces[len(path) :], blocks[len(path) :], strict=True):
            entry = self._add(path[-1] if path else None, tokens, block)
            if entry is None:
                break  # nothing behind it could be found
            path.append(entry)
        self._touch(path)

    def holds(self, block: int) -> bool:
        return block in self._kept

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        gone: list[int] = []
        self._evict(n, evictable, gone)
        if len(gone) < n and self._in_use:  # some of them may have been given back unnoticed
            self._order.update(dict.fromkeys(sorted(self._in_use)))
            self._in_use.clear()
            self._evict(n, evictable, gone)
        return gone

    def tree(self, locked: Callable[[int], bool]) -> TreeNode:
        """One node a block. Blocks that can no longer be found, because one before them is gone, are not in it."""
        behind: dict[int, list[_Entry]] = {}
        for entry in self._entries.values():
            behind.setdefault(id(entry.parent), []).append(entry)
        children = nested(
            behind.get(id(None), []),
            lambda e: behind.get(id(e), []),
            lambda e, below: TreeNode(e.tokens, (e.block,), e.last_use, locked(e.block), below),
        )
        return TreeNode(children=children)

    def _walk(self, pieces: Sequence[tuple[int, ...]]) -> list[_Entry]:
        path: list[_Entry] = []
        key: Hashable = None
        parent: _Entry | None = None
        for tokens in pieces:
            key = self._hash(key, tokens)
            entry = self._entries.get(key)
            if entry is None or entry.parent is not parent or entry.tokens != tokens:
                break
            path.append(entry)
            parent = entry
        return path

    def _add(self, parent: _Entry | None, tokens: tuple[int, ...], block: int) -> _Entry | None:
        key = self._hash(parent.key if parent else None, tokens)
        old = self._entries.get(key)
        if self._kept.get(block) not in (None, old):
            return None  # it is kept as another prefix, which its owner cannot mean to change
        if old is not None:
            if old.parent is None or self._entries.get(old.parent.key) is old.parent:
                return None  # a collision: the key belongs to another prefix
            if old.block != block:  # what stood before it is gone, so nobody finds it: the first to be evicted
                self._order[old.block] = None
                self._order.move_to_end(old.block, last=False)
                self._in_use.discard(old.block)
        entry = self._entries[key] = self._kept[block] = _Entry(key, parent, tokens, block)
        return entry

    def _touch(self, path: Sequence[_Entry]) -> None:
        self._uses += 1
        for entry in reversed(path):  # the beginning last: it outlives what follows it
            entry.last_use = self._uses
            if entry.block in self._order:
                self._order.move_to_end(entry.block)
            else:
                self._order[entry.block] = None
                self._in_use.discard(entry.block)

    def _evict(self, n: int, evictable: Callable[[int], bool], gone: list[int]) -> None:
        while len(gone) < n and self._order:
            block, _ = self._order.popitem(last=False)
            if not evictable(block):
                self._in_use.add(block)
                continue
            entry = self._kept.pop(block)
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
            gone.append(block)
