"""A prefix cache as a radix tree: every node is a run of tokens, and what prompts share is stored once."""

from __future__ import annotations

import heapq
from typing import Callable, Sequence

from minillm.cache.prefix import cut, cut_for
from minillm.cache.snapshot import TreeNode, nested

Tokens = tuple[int, ...]


class _Node:
    """An edge and what it leads to: at least one block (the root has none), each with its tokens."""

    __slots__ = ("pieces", "blocks", "parent", "children", "last_use", "queued", "serial")

    def __init__(self, pieces: list[Tokens], blocks: list[int], parent: "_Node | None", serial: int):
        self.pieces, self.blocks, self.serial = pieces, blocks, serial
        self.parent: _Node = parent or self
        self.children: dict[Tokens, _Node] = {}  # by the tokens of their first block
        self.last_use = 0
        self.queued = False


class RadixPrefixCache:
    """RadixAttention's tree (Zheng et al. 2023, SGLang, arXiv 2312.07104) with edges of whole blocks. O(length) per call.

    Two prompts that differ inside a block part before it. A match that ends inside a node splits it, so that a node is held by
    requests as a whole or not at all. Eviction takes the least recently used leaf and shortens it from its end; a node that
    lost its last child is a leaf itself. It looks at leaves only, in a heap that is put in order when it is read: one entry per
    leaf, whatever the number of uses.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._serial = 0
        self._uses = 0
        self._root = _Node([], [], None, 0)
        self._kept: set[int] = set()
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap of (last use when queued, serial, node)
        self._in_use: dict[int, _Node] = {}  # leaves that an eviction met locked; the next use queues them again

    def match(self, token_ids: Sequence[int]) -> list[int]:
        return [b for node in self._descend(cut(token_ids, self.block_size)) for b in node.blocks]

    def peek(self, token_ids: Sequence[int]) -> int:
        """How many blocks match would find; neither the order of eviction nor the tree changes."""
        pieces, node, found = cut(token_ids, self.block_size), self._root, 0
        while found < len(pieces) and (child := node.children.get(pieces[found])):
            shared = _shared(child.pieces, pieces, found)
            found += shared
            if shared < len(child.pieces):
                break
            node = child
        return found

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        pieces = cut_for(token_ids, blocks, self.block_size)
        path = self._descend(pieces)
        known = sum(len(node.blocks) for node in path)
        new = list(blocks[known:])
        if not new or not self._kept.isdisjoint(new) or len(set(new)) < len(new):
            return  # a block that is kept as another prefix stays that: its owner cannot mean to change it
        parent = path[-1] if path else self._root
        leaf = self._make(pieces[known:], new, parent)
        self._kept.update(new)
        self._touch(leaf)

    def holds(self, block: int) -> bool:
        return block in self._kept

    def evict(self, n: int, evictable: Callable[[int], bool]) -> list[int]:
        gone: list[int] = []
        self._evict_leaves(n, evictable, gone)
        if len(gone) < n and self._in_use:  # some of them may have been given back unnoticed
            for node in self._in_use.values():
                self._queue(node)
            self._in_use.clear()
            self._evict_leaves(n, evictable, gone)
        if len(gone) < n:
            self._evict_inside(n, evictable, gone)
        return gone

    def tree(self, locked: Callable[[int], bool]) -> TreeNode:
        def make(node: _Node, children: tuple[TreeNode, ...]) -> TreeNode:
            tokens = tuple(t for piece in node.pieces for t in piece)
            return TreeNode(tokens, tuple(node.blocks), node.last_use, any(map(locked, node.blocks)), children)

        return nested([self._root], lambda node: list(node.children.values()), make)[0]

    # --- walking down ---

    def _descend(self, pieces: Sequence[Tokens]) -> list[_Node]:
        """The nodes that hold the longest kept prefix, and nothing else: the last one is split where the prefix ends."""
        self._uses += 1
        path: list[_Node] = []
        node, at = self._root, 0
        while at < len(pieces) and (child := node.children.get(pieces[at])):
            shared = _shared(child.pieces, pieces, at)
            node = child if shared == len(child.pieces) else self._split(child, shared)
            self._touch(node)
            path.append(node)
            at += shared
        return path

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two and return the upper one, with the first ``at`` blocks. The lower one keeps its place in the heap."""
        upper = self._make(node.pieces[:at], node.blocks[:at], node.parent)
        upper.last_use = node.last_use
        node.pieces, node.blocks, node.parent = node.pieces[at:], node.blocks[at:], upper
        upper.children[node.pieces[0]] = node
        return upper

    def _make(self, pieces: Sequence[Tokens], blocks: Sequence[int], parent: _Node) -> _Node:
        self._serial += 1
        node = _Node(list(pieces), list(blocks), parent, self._serial)
        parent.children[node.pieces[0]] = node
        return node

    # --- the order of eviction ---

    def _touch(self, node: _Node) -> None:
        node.last_use = self._uses
        if not node.children:
            self._in_use.pop(node.serial, None)
            self._queue(node)

    def _queue(self, node: _Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._leaves, (node.last_use, node.serial, node))

    def _oldest_leaf(self) -> _Node | None:
        while self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if not node.blocks or node.children:  # gone, or a leaf no longer
                continue
            if node.last_use == stamp:
                return node
            self._queue(node)  # used since: it goes back in its new place
        return None

    def _evict_leaves(self, n: int, evictable: Callable[[int], bool], gone: list[int]) -> None:
        while len(gone) < n and (leaf := self._oldest_leaf()):
            if not evictable(leaf.blocks[-1]):
                self._in_use[leaf.serial] = leaf
                continue
            first = leaf.pieces[0]
            while leaf.blocks and len(gone) < n and evictable(leaf.blocks[-1]):
                gone.append(leaf.blocks.pop())
                leaf.pieces.pop()
                self._kept.remove(gone[-1])
            if leaf.blocks:
                self._queue(leaf)
            else:
                self._cut_off(leaf, first)

    def _evict_inside(self, n: int, evictable: Callable[[int], bool], gone: list[int]) -> None:
        """The last resort, when all that is left stands before blocks in use: forget it, and with it what follows."""
        nodes = [self._root]
        for node in nodes:
            nodes.extend(node.children.values())
        for node in reversed(nodes):
            at = next((i for i, block in enumerate(node.blocks) if evictable(block)), None)
            if len(gone) >= n or at is None:
                continue
            if at:
                self._split(node, at)
            self._cut_off(node, node.pieces[0])
            lost = [node]
            for each in lost:
                lost.extend(each.children.values())
                gone.extend(block for block in each.blocks if evictable(block))
                self._kept.difference_update(each.blocks)
                each.blocks, each.pieces, each.children = [], [], {}

    def _cut_off(self, node: _Node, first: Tokens) -> None:
        """Take a node, whose first block held these tokens, out of the tree. Its parent may have become a leaf."""
        parent = node.parent
        del parent.children[first]
        if parent.blocks and not parent.children:
            self._queue(parent)


def _shared(edge: Sequence[Tokens], pieces: Sequence[Tokens], at: int) -> int:
    """How many blocks of an edge equal pieces[at:]; the first one does."""
    n = 1
    most = min(len(edge), len(pieces) - at)
    while n < most and edge[n] == pieces[at + n]:
        n += 1
    return n
