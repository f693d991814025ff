"""Where keys and values lie: one row per slot, in every layer."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.config import ModelConfig


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


class PlainKVStore:
    """K and V in the model's own dtype, side by side: [layers, slots, 2, kv_heads, head_dim].

    They lie together so that one gather fetches both. ``shared_layers=True`` keeps a single layer that every layer
    overwrites in turn: enough when nothing is remembered from one step to the next.
    """

    def __init__(self, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu", shared_layers: bool = False):
        self.num_slots = num_slots
        self._layers = 1 if shared_layers else config.num_layers
        self._kv_shape = (2, config.num_kv_heads, config.head_dim)
        # empty, not zeros: the operating system commits a page when it is first written, so an unused pool costs nothing
        self.kv = torch.empty((self._layers, num_slots, *self._kv_shape), dtype=dtype, device=device)
        # but the null block is read by padding rows and must not bring in NaN
        self.kv[:, :1].zero_()
        self.bytes_per_token = 2 * self._layers * config.kv_size * dtype.itemsize

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        kv = self.kv[layer % self._layers]
        kv[:, 0].index_copy_(0, slots, k)
        kv[:, 1].index_copy_(0, slots, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        # embedding is torch's fastest row gather on a CPU
        rows = F.embedding(slots, self.kv[layer % self._layers].flatten(1))
        kv = rows.unflatten(-1, self._kv_shape)
        return kv[:, :, 0], kv[:, :, 1]

    def poison(self, slots: Tensor) -> None:
        self.kv[:, slots] = float("nan")
