"""KV in 8 bits: K and V of each token and head on a grid of their own, with one number of 16 or 32 bits beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.perf.work import Work

STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {"int8": 127.0, "fp8": 448.0}


class QuantisedKVStore:
    """Like PlainKVStore with half the bytes of 16 bits: per layer values [slots, 2, kv_heads, head_dim] of one byte, and reaches
    [slots, 2, kv_heads], the largest magnitude of each row.

    A row x is stored as x / reach · largest, rounded, where largest is 127 for int8 and 448 for fp8 (e4m3). Rows are quantised
    when they are written and read back that way at once, by the step that wrote them too: no output depends on how a prompt was
    cut into chunks. The largest value comes back exactly, so that writing what was read changes nothing. A row that holds NaN or
    infinity comes back as NaN; no other token or head notices. raw_tensors: all of it, for whoever moves bytes.
    """

    def __init__(self, kind: str, values: Sequence[Tensor], reaches: Sequence[Tensor], dtype: torch.dtype):
        self.kind, self.values, self.reaches, self.dtype = kind, list(values), list(reaches), dtype
        self.largest = LARGEST[kind]
        self.raw_tensors = [*self.values, *self.reaches]
        self.num_slots = self.values[0].shape[0]
        self._kv_shape = self.values[0].shape[1:]
        self.bytes_per_token = sum(t[0].nbytes for t in self.raw_tensors)

    @classmethod
    def allocate(
        cls, kind: str, config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        shared: bool = False,
    ) -> "QuantisedKVStore":  # fmt: skip
        """kind: "int8" or "fp8". shared: one layer's room for all of them, see PlainKVStore."""
        layers, shape = range(1 if shared else config.num_layers), (num_slots, 2, config.num_kv_heads)
        values = [torch.empty((*shape, config.head_dim), dtype=STORED[kind], device=device) for _ in layers]
        reaches = [torch.empty(shape, dtype=reach_dtype(dtype), device=device) for _ in layers]
        for value, reach in zip(values, reaches, strict=True):  # padding reads the null block's first slot
            value[:1].view(torch.uint8).zero_()
            reach[:1].zero_()
        return cls(kind, values, reaches, dtype)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        layer %= len(self.values)
        kv = torch.stack((k, v), dim=1)
        reach = kv.abs().amax(-1).to(self.reaches[0].dtype)
        # a row of zeros has nothing to divide by; one near zero must not divide by what rounds to it
        unit = reach.to(torch.promote_types(kv.dtype, torch.float32)).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        scaled = (kv / unit * self.largest).clamp(-self.largest, self.largest)
        self.reaches[layer].index_copy_(0, slots, reach)
        if self.kind == "int8":
            self.values[layer].index_copy_(0, slots, scaled.round().nan_to_num(0).to(torch.int8))
        else:  # torch moves bytes where it does not know how to move floats of 8 bits
            self.values[layer].view(torch.uint8).index_copy_(0, slots, scaled.to(torch.float8_e4m3fn).view(torch.uint8))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        layer %= len(self.values)
        rows = F.embedding(slots, self.values[layer].view(torch.uint8).flatten(1))
        reach = F.embedding(slots, self.reaches[layer].flatten(1)).unflatten(-1, self._kv_shape[:-1])
        exact = torch.promote_types(self.dtype, torch.float32)
        kv = rows.view(STORED[self.kind]).unflatten(-1, self._kv_shape).to(exact)
        kv = kv.div_(self.largest).mul_(reach.unsqueeze(-1)).to(self.dtype)  # in place: this much memory is slow to come by
        return kv[:, :, 0], kv[:, :, 1]

    def recount(self, work: Work) -> Work:
        """Work that was counted for KV in the model's dtype, as it is here: fewer bytes of KV, and codes that are written and
        read once more on their way between. The small operators that convert them are not counted as launches."""
        width = self._kv_shape[-1]
        plain, here = width * self.dtype.itemsize, width + self.reaches[0].element_size()
        read, write = work.kv_read_bytes // plain * here, work.kv_write_bytes // plain * here
        between = 2 * (read + write)
        return replace(work, kv_read_bytes=read, kv_write_bytes=write, activation_bytes=work.activation_bytes + between)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy slots to others in every layer, byte for byte; all are read before any is written."""
        for value, reach in zip(self.values, self.reaches, strict=True):
            raw = value.view(torch.uint8)
            raw[target], reach[target] = raw[source], reach[source]

    def poison(self, slots: Tensor) -> None:
        for reach in self.reaches:
            reach[slots] = float("nan")


def reach_dtype(dtype: torch.dtype) -> torch.dtype:
    """A row's largest magnitude is a number of the model's own 16-bit dtype, and close to one of 32 bits otherwise."""
    return dtype if dtype.itemsize == 2 else torch.float32


def bytes_per_element(kv_dtype: str, dtype: torch.dtype, head_dim: int) -> float:
    """Bytes that one element of K or V takes, its share of the number beside its row included."""
    return dtype.itemsize if kv_dtype == "auto" else 1 + reach_dtype(dtype).itemsize / head_dim
