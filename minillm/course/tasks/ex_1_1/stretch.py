"""1.1 stretch: decode rows of different lengths in one step, with one read of the store."""

from __future__ import annotations

import itertools
from typing import Any, Sequence

import torch
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention, attend
from minillm.cache.kv_store import PlainKVStore
from minillm.course.expect import expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_1_1.common import TOLERANCE, Through, causal, config_of, generated, oracle, row_slots
from minillm.engine.batch import ForwardBatch


class CountingStore(PlainKVStore):
    """A store that says how often it was read and how many rows it handed out."""

    reads = gathered = 0

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        self.reads += 1
        self.gathered += slots.numel()
        return super().read(layer, slots)


def _ragged(
    lengths: Sequence[int], heads: int = 6, kv_heads: int = 2, dim: int = 8
) -> tuple[Tensor, CountingStore, list[Tensor]]:
    """Queries, a store in which only the rows' own slots hold numbers and all others NaN, and the rows' slots, shuffled."""
    total = sum(lengths)
    store = CountingStore.allocate(config_of(2, heads, kv_heads, dim), total + 9, torch.float32)
    assert isinstance(store, CountingStore)
    store.poison(torch.arange(store.num_slots))
    rows = [r.clone() for r in torch.randperm(total + 8)[:total].add(1).split(list(lengths))]
    for layer in range(2):
        store.write(layer, torch.cat(rows), *torch.randn(2, total, kv_heads, dim).unbind())
    return torch.randn(len(lengths), heads, dim), store, rows


def _ragged_compare(f: Any, lengths: Sequence[int], what: str, scale: float = 1.0, **sizes: int) -> None:
    q, store, rows = _ragged(lengths, **sizes)
    q = q * scale
    expected = []
    for i, slots in enumerate(rows):
        k, v = store.read(1, slots[None])
        expected.append(oracle(q[i], k[0], v[0]))
    expect_equal(f(q, store, 1, rows), torch.stack(expected), atol=TOLERANCE * max(1.0, scale / 100), what=what)


def _stretch_shapes(f: Any) -> None:
    q, store, rows = _ragged([4, 4, 4])
    expect_shape(f(q, store, 0, rows), [3, 6, 8], torch.float32)


def _stretch_by_hand(f: Any) -> None:
    store = PlainKVStore.allocate(config_of(), 6, torch.float32)
    v = torch.tensor([[[2.0, 0.0]], [[4.0, 2.0]], [[9.0, 9.0]]])
    store.write(0, torch.tensor([1, 2, 4]), torch.ones(3, 1, 2), v)
    out = f(torch.zeros(2, 1, 2), store, 0, [torch.tensor([1, 2]), torch.tensor([4])])
    expect_equal(out, torch.tensor([[[3.0, 1.0]], [[9.0, 9.0]]]), atol=TOLERANCE, what="rows of two tokens and of one")


def _stretch_random(f: Any) -> None:
    for lengths in ([5, 2, 9], [1, 17, 3, 8]):
        _ragged_compare(f, lengths, f"lengths {lengths}")


def _stretch_equal(f: Any) -> None:
    _ragged_compare(f, [6, 6], "rows of equal length")
    _ragged_compare(f, [5], "one row")


def _stretch_short(f: Any) -> None:
    _ragged_compare(f, [1, 1, 1], "rows of one token")
    _ragged_compare(f, [1, 30], "one token beside thirty")


def _stretch_heads(f: Any) -> None:
    _ragged_compare(f, [3, 5], "no grouping", heads=4, kv_heads=4)
    _ragged_compare(f, [3, 5], "one KV head for all", heads=5, kv_heads=1)


def _stretch_large(f: Any) -> None:
    _ragged_compare(f, [4, 7, 2], "scores of several hundred", scale=1000.0)


def _stretch_state(f: Any) -> None:
    q, store, rows = _ragged([3, 6])
    own = torch.cat(rows)
    before = store.read(0, own[None])
    with unchanged(q=q, rows=rows):
        f(q, store, 0, rows)
    expect_equal(store.read(0, own[None]), before, what="the store's content")


def _stretch_engine(f: Any) -> None:
    def answer(q: Tensor, store: Any, layer: int, batch: ForwardBatch) -> Tensor:
        rows = row_slots(batch)
        if set(batch.q_lens) == {1}:
            return f(q, store, layer, rows)
        out, starts = [], itertools.accumulate(batch.q_lens, initial=0)
        for start, new, slots in zip(starts, batch.q_lens, rows):
            k, v = (x[0] for x in store.read(layer, slots[None]))
            out.append(causal(q[start : start + new], k, v, len(slots) - new))
        return torch.cat(out)

    got = generated(attention_backend=Through(answer))
    expect_equal(got, generated(kv_cache="none"), what="tokens of three prompts that decode together")


def _stretch_budget(f: Any) -> None:
    q, store, rows = _ragged([int(n) for n in torch.randint(1, 12, (32,))])
    store.reads = store.gathered = 0
    f(q, store, 0, rows)
    expect_at_most(store.reads, 1, "reads of the store for 32 rows")
    expect_at_most(store.gathered, 32 * max(map(len, rows)), "slots gathered")


STRETCH = Task(
    "1.1 stretch",
    "One decode step for rows of different lengths",
    (
        NamedCheck("shape", _stretch_shapes, hint=2),
        NamedCheck("exact: rows of two and of one by hand", _stretch_by_hand, hint=1),
        NamedCheck("random: against one row at a time", _stretch_random, hint=1),
        NamedCheck("edges: equal lengths, one row", _stretch_equal, hint=3),
        NamedCheck("edges: rows of one token", _stretch_short, hint=3),
        NamedCheck("edges: other groupings of heads", _stretch_heads, hint=2),
        NamedCheck("edges: large scores", _stretch_large, hint=3),
        NamedCheck("state: inputs and store unchanged", _stretch_state),
        NamedCheck("engine: three prompts decode together", _stretch_engine, hint=3),
        NamedCheck("budget: one read for all rows", _stretch_budget, hint=1),
    ),
    (
        "Pad the lists of slots to the longest row, read once, and mask what is padding. A masked key has weight 0, but\n"
        "0 * NaN is NaN: pad with a slot whose content you know to be finite. Each row has at least one of its own.",
        "slots [rows, longest]; k, v [rows, longest, kv_heads, dim] → transpose to [rows, kv_heads, longest, dim];\n"
        "q [rows, heads, 1, dim]; mask [rows, 1, 1, longest], True where a key is the row's own. enable_gqa=True groups heads.",
        "lengths = torch.tensor([len(r) for r in rows]); slots = pad each row with row[0];\n"
        "mask = torch.arange(longest) < lengths[:, None]; F.scaled_dot_product_attention(..., attn_mask=mask[:, None, None, :])",
    ),
    references=(TorchAttention, attend, oracle, causal),
)
