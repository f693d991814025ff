"""Attention on the Triton kernels: keys and values are read where they lie, through block tables, without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm import kernels
from minillm.attention.torch_backend import precision_name
from minillm.attention.window import Window
from minillm.cache.kv_store import KVStore
from minillm.engine.batch import ForwardBatch
from minillm.model.config import ModelConfig
from minillm.perf.work import Work, visible_pairs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class TritonPlan:
    """What all layers of a step share. All tensors int32 on the device.

    tables [rows, blocks], padded with the null block; q_starts, q_lens, kv_lens [rows]. decode_rows [rows]: rows short enough for
    the split-KV kernel. prefill_rows, prefill_firsts [tiles]: row and first packed row of every tile of the others.
    decode_numbers: the rows of decode_rows once more, for counting without the device. splits: parts of each of them.
    block_size: tokens per block of the tables.
    """

    tables: Tensor
    q_starts: Tensor
    q_lens: Tensor
    kv_lens: Tensor
    decode_rows: Tensor
    prefill_rows: Tensor
    prefill_firsts: Tensor
    decode_numbers: frozenset[int]
    splits: int
    block_size: int


class TritonAttention:
    """Rows of a few queries go to ``paged_decode``, which splits their keys; longer ones to ``flash_prefill``.

    operators: the model's norms, rotation, KV write and gated activation, fused; see ``minillm.kernels.fused``.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, window: int | None = None, sinks: int = 0):
        """Raises ValueError naming what these kernels cannot do: see ``unsupported``."""
        reason = unsupported(config, dtype, device)
        if reason:
            raise ValueError(f"attention_backend='triton': {reason}")
        from minillm.kernels import flash_prefill, paged_decode
        from minillm.kernels.fused import FusedOperators

        self.view = Window(window, sinks)
        self.operators = FusedOperators()
        self._prefill, self._decode = flash_prefill, paged_decode
        self._group, self._kv_heads = config.group_size, config.num_kv_heads
        self.prefill_tile = flash_prefill.prefill_tile(config.head_dim, dtype, flash_prefill.is_wide(device))
        self.decode_tile = paged_decode.decode_tile(config.head_dim, dtype)
        on_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1

    @property
    def window(self) -> int | None:
        return self.view.size

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> TritonPlan:
        q_lens, kv_lens = np.array(batch.q_lens), np.array(batch.kv_lens)
        tables = np.zeros((batch.num_rows, max(1, max(map(len, batch.tables)))), dtype=np.int32)
        for row, blocks in enumerate(batch.tables):
            tables[row, : len(blocks)] = blocks
        is_short = q_lens * self._group <= self.decode_tile.m
        short, m = np.flatnonzero(is_short), self.prefill_tile.m
        tiles = [(row, first) for row in np.flatnonzero(~is_short) for first in range(0, q_lens[row] * self._group, m)]
        # tiles at the end of a prompt see most keys: started first, they do not run alone at the end
        tiles.sort(key=lambda tile: kv_lens[tile[0]] - q_lens[tile[0]] + tile[1] // self._group, reverse=True)
        rows, firsts = np.array(tiles, dtype=np.int32).reshape(-1, 2).T
        longest = max((self.view.count(int(q_lens[r]), int(kv_lens[r])) for r in short), default=0)

        def put(a: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(a, dtype=np.int32)).to(batch.token_ids.device)

        return TritonPlan(
            put(tables), put(np.cumsum(q_lens) - q_lens), put(q_lens), put(kv_lens), put(short), put(rows), put(firsts),
            frozenset(short.tolist()),
            self._decode.choose_splits(len(short), self._kv_heads, longest, self._processors), batch.block_size,
        )  # fmt: skip

    def forward(self, q: Tensor, layer: int, store: KVStore, plan: TritonPlan) -> Tensor:
        """q [tokens, heads, head_dim], its last dimension dense, → the same shape. The store must be a PlainKVStore."""
        kv = store.layers[layer % len(store.layers)]  # type: ignore[attr-defined]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if q.stride(-1) != 1:
            q = q.contiguous()
        shared = (q, kv, plan.tables, plan.q_starts, plan.q_lens, plan.kv_lens)
        view: dict[str, Any] = {"block_size": plan.block_size, "window": self.view.size, "sinks": self.view.sinks}
        self._decode.paged_decode(*shared, plan.decode_rows, out, tile=self.decode_tile, num_splits=plan.splits, **view)
        self._prefill.flash_prefill(*shared, plan.prefill_rows, plan.prefill_firsts, out, tile=self.prefill_tile, **view)
        return out

    def work(self, batch: ForwardBatch, plan: TritonPlan, config: ModelConfig, dtype: torch.dtype) -> Work:
        """Each key that a row sees is counted once: when several tiles of a long prompt read it again, the cache serves it."""
        total = Work()
        rows = range(batch.num_rows)
        for kind, chosen in (
            (self._decode, [r for r in rows if r in plan.decode_numbers]),
            (self._prefill, [r for r in rows if r not in plan.decode_numbers]),
        ):
            if not chosen:
                continue
            lengths = [(batch.q_lens[r], batch.kv_lens[r]) for r in chosen]
            splits = {"num_splits": plan.splits} if kind is self._decode else {}
            total += kind.work(
                sum(visible_pairs(q, kv, self.view.size, self.view.sinks) for q, kv in lengths),
                sum(self.view.count(q, kv) for q, kv in lengths),
                sum(q for q, _ in lengths),
                config.num_heads, config.num_kv_heads, config.head_dim, dtype.itemsize, precision_name(dtype), **splits,
            )  # fmt: skip
        return total


def unsupported(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these kernels cannot run this model here, and what to do; None when they can."""
    if (reason := kernels.missing()) is not None:
        return reason
    if dtype not in DTYPES:
        return f"the kernels compute in {', '.join(map(precision_name, DTYPES))}, got dtype={precision_name(dtype)!r}"
    if config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is above the kernels' {MAX_HEAD_DIM}; use attention_backend='torch'"
    if config.group_size > 16:
        return f"{config.group_size} query heads per KV head are above the kernels' 16; use attention_backend='torch'"
    if device.type == "cuda":
        return None
    if not kernels.interpreted():
        return (
            f"it needs a GPU, and this model is on {device}. Use attention_backend='torch', or set TRITON_INTERPRET=1 before "
            "Python starts to run the kernels in Triton's interpreter: for tiny models, thousands of times slower"
        )
    if dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly; use dtype='float32'"
    return None
