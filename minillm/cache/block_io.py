"""Whole blocks of a KV store as bytes: what leaves it for another place and comes back is the same, bit for bit."""

from __future__ import annotations

from typing import Any, Protocol, Sequence

import torch
from torch import Tensor

from minillm.cache.kv_store import KVStore


class BlockIO:
    """Copies blocks out of a store and into it, all layers at once.

    A block's bytes are uint8 [nbytes], in ordinary memory. A store may have ``raw_tensors``, the list of all tensors that hold
    its KV, [slots, ...] each: then they are the rows of those tensors as they lie there, in as many bits as the store keeps. Of
    a store without them they are K and V in the dtype that it reads, layer after layer. layout: what the bytes are, in words.

    A store that does not give back what was read from it, bit for bit (one that rounds once more at every write, or whose raw
    tensors are not all of it), is refused with ValueError.
    """

    def __init__(self, store: KVStore, num_layers: int, block_size: int, device: torch.device | str = "cpu"):
        self.store, self.num_layers, self.block_size, self.device = store, num_layers, block_size, device
        last = store.num_slots // block_size - 1
        raw = getattr(store, "raw_tensors", None)
        self._rows: _Rows = _Values(store, num_layers, self._slots([last])) if raw is None else _Raw(_checked(raw, store))
        self.nbytes = block_size * self._rows.row_bytes
        self.layout = f"{self._rows.layout}, blocks of {block_size} tokens"
        self._check_exact(last)

    def _check_exact(self, block: int) -> None:
        """Fill a block, take its bytes, fill it with something else, put the bytes back: reads must give the same as before."""
        self._fill(block, seed=0)
        before, content = self._read(block), self.get([block])
        self._fill(block, seed=1)
        self.put([block], content)
        if not all(torch.equal(a, b) for a, b in zip(before, self._read(block), strict=True)):
            raise ValueError(
                f"{type(self.store).__name__} does not keep what it gave out: writing back what was read changes bits, so its "
                f"blocks cannot go to a host or disk tier"
            )

    def _fill(self, block: int, seed: int) -> None:
        generator, slots = torch.Generator().manual_seed(seed), self._slots([block])
        for layer in range(self.num_layers):
            k, v = self.store.read(layer, slots)
            noise = (torch.randn(t.shape[1:], generator=generator).to(t) for t in (k, v))
            self.store.write(layer, slots[0], *noise)

    def _read(self, block: int) -> list[Tensor]:
        """K and V of every layer as bytes, so that NaN equals itself."""
        slots = self._slots([block])
        return [t.contiguous().view(torch.uint8) for i in range(self.num_layers) for t in self.store.read(i, slots)]

    def get(self, blocks: Sequence[int]) -> list[Tensor]:
        """A copy of each block's bytes; it does not change when the block is reused."""
        # each in memory of its own: a tier that lets one go must not keep the room of all
        return [block.clone() for block in self._rows.get(self._slots(blocks), len(blocks))]

    def put(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Fill blocks with bytes that `get` gave. A wrong number of bytes is a ValueError, and nothing is written."""
        bad = next((c for c in contents if c.numel() != self.nbytes), None)
        if bad is not None:
            raise ValueError(f"a block ({self.layout}) has {self.nbytes} bytes, got {bad.numel()}")
        self._rows.put(self._slots(blocks), torch.stack(list(contents)).to(self.device))

    def _slots(self, blocks: Sequence[int]) -> Tensor:
        """[1, blocks * block_size] int64."""
        first = torch.tensor(blocks, dtype=torch.int64)[:, None] * self.block_size
        return (first + torch.arange(self.block_size)).reshape(1, -1).to(self.device)


class _Rows(Protocol):
    """The bytes of slots, row_bytes of each."""

    row_bytes: int
    layout: str

    def get(self, slots: Tensor, blocks: int) -> Tensor:
        """slots [1, tokens] → uint8 [blocks, nbytes], a copy on the CPU."""
        ...

    def put(self, slots: Tensor, contents: Tensor) -> None:
        """slots [1, tokens], contents uint8 [blocks, nbytes]."""
        ...


class _Raw:
    """The store's own tensors, as they lie there."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.planes = [t.view(torch.uint8).flatten(1) for t in tensors]  # [slots, bytes], the same memory
        self.row_bytes = sum(plane.shape[1] for plane in self.planes)
        kinds = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape[1:])}" for t in tensors)
        self.layout = f"{len(self.planes)} tensors of " + " and ".join(dict.fromkeys(kinds))

    def get(self, slots: Tensor, blocks: int) -> Tensor:
        return torch.cat([plane[slots[0]].view(blocks, -1) for plane in self.planes], dim=1).cpu()

    def put(self, slots: Tensor, contents: Tensor) -> None:
        size = slots.numel() // len(contents)
        parts = contents.split([size * plane.shape[1] for plane in self.planes], dim=1)
        for plane, part in zip(self.planes, parts, strict=True):
            plane[slots[0]] = part.reshape(slots.numel(), -1)


def _checked(raw: Any, store: KVStore) -> list[Tensor]:
    """A store's raw_tensors, if they can be moved as bytes."""
    name, slots = type(store).__name__, store.num_slots
    if not isinstance(raw, (list, tuple)) or not raw or not all(isinstance(t, Tensor) for t in raw):
        raise ValueError(f"raw_tensors of {name} must be a list of tensors, got {raw!r:.60}")
    for t in raw:
        if t.dim() < 2 or len(t) != slots or not t.is_contiguous():
            what = "contiguous" if t.is_contiguous() else "not contiguous"
            raise ValueError(f"raw_tensors of {name} must be contiguous, [{slots} slots, ...] each, got {list(t.shape)}, {what}")
    return list(raw)


class _Values:
    """K and V as the store reads and writes them."""

    def __init__(self, store: KVStore, num_layers: int, some: Tensor):
        self.store, self.num_layers = store, num_layers
        k, v = store.read(0, some)
        self.dtype, self.shapes = k.dtype, (k.shape[2:], v.shape[2:])
        self.row_bytes = num_layers * sum(shape.numel() for shape in self.shapes) * self.dtype.itemsize
        k_shape, v_shape = (list(shape) for shape in self.shapes)
        self.layout = f"{num_layers} layers of {str(self.dtype).removeprefix('torch.')} K {k_shape} and V {v_shape}"

    def get(self, slots: Tensor, blocks: int) -> Tensor:
        layers = []
        for layer in range(self.num_layers):
            k, v = self.store.read(layer, slots)
            layers.append(torch.cat((k.reshape(blocks, -1), v.reshape(blocks, -1)), dim=1).cpu())
        return torch.stack(layers, dim=1).view(torch.uint8).flatten(1)

    def put(self, slots: Tensor, contents: Tensor) -> None:
        size = slots.numel() // len(contents)
        k_shape, v_shape = self.shapes
        layers = contents.view(self.dtype).view(len(contents), self.num_layers, -1)
        for layer in range(self.num_layers):
            k, v = layers[:, layer].split([size * k_shape.numel(), size * v_shape.numel()], dim=1)
            self.store.write(layer, slots[0], k.reshape(-1, *k_shape), v.reshape(-1, *v_shape))
