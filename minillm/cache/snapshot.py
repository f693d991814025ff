"""The cache at one moment, as plain data: for drawing, for tests, and for looking at what an engine holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterator, Mapping, Sequence, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class TreeNode:
    """A run of blocks in a prefix cache. tokens: all tokens of its blocks, in order. last_use: a count of uses, not a time.
    locked: whether a request holds one of its blocks. The root has no tokens and no blocks."""

    tokens: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    last_use: int = 0
    locked: bool = False
    children: tuple["TreeNode", ...] = ()

    def walk(self) -> Iterator["TreeNode"]:
        """This node and everything below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


@dataclass(frozen=True)
class CacheSnapshot:
    """Who holds which block. Block ids run from 1 to num_blocks; 0 is the null block.

    tables: {request id: its block table}; computed: {request id: tokens whose KV is in them}. ref_counts[block] counts requests.
    free: in the order in which they will be handed out. cached: kept by the prefix cache and held by nobody. tree: the prefix
    cache, None where it cannot be drawn. A block that is kept and held is in the tree and has references.
    """

    block_size: int
    num_blocks: int
    tables: Mapping[str, tuple[int, ...]]
    computed: Mapping[str, int]
    ref_counts: tuple[int, ...]
    free: tuple[int, ...]
    cached: tuple[int, ...]
    tree: TreeNode | None = None

    @property
    def referenced(self) -> tuple[int, ...]:
        return tuple(b for b, count in enumerate(self.ref_counts) if count)

    @property
    def kept(self) -> tuple[int, ...]:
        """Blocks in the tree, held by requests or not."""
        return tuple(b for node in self._nodes() for b in node.blocks)

    @property
    def evictable_tokens(self) -> int:
        """Tokens of the tree that nobody holds; with protected_tokens, all tokens of the tree."""
        return sum(len(node.tokens) for node in self._nodes() if not node.locked)

    @property
    def protected_tokens(self) -> int:
        return sum(len(node.tokens) for node in self._nodes() if node.locked)

    def _nodes(self) -> Iterator[TreeNode]:
        return iter(()) if self.tree is None else self.tree.walk()


def nested(
    roots: Sequence[T], children: Callable[[T], Sequence[T]], make: Callable[[T, tuple[TreeNode, ...]], TreeNode]
) -> tuple[TreeNode, ...]:
    """Nested nodes of any depth: make(item, its finished children), bottom up."""
    items = list(roots)
    for item in items:  # grows while it is walked: parents stand before their children
        items.extend(children(item))
    done: dict[int, TreeNode] = {}
    for item in reversed(items):
        done[id(item)] = make(item, tuple(done[id(child)] for child in children(item)))
    return tuple(done[id(root)] for root in roots)
