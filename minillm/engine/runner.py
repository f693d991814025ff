"""ModelRunner: turns a scheduled step into a ForwardBatch, the batch into logits, and the logits into tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Mapping, Protocol, Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.attention.backend import AttentionBackend
from minillm.cache.kv_store import KVStore, copy_slots, recounted
from minillm.engine.batch import ForwardBatch, Row, to_device
from minillm.engine.compiled import CompiledDecode
from minillm.engine.graphs import DecodeGraphs
from minillm.engine.request import Request
from minillm.engine.sampler import Sampled
from minillm.engine.scheduler import Scheduled, SchedulerOutput
from minillm.model.transformer import Transformer
from minillm.perf.work import Work
from minillm.sampling_params import SamplingParams
from minillm.spec.draft import NO_DRAFT, Draft
from minillm.spec.verify import AcceptRule, accept_or_replace, verify_all

UNKNOWN = 0
"""Stands in a batch for a token that the step before has not sampled yet."""


class ForwardPath(Protocol):
    """One way to compute the model's forward pass. fused: its small operators are compiled into few."""

    fused: bool

    def plan(self, batch: ForwardBatch) -> Any: ...
    def run(self, batch: ForwardBatch, plan: Any) -> Tensor: ...


class Eager:
    """Operator by operator: any batch, any store, any attention backend."""

    fused = False

    def __init__(self, model: Transformer, store: KVStore, backend: AttentionBackend):
        self.model, self.store, self.backend = model, store, backend

    def plan(self, batch: ForwardBatch) -> Any:
        return self.backend.plan(batch, self.model.dtype)

    def run(self, batch: ForwardBatch, plan: Any) -> Tensor:
        logits: Tensor = self.model(batch, self.store, self.backend, plan)
        return logits


@dataclass(frozen=True)
class Seat:
    """A row that gets a token, as it is when its step is launched; num_tokens: how many stand before that token. draft: what
    is computed behind them, and may give more tokens than one."""

    request: Request
    params: SamplingParams
    seed: int
    num_tokens: int
    draft: Draft = NO_DRAFT


@dataclass(frozen=True)
class Step:
    """All that a step needs but the tokens of the step before it. path: who computes it. padding: rows that the path added.

    unknown: where in batch.token_ids tokens of the step before belong, and whose. copies: blocks to copy first.
    """

    path: ForwardPath
    batch: ForwardBatch
    plan: Any
    work: Work
    padding: int
    seats: list[Seat]
    unknown: list[tuple[int, Request]]
    copies: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class StepResult:
    """What every seat got, in the order of Step.seats: one token, and one more for each accepted draft. states: [seats, hidden],
    those that gave the last tokens, where a proposer wants them. expert_counts: rows that each expert got, by layer."""

    tokens: dict[Request, list[Sampled]]
    states: Tensor | None = None
    expert_counts: Mapping[int, Sequence[int]] = field(default_factory=dict)


