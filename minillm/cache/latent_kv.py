"""The cache of latent attention: one latent and one rotated key per token and layer, whatever the number of heads."""

from __future__ import annotations

from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model.mla_config import MLAConfig


class LatentKVStore:
    """A KVStore whose k is the rotated key [tokens, 1, rope_dim] and whose v is the latent [tokens, 1, kv_rank]; per layer they
    lie side by side, latent first: [slots, kv_rank + rope_dim].

    ``rows`` gives both as they lie: the latent attention's key, and in its first columns its value.
    """

    def __init__(self, layers: Sequence[Tensor], rank: int):
        self.layers, self.rank = list(layers), rank
        self.num_slots = self.layers[0].shape[0]
        self.bytes_per_token = sum(rows[0].nbytes for rows in self.layers)

    @classmethod
    def allocate(
        cls, shape: MLAConfig, num_layers: int, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        shared: bool = False,
    ) -> "LatentKVStore":  # fmt: skip
        """shared: one layer's room for all of them, see PlainKVStore."""
        size = num_slots, shape.cache_width
        layers = [torch.empty(size, dtype=dtype, device=device) for _ in range(1 if shared else num_layers)]
        for rows in layers:
            rows[:1].zero_()  # padding reads the null block's first slot
        return cls(layers, shape.kv_rank)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.layers[layer % len(self.layers)].index_copy_(0, slots, torch.cat((v, k), dim=-1).squeeze(1))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows(layer, slots).unsqueeze(2)
        return rows[..., self.rank :], rows[..., : self.rank]

    def rows(self, layer: int, slots: Tensor) -> Tensor:
        """slots [rows, length] → [rows, length, kv_rank + rope_dim], one gather."""
        return F.embedding(slots, self.layers[layer % len(self.layers)])

    def copy(self, source: Tensor, target: Tensor) -> None:
        for rows in self.layers:
            rows[target] = rows[source]

    def poison(self, slots: Tensor) -> None:
        for rows in self.layers:
            rows[slots] = float("nan")
