"""Where keys and values lie: one row per slot, in every layer."""

from __future__ import annotations

from typing import Protocol, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.perf.work import Work


class KVStore(Protocol):
    """Slot s of a layer keeps K and V of one token: [kv_heads, head_dim] each. Slot = block * block_size + offset."""

    num_slots: int
    bytes_per_token: int

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """slots [tokens]; k, v [tokens, kv_heads, head_dim]."""
        ...

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots [rows, length] → k, v, each [rows, length, kv_heads, head_dim], in the model's dtype."""
        ...

    def poison(self, slots: Tensor) -> None:
        """Overwrite slots with NaN, so that a test sees any later read of them."""
        ...


def copy_slots(store: KVStore, num_layers: int, source: Tensor, target: Tensor) -> None:
    """Copy slots to others in every layer, all read before any is written. source, target: [n] int64.

    A store may have a ``copy(source, target)`` of its own; one that has none is read and written, which is exact where it keeps
    what it was given.
    """
    copy = getattr(store, "copy", None)
    if copy is not None:
        copy(source, target)
        return
    for layer in range(num_layers):
        k, v = store.read(layer, source[None])
        store.write(layer, target, k[0], v[0])


def recounted(store: KVStore, work: Work) -> Work:
    """Work that was counted for KV in the model's dtype, as this store keeps it: a store of other bytes has a ``recount(work)``
    of its own."""
    recount = getattr(store, "recount", None)
    counted: Work = work if recount is None else recount(work)
    return counted


class PlainKVStore:
    """K and V in the model's own dtype, side by side: per layer [slots, 2, kv_heads, head_dim], so that one gather fetches both.

    With one tensor for several layers (``PlainKVStore.shared``) each layer overwrites the last one's: enough when nothing is
    remembered from one step to the next.
    """

    def __init__(self, layers: Sequence[Tensor]):
        self.layers = list(layers)
        self.num_slots = self.layers[0].shape[0]
        self._kv_shape = self.layers[0].shape[1:]
        self.bytes_per_token = len(self.layers) * self._kv_shape.numel() * self.layers[0].element_size()

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu", shared: bool = False
    ) -> "PlainKVStore":
        shape = (num_slots, 2, config.num_kv_heads, config.head_dim)
        # empty, not zeros: the operating system commits a page when it is first written, so an unused pool costs nothing
        layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(1 if shared else config.num_layers)]
        for kv in layers:
            kv[:1].zero_()  # but padding rows read the null block's first slot, and must not find NaN there
        return cls(layers)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.layers[layer % len(self.layers)].index_copy_(0, slots, torch.stack((k, v), dim=1))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        # embedding is torch's fastest gather of rows on a CPU
        rows = F.embedding(slots, self.layers[layer % len(self.layers)].flatten(1))
        kv = rows.unflatten(-1, self._kv_shape)
        return kv[:, :, 0], kv[:, :, 1]

    def copy(self, source: Tensor, target: Tensor) -> None:
        for kv in self.layers:
            kv[target] = kv[source]

    def poison(self, slots: Tensor) -> None:
        for kv in self.layers:
            kv[slots] = float("nan")