class ModelRunner:
    """Owns the model, the KV store and the attention backend; keeps nothing from one step to the next but the KV.

    ``prepare`` is the host's half of a step, ``run`` the device's; ``forward`` is the model alone.
    """

    def __init__(
        self,
        model: Transformer,
        store: KVStore,
        backend: AttentionBackend,
        block_size: int,
        compiled: CompiledDecode | None = None,
        graphs: DecodeGraphs | None = None,
        wants_states: bool = False,
        accept_rule: AcceptRule = accept_or_replace,
    ):
        """wants_states: hand out hidden states with the tokens, which only the eager path can. accept_rule: of drawn drafts."""
        self.model, self.store, self.backend, self.block_size = model, store, backend, block_size
        self.compiled, self.graphs, self.eager = compiled, graphs, Eager(model, store, backend)
        self.wants_states, self.accept_rule = wants_states, accept_rule

    def prepare(self, output: SchedulerOutput) -> Step:
        """Build the tensors and the attention plan, and count the work. Nothing here needs the step before to have run."""
        rows = [row_of(s) for s in output.scheduled]
        batch = ForwardBatch.build(rows, self.block_size, output.padded_tokens, self.model.device)
        path = self._path(batch)
        full = self.graphs.pad(batch) if path is self.graphs and self.graphs else batch
        plan = path.plan(full)
        seats = [
            Seat(s.request, s.request.params, s.request.seed, s.request.num_tokens, s.draft)
            for s in output.scheduled
            if s.catches_up
        ]
        ends = accumulate(s.num_tokens for s in output.scheduled)
        unknown = [(end - 1, s.request) for s, end in zip(output.scheduled, ends) if s.catches_up and s.request.num_pending]
        work = self._copy_work(len(output.copies)) + self._work(path, full, plan)
        return Step(path, full, plan, work, full.num_rows - batch.num_rows, seats, unknown, output.copies)

    @torch.inference_mode()
    def run(self, step: Step, before: StepResult | None = None) -> StepResult:
        """Compute and sample. before: what the step before this one gave, if that was in flight when this one was prepared."""
        if step.copies:
            self._copy(step.copies)
        if step.unknown:
            assert before is not None
            at, owners = zip(*step.unknown)
            ids = np.array([before.tokens[request][-1].token_id for request in owners])
            device = step.batch.token_ids.device
            step.batch.token_ids[to_device(np.array(at), device)] = to_device(ids, device)
        states = None
        if self.wants_states:
            states = self.model.hidden(step.batch, self.store, self.backend, step.plan)
            logits = self.model.head(states)
        else:
            logits = step.path.run(step.batch, step.plan)
        tokens = verify_all(logits, step.seats, self.accept_rule)
        if states is not None:  # of each seat's rows, the one that gave its last token
            firsts = accumulate((1 + len(seat.draft) for seat in step.seats), initial=0)
            states = states[[first + len(got) - 1 for first, got in zip(firsts, tokens)]]
        owned = {seat.request: got for seat, got in zip(step.seats, tokens, strict=True)}
        return StepResult(owned, states, step.batch.loads.counts())

    def _copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in every layer."""
        slots = (np.array(blocks)[:, :, None] * self.block_size + np.arange(self.block_size)).swapaxes(0, 1).reshape(2, -1)
        copy_slots(self.store, self.model.config.num_layers, *to_device(slots, self.model.device))

    def _copy_work(self, num_blocks: int) -> Work:
        moved = num_blocks * self.block_size * self.store.bytes_per_token
        # a gather reads the blocks and writes them beside, a scatter reads that and writes them where they belong
        launches = 2 * self.model.config.num_layers if num_blocks else 0
        return Work(kv_read_bytes=moved, kv_write_bytes=moved, activation_bytes=2 * moved, launches=launches)

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Work]:
        """Logits [samples, vocab] of the tokens that batch.logit_indices names, and the work of computing them."""
        path = self.compiled if self.compiled is not None and self.compiled.accepts(batch) else self.eager
        plan = path.plan(batch)
        logits = path.run(batch, plan)
        return logits, self._work(path, batch, plan) + self.model.routed_work(batch.loads.counts(), self.backend)

    def _path(self, batch: ForwardBatch) -> ForwardPath:
        if self.wants_states:
            return self.eager
        for path in (self.graphs, self.compiled):
            if path is not None and path.accepts(batch):
                return path
        return self.eager

    def _work(self, path: ForwardPath, batch: ForwardBatch, plan: Any) -> Work:
        model = self.compiled.model_for(batch.num_rows) if path.fused and self.compiled else self.model
        work = recounted(self.store, model.work(batch, self.backend, plan, fused=path.fused))
        step_work = getattr(self.backend, "step_work", None)
        if step_work is not None:
            work += step_work(batch, plan, self.model.config, self.model.dtype, self.store)
        return replace(work, launches=self.graphs.launches(work.launches)) if path is self.graphs and self.graphs else work


def row_of(s: Scheduled) -> Row:
    """The scheduled tokens with a block table of their own: the request's may grow while the step is in flight."""
    own = s.num_tokens - len(s.draft)
    ids: Sequence[int] = s.request.token_ids[s.start : s.start + own]
    missing = own - len(ids)  # the last token of a request, while the step that samples it is in flight
    tokens = [*ids, *[UNKNOWN] * missing, *s.draft.token_ids]
    return Row(tokens, s.start, tuple(s.request.blocks), wants_logits=s.catches_up, num_drafts=len(s.draft))
