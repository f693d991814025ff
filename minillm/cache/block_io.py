"""Whole blocks of a KV store as bytes: what leaves it for another place and comes back is the same, bit for bit."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from minillm.cache.kv_store import KVStore


class BlockIO:
    """Copies blocks out of a store and into it, all layers at once, through the store's own read and write.

    A block's bytes are K and V of its tokens, layer after layer: uint8 [nbytes], in ordinary memory. A store that does not
    give back what was read from it, bit for bit (one that rounds once more at every write), is refused with ValueError.
    """

    def __init__(self, store: KVStore, num_layers: int, block_size: int, device: torch.device | str = "cpu"):
        self.store, self.num_layers, self.block_size, self.device = store, num_layers, block_size, device
        last = store.num_slots // block_size - 1
        k, v = store.read(0, self._slots([last]))
        self._k_shape, self._v_shape, self.dtype = k.shape[2:], v.shape[2:], k.dtype
        self._k_width = block_size * self._k_shape.numel()
        self._width = self._k_width + block_size * self._v_shape.numel()
        self.nbytes = num_layers * self._width * self.dtype.itemsize
        self._check_exact(last)

    def _check_exact(self, block: int) -> None:
        noise = torch.randn(self.num_layers * self._width, generator=torch.Generator().manual_seed(0)).to(self.dtype)
        self.put([block], [noise.view(torch.uint8)])
        (first,) = self.get([block])
        self.put([block], [first])
        (second,) = self.get([block])
        if not torch.equal(first, second):
            raise ValueError(
                f"{type(self.store).__name__} does not keep what it gave out: writing back what was read changes bits, so its "
                f"blocks cannot go to a host or disk tier"
            )

    def get(self, blocks: Sequence[int]) -> list[Tensor]:
        """A copy of each block's bytes; it does not change when the block is reused."""
        slots, n = self._slots(blocks), len(blocks)
        layers = []
        for layer in range(self.num_layers):
            k, v = self.store.read(layer, slots)
            layers.append(torch.cat((k.reshape(n, -1), v.reshape(n, -1)), dim=1).cpu())
        return [torch.stack([kv[i] for kv in layers]).view(torch.uint8).flatten() for i in range(n)]

    def put(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Fill blocks with bytes that `get` gave. A wrong number of bytes is a ValueError, and nothing is written."""
        bad = next((c for c in contents if c.numel() != self.nbytes), None)
        if bad is not None:
            raise ValueError(f"a block has {self.nbytes} bytes, got {bad.numel()}")
        slots = self._slots(blocks).flatten()
        layers = torch.stack(list(contents)).view(self.dtype).view(len(blocks), self.num_layers, self._width).to(self.device)
        for layer in range(self.num_layers):
            k, v = layers[:, layer, : self._k_width], layers[:, layer, self._k_width :]
            self.store.write(layer, slots, k.reshape(-1, *self._k_shape), v.reshape(-1, *self._v_shape))

    def _slots(self, blocks: Sequence[int]) -> Tensor:
        """[1, blocks * block_size] int64."""
        first = torch.tensor(blocks, dtype=torch.int64)[:, None] * self.block_size
        return (first + torch.arange(self.block_size)).reshape(1, -1).to(self.device)
