"""Which keys a query sees: all before it, with a window the last ones and, where asked for, the first ones of the sequence, or
the blocks around it and some of those before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Window:
    """A query at position p sees the ``size`` keys up to its own and the first ``sinks`` keys of the sequence.

    size None sees everything. Sinks are the "attention sinks" of Xiao et al. 2023, arXiv 2309.17453 (StreamingLLM). Unlike there,
    every token keeps the position that it has in the text: keys lie in the store already rotated, and no request is longer than
    what the model was trained for, so that a window of at least the whole length is exactly dense attention.
    """

    size: int | None = None
    sinks: int = 0

    def first(self, query: int) -> int:
        """The first position, sinks aside, that the query at this position and later ones see."""
        return 0 if self.size is None else max(0, query - self.size + 1)

    def count(self, q_len: int, kv_len: int) -> int:
        """Keys that some of the last q_len queries of kv_len tokens see."""
        first = self.first(kv_len - q_len)
        return kv_len - first + min(self.sinks, first)

    def positions(self, q_len: int, kv_len: int) -> np.ndarray:
        """Their positions, ascending, [keys] int64."""
        first = self.first(kv_len - q_len)
        window = np.arange(first, kv_len, dtype=np.int64)
        return np.concatenate([np.arange(min(self.sinks, first), dtype=np.int64), window]) if first else window

    def sees(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Whether the query at a position sees the key at another; both broadcast."""
        seen = key <= query
        if self.size is not None:
            seen &= (key > query - self.size) | (key < self.sinks)
        return seen

    def unseen_blocks(self, query: int, block_size: int) -> range:
        """Blocks of a table that neither the query at this position nor any later one sees a key of."""
        return range(-(-self.sinks // block_size), self.first(query) // block_size)

    def most_blocks(self, kv_len: int, chunk: int, block_size: int) -> int:
        """Blocks that a request of kv_len tokens holds at most when it computes up to ``chunk`` tokens a step and keeps no unseen
        ones."""
        whole = -(-kv_len // block_size)
        if self.size is None:
            return whole
        span = self.size - 1 + chunk  # a step's own tokens and what the first of them sees, from anywhere in a block
        return min(whole, -(-self.sinks // block_size) + (span + block_size - 2) // block_size + 1)


@dataclass(frozen=True)
class SparseView:
    """Which keys a query sees. The ``window`` keys up to its own lie in local blocks, which are seen up to the query; of the
    blocks before these, all full, the ``blocks`` best are seen. Where there are no more than that, everything is seen: dense
    attention.

    Positions may be numbers or arrays of them.
    """

    blocks: int
    window: int
    block_size: int

    def first_local(self, query: Any) -> Any:
        """The first local block of the query at this position; so many blocks are candidates."""
        return np.maximum(0, query - self.window + 1) // self.block_size

    @property
    def most_local(self) -> int:
        """Local blocks of a query, at most."""
        return 1 + -(-(self.window - 1) // self.block_size)

    @property
    def first_sparse(self) -> int:
        """The first position whose query does not see everything before it."""
        return (self.blocks + 1) * self.block_size + self.window - 1

    def count(self, query: Any) -> Any:
        """Keys that the query at this position sees."""
        first = self.first_local(query)
        return query + 1 - (first - np.minimum(first, self.blocks)) * self.block_size
