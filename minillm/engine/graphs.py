"""cuda_graphs=True: decode steps of a few fixed sizes, recorded once and replayed.

A step that is replayed reads and writes the same memory every time. So a batch is padded to the next size up, its tensors are
copied into that size's buffers, and the recording runs: on a GPU as one launch in place of hundreds (a CUDA graph), on a CPU as
the same function called on the same buffers, which saves nothing, but runs and tests every line except the recording itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Callable, Protocol, Sequence

import torch
from torch import Tensor

from minillm.attention.backend import AttentionBackend
from minillm.attention.torch_backend import RowGroup, TorchAttention
from minillm.cache.kv_store import KVStore
from minillm.config import EngineConfig
from minillm.engine.batch import ForwardBatch
from minillm.engine.compiled import CompiledDecode, all_decode, decode_rows
from minillm.model.transformer import Transformer

MIN_KEYS = 32
"""The smallest bucket of keys: an exact size below it would save next to nothing and cost a recording."""
COPIES = 5
"""Tensors copied into the buffers before a replay: token ids, positions, slots, the slots of the keys, the mask."""

StepFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Padding(Protocol):
    """The seam: which sizes are recorded, and how a batch is brought to one of them."""

    def bucket(self, rows: int, most: int) -> int:
        """The size for a batch of that many rows, from rows to most: the size of the largest batch."""
        ...

    def pad(self, batch: ForwardBatch, rows: int) -> ForwardBatch:
        """The batch with padding rows behind its own, ``rows`` together. They compute one token each and write no live slot."""
        ...


class PowersOfTwo:
    """1, 2, 4, 8, … and the largest batch itself: less than half of a batch is padding, and few sizes serve every batch."""

    def bucket(self, rows: int, most: int) -> int:
        return min(1 << (rows - 1).bit_length(), most)

    def pad(self, batch: ForwardBatch, rows: int) -> ForwardBatch:
        return batch.padded(rows - batch.num_rows)


class DecodeGraphs:
    """Runs a batch in which every row computes one token: padded, copied into the buffers of its size, replayed.

    step: computes logits [rows, vocab] from (token_ids, positions, slots, kv_slots, mask), see ``compiled.decode_rows``.
    max_rows: a batch of more rows is not accepted. max_keys: keys, too, are padded, to a power of two but not beyond this.
    A (rows, keys) size is recorded when it is first met. All recordings share one pool of memory: a replay's logits are
    overwritten by the next replay.
    """

    def __init__(
        self, step: StepFn, backend: TorchAttention, dtype: torch.dtype, device: torch.device, max_rows: int, max_keys: int,
        padding: Padding | None = None, fused: bool = False,
    ):  # fmt: skip
        self.step, self.backend, self.dtype, self.device, self.fused = step, backend, dtype, device, fused
        self.max_rows, self.max_keys, self.padding = max_rows, max_keys, padding or PowersOfTwo()
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @classmethod
    def of(
        cls, options: EngineConfig, max_model_len: int, model: Transformer, store: KVStore, backend: AttentionBackend,
        compiled: CompiledDecode | None,
    ) -> "DecodeGraphs | None":  # fmt: skip
        """What options.cuda_graphs asks for, over the compiled step where there is one."""
        if options.cuda_graphs is False:
            return None
        if not isinstance(backend, TorchAttention):
            raise ValueError("cuda_graphs replays the torch attention backend's steps; leave attention_backend='auto'")
        step = compiled.step if compiled else partial(decode_rows, model, store, backend)
        most = min(options.max_num_seqs, options.max_num_batched_tokens)
        padding = None if options.cuda_graphs is True else options.cuda_graphs
        return cls(step, backend, model.dtype, model.device, most, max_model_len, padding, fused=compiled is not None)

    def accepts(self, batch: ForwardBatch) -> bool:
        return all_decode(batch) and batch.num_rows <= self.max_rows

    def pad(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch as it will be computed: brought to its size, with the logits of every row."""
        rows = self.padding.bucket(batch.num_rows, self.max_rows)
        if not batch.num_rows <= rows <= self.max_rows:
            raise RuntimeError(
                f"{batch.num_rows} rows were to be padded to {rows}; it must be up to {self.max_rows}, and no fewer"
            )
        full = self.padding.pad(batch, rows)
        if full.num_rows != rows:
            raise RuntimeError(f"a batch was to be padded to {rows} rows and has {full.num_rows}")
        return replace(full, logit_indices=torch.arange(rows, device=full.token_ids.device))

    def plan(self, batch: ForwardBatch) -> list[RowGroup]:
        return [self.backend.single_group(batch, self.dtype)]

    def run(self, batch: ForwardBatch, plan: Sequence[RowGroup]) -> Tensor:
        """Logits [rows, vocab] of a padded batch."""
        (group,) = plan
        size = batch.num_rows, self.keys_bucket(group.slots.shape[1])
        if size not in self._graphs:
            self._graphs[size] = Graph(self.step, *size, self.dtype, self.device, self._pool)
        return self._graphs[size].replay(batch, group)

    def keys_bucket(self, keys: int) -> int:
        """Keys that a batch whose longest row reads that many is padded to."""
        return max(keys, min(max(MIN_KEYS, 1 << (keys - 1).bit_length()), self.max_keys))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The (rows, keys) sizes recorded so far."""
        return sorted(self._graphs)

    def launches(self, launches: int) -> int:
        """What the host starts in a step of that many operators: the copies, and the operators or one graph of them."""
        return COPIES + (1 if self.device.type == "cuda" else launches)


class Graph:
    """The buffers of one size, and the step recorded over them."""

    def __init__(self, step: StepFn, rows: int, keys: int, dtype: torch.dtype, device: torch.device, pool: Any = None):
        ids = partial(torch.zeros, dtype=torch.int64, device=device)
        self.mask = torch.full((rows, 1, 1, keys), float("-inf"), dtype=dtype, device=device)
        self.mask[..., 0] = 0  # before the first batch all rows are padding: they read and write the null block's first slot
        self.token_ids, self.positions, self.slots, self.kv_slots = ids(rows), ids(rows), ids(rows), ids(rows, keys)
        inputs = self.token_ids, self.positions, self.slots, self.kv_slots, self.mask
        self._run = partial(step, *inputs) if device.type == "cpu" else record(step, inputs, pool)

    def replay(self, batch: ForwardBatch, group: RowGroup) -> Tensor:
        """Logits [rows, vocab]. Keys beyond those of the batch are the null slot, masked."""
        assert group.mask is not None
        keys = group.slots.shape[1]
        self.token_ids.copy_(batch.token_ids)
        self.positions.copy_(batch.positions)
        self.slots.copy_(batch.slots)
        self.kv_slots[:, :keys].copy_(group.slots)
        self.kv_slots[:, keys:].zero_()
        self.mask[..., :keys].copy_(group.mask)
        self.mask[..., keys:].fill_(float("-inf"))
        return self._run()


def record(step: StepFn, inputs: Sequence[Tensor], pool: Any) -> Callable[[], Tensor]:
    """Capture one call of step as a CUDA graph; what is returned replays it on whatever its inputs then hold."""
    # once outside the recording: what torch and its libraries set up at their first use cannot be recorded
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # thread_local: with overlap=True another thread may copy the next step's tensors meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        logits = step(*inputs)

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay
