"""ForwardBatch: every tensor of one step, passed explicitly from room to room."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.cache.block_pool import NULL_BLOCK
from minillm.model.loads import ExpertLoads


@dataclass(frozen=True)
class Row:
    """One request's share of a step: its tokens at positions start … start + len(token_ids) - 1, and its block table.

    A row without a table is padding: it costs what a token costs, writes to the null block, and its logits are dropped. Where the
    last num_drafts tokens are drafts, the logits of each of them are wanted too.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    wants_logits: bool = True
    num_drafts: int = 0

    @property
    def q_len(self) -> int:
        return len(self.token_ids)

    @property
    def kv_len(self) -> int:
        return self.start + len(self.token_ids)


PADDING_ROW = Row(token_ids=(0,), start=0, blocks=(NULL_BLOCK,), wants_logits=False)


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of different lengths, laid end to end without padding between them.

    token_ids, positions, slots: [tokens] int64; slots say where each token's KV goes.
    q_lens, kv_lens: [rows] tokens of this step, and tokens visible after it. tables: [rows] block tables.
    logit_indices: [samples] int64, the tokens whose logits are wanted.
    num_padding: rows at the end that belong to no request.
    loads: where a mixture of experts notes who got how many tokens; the one thing here that the model writes.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    tables: tuple[Sequence[int], ...]
    block_size: int
    logit_indices: Tensor
    num_padding: int = 0
    loads: ExpertLoads = field(default_factory=ExpertLoads, compare=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.q_lens)

    @classmethod
    def build(
        cls, rows: Sequence[Row], block_size: int, num_padding: int = 0, device: torch.device | str = "cpu"
    ) -> "ForwardBatch":
        """One row per request, in the order given, then num_padding padding rows. Logits are those of a row's last token and
        of the one before each draft."""
        all_rows = [*rows, *[PADDING_ROW] * num_padding]
        tokens = np.concatenate([np.asarray(r.token_ids, dtype=np.int64) for r in all_rows])
        positions = np.concatenate([np.arange(r.start, r.kv_len, dtype=np.int64) for r in all_rows])
        slots = np.concatenate([slots_of(r.blocks, block_size, r.start, r.kv_len) for r in all_rows])
        ends = np.cumsum([r.q_len for r in all_rows], dtype=np.int64) - 1
        wanted = [np.arange(end - r.num_drafts, end + 1) for r, end in zip(all_rows, ends, strict=True) if r.wants_logits]
        sampled = np.concatenate(wanted) if wanted else np.empty(0, dtype=np.int64)

        return cls(
            to_device(tokens, device),
            to_device(positions, device),
            to_device(slots, device),
            tuple(r.q_len for r in all_rows),
            tuple(r.kv_len for r in all_rows),
            tuple(r.blocks for r in all_rows),
            block_size,
            to_device(sampled, device),
            num_padding,
        )

    def padded(self, extra: int) -> "ForwardBatch":
        """The same batch with that many padding rows more at its end."""
        if not extra:
            return self
        more = ForwardBatch.build([], self.block_size, extra, self.token_ids.device)
        return replace(
            self, token_ids=torch.cat([self.token_ids, more.token_ids]), positions=torch.cat([self.positions, more.positions]),
            slots=torch.cat([self.slots, more.slots]), q_lens=self.q_lens + more.q_lens, kv_lens=self.kv_lens + more.kv_lens,
            tables=self.tables + more.tables, num_padding=self.num_padding + extra,
        )  # fmt: skip


def to_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """The array as a tensor there. A copy to a GPU does not wait for the work that is queued on it."""
    tensor = torch.from_numpy(array)
    return tensor if torch.device(device).type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def slots_of(blocks: Sequence[int], block_size: int, start: int, stop: int) -> np.ndarray:
    """Slots of positions start … stop - 1 in a block table, int64."""
    return slots_at(blocks, block_size, np.arange(start, stop, dtype=np.int64))


def slots_at(blocks: Sequence[int], block_size: int, positions: np.ndarray) -> np.ndarray:
    """Slots of these positions [n] in a block table, int64."""
    return np.asarray(blocks, dtype=np.int64)[positions // block_size] * block_size + positions % block_size
