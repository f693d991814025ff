"""ModelRunner: turns a scheduled step into a ForwardBatch, and the batch into logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch
from torch import Tensor

from minillm.attention.backend import AttentionBackend
from minillm.cache.kv_store import KVStore
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.compiled import CompiledDecode
from minillm.engine.scheduler import Scheduled, SchedulerOutput
from minillm.model.transformer import Transformer
from minillm.perf.work import Work


@dataclass(frozen=True)
class StepResult:
    """logits: [samples, vocab] in the order of ``sampled``, the entries that caught up. work: counted for the whole step."""

    logits: Tensor
    sampled: list[Scheduled]
    work: Work


class ModelRunner:
    """Owns the model, the KV store and the attention backend; keeps nothing from one step to the next but the KV."""

    def __init__(
        self,
        model: Transformer,
        store: KVStore,
        backend: AttentionBackend,
        block_size: int,
        compiled: CompiledDecode | None = None,
    ):
        self.model, self.store, self.backend, self.block_size, self.compiled = model, store, backend, block_size, compiled

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> StepResult:
        rows = [row_of(s) for s in output.scheduled]
        batch = ForwardBatch.build(rows, self.block_size, output.padded_tokens, self.model.device)
        logits, work = self.forward(batch)
        return StepResult(logits, [s for s in output.scheduled if s.catches_up], work)

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Work]:
        if self.compiled is not None and self.compiled.accepts(batch):
            logits, groups = self.compiled.run(batch)
            return logits, self.model.work(batch, self.backend, groups, fused=True)
        plan = self.backend.plan(batch, self.model.dtype)
        logits = self.model(batch, self.store, self.backend, plan)
        return logits, self.model.work(batch, self.backend, plan)


def row_of(s: Scheduled) -> Row:
    start = s.request.num_computed_tokens
    ids: Sequence[int] = s.request.token_ids[start : start + s.num_tokens]
    return Row(ids, start, s.request.blocks, wants_logits=s.catches_up)
