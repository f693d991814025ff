"""A smaller model as the drafter: it decodes a few tokens ahead with its own KV, in the slots that the target's requests hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Sequence

import torch
from torch import Tensor

from minillm.attention.backend import AttentionBackend
from minillm.cache.kv_store import KVStore
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.request import Request
from minillm.engine.sampler import most_likely, pick, uniform
from minillm.model.transformer import Transformer
from minillm.perf.work import Work
from minillm.spec.draft import Draft
from minillm.spec.verify import dense_distribution

DRAW = 3
"""Stream of random numbers that drafts are drawn with: another than those which accept or refuse them."""


@dataclass
class Progress:
    """Which tokens of a request the drafter has computed, and in which blocks their KV lies."""

    token_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_preemptions: int = 0

    def still_valid(self, request: Request, block_size: int) -> int:
        """Leading tokens that are the request's, with KV that is where the request's block table says. A refused draft, a
        preemption and a block that was replaced all show here."""
        if request.num_preemptions != self.num_preemptions:
            return 0
        # a block that went out of the window is gone for good, and its keys are not read again
        same_blocks = _common([b if now else now for b, now in zip(self.blocks, request.blocks)], request.blocks)
        # one token is always computed anew: its logits are wanted
        return min(_common(self.token_ids, request.token_ids), same_blocks * block_size, request.num_tokens - 1)


class DraftModelProposer:
    """Lets another model of the same vocabulary decode ahead (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv
    2302.01318). store: a KV store of the drafter's shape with as many slots as the target's; a request's block table serves both.

    A greedy request gets the drafter's most likely tokens, a sampling one tokens drawn under its own parameters. price: what a
    drafted token costs, in steps of the target: the bytes that the drafter reads against those that the target reads.
    """

    def __init__(self, model: Transformer, store: KVStore, backend: AttentionBackend, block_size: int, price: float = 0.0):
        self.model, self.store, self.backend, self.block_size, self.price = model, store, backend, block_size, price
        self.weight_bytes = model.weight_bytes()
        self._progress: dict[str, Progress] = {}
        self._work = Work()

    def take_work(self) -> Work:
        """What the drafter has done since this was called last."""
        work, self._work = self._work, Work()
        return work

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._progress.pop(request_id, None)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        drafts: dict[str, tuple[list[int], list[Tensor]]] = {r.request_id: ([], []) for r in requests}
        active = [(r, n) for r, n in zip(requests, lengths, strict=True) if n > 0]
        step = 0
        while active:
            rows = [self._row(r, drafts[r.request_id][0]) for r, _ in active]
            batch = ForwardBatch.build(rows, self.block_size, device=self.model.device)
            plan = self.backend.plan(batch, self.model.dtype)
            logits = self.model(batch, self.store, self.backend, plan)
            self._work += self.model.work(batch, self.backend, plan)
            self._work += self.model.routed_work(batch.loads.counts(), self.backend)
            best = most_likely(logits)
            for (request, _), row, token in zip(active, logits, best, strict=True):
                ids, probs = drafts[request.request_id]
                if request.params.temperature > 0:
                    q = dense_distribution(row, request)
                    token = pick(None, q, uniform(request.seed, request.num_tokens + len(ids), DRAW))
                    probs.append(q)
                ids.append(token)
            step += 1
            active = [(r, n) for r, n in active if n > step]
        return [_draft(*drafts[r.request_id]) for r in requests]

    def _row(self, request: Request, drafted: list[int]) -> Row:
        """What the drafter has yet to compute of the request and its own draft; noted as computed."""
        tokens = request.token_ids + drafted
        if drafted:
            start = len(tokens) - 1
        else:
            known = self._progress.get(request.request_id, Progress())
            start = known.still_valid(request, self.block_size)
        self._progress[request.request_id] = Progress(tokens, list(request.blocks), request.num_preemptions)
        return Row(tokens[start:], start, request.blocks)


def _draft(ids: list[int], probs: list[Tensor]) -> Draft:
    return Draft(tuple(ids), torch.stack(probs) if probs else None)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading elements that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
