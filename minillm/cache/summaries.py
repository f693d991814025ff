"""A KV store that keeps a summary of every full block beside it, for attention that reads only some of them."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.attention.indexer import Indexer, shape_of
from minillm.cache.kv_store import KVStore, copy_slots, recounted
from minillm.model.config import ModelConfig
from minillm.perf.work import Work


class SummarisedStore:
    """Another store, and per block what an indexer makes of its keys.

    A summary is made when the last slot of its block is written, by whoever writes it: a forward pass, a copy, a load from a
    tier. What is in a block is written in order, refused drafts again, so a block that is full with a request's tokens has the
    summary of just these; that of a block which is not full says nothing. Keys are read back first: a store that rounds them has
    the summary of what it gives. Only layers that choose blocks have summaries: each ``every``-th one.
    """

    def __init__(
        self, inner: KVStore, indexer: Indexer, config: ModelConfig, block_size: int, dtype: torch.dtype,
        device: torch.device | str = "cpu", every: int = 1, shared: bool = False,
    ):  # fmt: skip
        """shared: inner is one layer deep, and so are the summaries."""
        self.inner, self.indexer, self.block_size, self.every = inner, indexer, block_size, every
        self.num_layers, self.num_slots = config.num_layers, inner.num_slots
        shape = summary_shape(indexer, config, block_size, dtype)
        layers = 1 if shared else -(-config.num_layers // every)
        self.tables = [torch.empty(self.num_slots // block_size, *shape, dtype=dtype, device=device) for _ in range(layers)]
        self.offsets = torch.arange(block_size, device=device)
        self.bytes_per_token = inner.bytes_per_token + -(-layers * self.tables[0][0].nbytes // block_size)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.inner.write(layer, slots, k, v)
        self._summarise(layer, slots)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.read(layer, slots)

    def copy(self, source: Tensor, target: Tensor) -> None:
        copy_slots(self.inner, self.num_layers, source, target)
        for layer in range(0, self.num_layers, self.every):
            self._summarise(layer, target)

    def summaries(self, layer: int, blocks: Tensor) -> Tensor:
        """blocks [rows, n] of full blocks → [rows, n, kv_heads, width]."""
        return self._table(layer)[blocks]

    def recount(self, work: Work) -> Work:
        """As the inner store counts."""
        return recounted(self.inner, work)

    def poison(self, slots: Tensor) -> None:
        self.inner.poison(slots)
        for table in self.tables:
            table[slots // self.block_size] = float("nan")

    def _summarise(self, layer: int, slots: Tensor) -> None:
        if layer % self.every:
            return
        blocks = slots[slots % self.block_size == self.block_size - 1] // self.block_size
        if len(blocks):
            keys, _ = self.inner.read(layer, blocks[:, None] * self.block_size + self.offsets)
            table = self._table(layer)
            made, shape = self.indexer.summarise(keys), (len(blocks), *table.shape[1:])
            if not isinstance(made, Tensor) or made.shape != shape:  # torch would spread fewer over all blocks
                raise ValueError(f"summarise gives {shape} here; got {shape_of(made)}")
            table[blocks] = made.to(table.dtype)

    def _table(self, layer: int) -> Tensor:
        return self.tables[layer // self.every % len(self.tables)]


def summary_shape(indexer: Indexer, config: ModelConfig, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """(kv_heads, width) of an indexer's summary of a block; ValueError for an indexer that makes something else."""
    made = indexer.summarise(torch.zeros(2, block_size, config.num_kv_heads, config.head_dim, dtype=dtype))
    known = isinstance(made, Tensor) and made.dim() == 3 and not made.is_complex()
    if not known or made.shape[:2] != (2, config.num_kv_heads):
        shape = f"[blocks, kv_heads, width], here (2, {config.num_kv_heads}, width)"
        raise ValueError(f"summarise gives {shape}, real numbers; got {shape_of(made)}")
    return tuple(made.shape[1:])
