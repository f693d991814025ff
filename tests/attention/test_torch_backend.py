"""Torch attention over the paged store against a loop in float64 that knows no blocks, masks or batches."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm.attention.torch_backend import MAX_PADDING, TorchAttention, split_by_length
from minillm.cache.kv_store import PlainKVStore
from minillm.engine.batch import ForwardBatch, Row, slots_of
from minillm.model.config import ModelConfig

GROUPS = [1, 2, 3, 5, 6, 7, 8]
HEAD_DIMS = [16, 64, 80, 96, 128, 192]
BLOCK_SIZES = [1, 4, 16]


def loop_reference(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], q_lens: Sequence[int], window: int | None
) -> Tensor:
    """q [tokens, heads, dim]; keys[row], values[row] [kv_len, kv_heads, dim] → [tokens, heads, dim], one softmax at a time."""
    queries, out, token = q.double().numpy(), np.empty(tuple(q.shape)), 0
    for k, v, q_len in zip(keys, values, q_lens, strict=True):
        k_rows, v_rows, group = k.double().numpy(), v.double().numpy(), q.shape[1] // k.shape[1]
        for position in range(len(k) - q_len, len(k)):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(q.shape[1]):
                visible = slice(first, position + 1), head // group
                scores = k_rows[visible] @ queries[token, head] / math.sqrt(q.shape[2])
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ v_rows[visible] / weights.sum()
            token += 1
    return torch.from_numpy(out)


@dataclass
class Case:
    """Rows over a store in which every slot that no row owns holds NaN, but for the null block's first."""

    batch: ForwardBatch
    store: PlainKVStore
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    window: int | None

    def run(self, layer: int = 0) -> Tensor:
        backend = TorchAttention(self.window)
        return backend.forward(self.q, layer, self.store, backend.plan(self.batch, self.q.dtype))

    def expected(self) -> Tensor:
        """What the loop gives for the rows that belong to a request."""
        q_lens = self.batch.q_lens[: len(self.keys)]
        return loop_reference(self.q[: sum(q_lens)], self.keys, self.values, q_lens, self.window)

    def agrees(self, tolerance: float) -> None:
        out, expected = self.run(), self.expected()
        assert out.shape == self.q.shape and out.dtype == self.q.dtype
        assert out.isfinite().all(), "something read a slot that belongs to nobody"
        torch.testing.assert_close(out[: len(expected)].double(), expected, rtol=tolerance, atol=tolerance)


def make_case(
    lengths: Sequence[tuple[int, int]], *, group: int = 1, kv_heads: int = 1, dim: int = 16, block_size: int = 4,
    window: int | None = None, padding: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0, seed: int = 0,
) -> Case:  # fmt: skip
    """lengths: (queries, keys) of each row. Blocks are dealt out shuffled, with spare ones left over."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = np.random.default_rng(seed).permutation(np.arange(1, sum(-(-k // block_size) for _, k in lengths) + 4)).tolist()
    config = ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=group * kv_heads, num_kv_heads=kv_heads,
        head_dim=dim, max_position=64,
    )  # fmt: skip
    store = PlainKVStore.allocate(config, (max(shuffled) + 1) * block_size, dtype)
    store.poison(torch.arange(1, store.num_slots))
    rows, keys, values = [], [], []
    for q_len, kv_len in lengths:
        blocks = [shuffled.pop() for _ in range(-(-kv_len // block_size))]
        k, v = (torch.randn(kv_len, kv_heads, dim, generator=generator, dtype=torch.float64).mul(scale).to(dtype) for _ in "kv")
        slots = torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(kv_len)])
        store.write(0, slots, k, v)
        rows.append(Row([0] * q_len, kv_len - q_len, blocks))
        keys.append(k)
        values.append(v)
    batch = ForwardBatch.build(rows, block_size, padding)
    q = torch.randn(batch.num_tokens, group * kv_heads, dim, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
    return Case(batch, store, q, keys, values, window)


@st.composite
def row_lengths(draw: st.DrawFn, block_size: int) -> tuple[int, int]:
    """(queries, keys): around the edges of a block, decoding, whole prompts and chunks of one."""
    around = [n for n in (1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1) if n > 0]
    kv_len = draw(st.sampled_from(around) | st.integers(1, 40))
    return draw(st.sampled_from([1, kv_len]) | st.integers(1, kv_len)), kv_len


@settings(max_examples=100)
@given(data=st.data())
def test_any_batch_agrees_with_the_loop(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from(BLOCK_SIZES), "block size")
    case = make_case(
        data.draw(st.lists(row_lengths(block_size), min_size=1, max_size=5), "lengths"),
        group=data.draw(st.sampled_from(GROUPS), "group"), kv_heads=data.draw(st.integers(1, 2), "KV heads"),
        dim=data.draw(st.sampled_from(HEAD_DIMS), "head dim"), block_size=block_size,
        window=data.draw(st.none() | st.integers(1, 45), "window"), padding=data.draw(st.integers(0, 3), "padding"),
        seed=data.draw(st.integers(0, 99), "seed"),
    )  # fmt: skip
    case.agrees(1e-10)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_group_and_head_dim_prefills_and_decodes(group: int, dim: int) -> None:
    make_case([(5, 5), (3, 9)], group=group, kv_heads=2, dim=dim).agrees(1e-10)
    make_case([(1, 5), (1, 9)], group=group, kv_heads=2, dim=dim).agrees(1e-10)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("window", [None, 1, 3, 4])
def test_lengths_around_a_block_in_one_batch(block_size: int, window: int | None) -> None:
    lengths = sorted({1, max(block_size - 1, 1), block_size, block_size + 1})
    make_case([(n, n) for n in lengths] + [(1, n) for n in lengths], group=3, block_size=block_size, window=window).agrees(1e-10)


def test_two_queries_over_five_keys_sit_at_the_end_of_them() -> None:
    # bottom-right: the first query sees four keys, the second all five. A top-left mask would show them one and two.
    case = make_case([(2, 5)])
    case.agrees(1e-10)
    before = case.run()
    case.store.write(0, case.batch.slots[-1:], case.keys[0][-1:], case.values[0][-1:] + 1)  # the last key's value
    after = case.run()
    assert torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])


@pytest.mark.parametrize("q_len", [1, 4, 9])
def test_a_window_of_four_sees_exactly_four_keys(q_len: int) -> None:
    case = make_case([(q_len, 9)], window=4)
    weights = torch.zeros(9, 1, 16, dtype=torch.float64)
    weights[torch.arange(9), 0, torch.arange(9)] = 1  # value i is the i-th unit vector: the output is the attention weights
    slots = torch.tensor([case.batch.tables[0][p // 4] * 4 + p % 4 for p in range(9)])
    case.store.write(0, slots, case.keys[0], weights)
    seen = (case.run()[:, 0] > 0).nonzero().tolist()
    assert seen == [[i, p] for i, position in enumerate(range(9 - q_len, 9)) for p in range(max(0, position - 3), position + 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[(1, 7), (1, 3)], [(4, 7), (2, 2)]])
def test_scores_near_1e5_give_no_nan(dtype: torch.dtype, lengths: list[tuple[int, int]]) -> None:
    case = make_case(lengths, group=2, dim=16, dtype=dtype, scale=160.0)
    scores = torch.einsum("thd,khd->thk", case.q[:1].double(), case.keys[0].double().repeat_interleave(2, 1)) / 4
    assert 2e4 < scores.abs().max() < 1e6
    out = case.run()
    assert out.isfinite().all()
    # scores so large make one weight 1 and the rest 0; what is left is the rounding of the value, and in 32 bits of the score
    tolerance = {torch.float64: 1e-8, torch.float32: 1e-2, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), case.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_narrow_dtypes_agree_within_their_precision(dtype: torch.dtype, tolerance: float) -> None:
    make_case([(6, 6), (1, 20), (3, 17), (1, 18)], group=3, kv_heads=2, dim=64, dtype=dtype, window=15, padding=1).agrees(
        tolerance
    )


def test_rows_padded_to_the_longest_read_no_slot_but_the_null_blocks_first() -> None:
    case = make_case([(1, 9), (1, 7), (1, 8)])  # near enough to share one padded gather
    (group,) = TorchAttention().plan(case.batch, torch.float64)
    assert group.slots.shape == (3, 9) and group.slots[1, 7:].tolist() == [0, 0] and group.slots[2, 8:].tolist() == [0]
    owned = {int(s) for row, n in zip(group.slots, case.batch.kv_lens, strict=True) for s in row[:n]}
    assert set(group.slots.flatten().tolist()) == owned | {0}
    case.agrees(1e-10)


def test_padding_rows_are_finite_whatever_their_number_and_their_neighbours() -> None:
    for lengths in ([(1, 30)], [(7, 7)], [(1, 2), (1, 2)]):
        case = make_case(lengths, padding=5)
        case.agrees(1e-10)
        assert (case.run()[-5:] == 0).all()  # the null block's first slot is zero until a padding row writes to it


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    together = make_case([(1, 9), (4, 6), (1, 30), (4, 11), (2, 5)], group=2)
    out, at = together.run(), 0
    for i, q_len in enumerate(together.batch.q_lens):
        row = Row([0] * q_len, together.batch.kv_lens[i] - q_len, together.batch.tables[i])
        alone = dataclasses.replace(together, batch=ForwardBatch.build([row], 4), q=together.q[at : at + q_len])
        torch.testing.assert_close(alone.run(), out[at : at + q_len], rtol=1e-12, atol=1e-12)
        at += q_len


@pytest.mark.parametrize("lengths", [[(1, 5), (1, 6)], [(4, 5), (4, 9)], [(1, 30), (3, 4), (1, 2)]])
def test_queries_need_not_be_contiguous(lengths: list[tuple[int, int]]) -> None:
    case = make_case(lengths, group=3, kv_heads=2)
    plain = case.run()
    wide = torch.full((len(case.q), 10, 16), float("nan"), dtype=torch.float64)
    wide[:, 2:8] = case.q  # a slice of a fused QKV product
    for q in (
        wide[:, 2:8],
        case.q.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        case.q.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        assert not q.is_contiguous()
        torch.testing.assert_close(dataclasses.replace(case, q=q).run(), plain, rtol=1e-12, atol=1e-12)


def test_neither_queries_nor_store_are_changed() -> None:
    case = make_case([(1, 5), (3, 7)], group=2)
    q, kv = case.q.clone(), case.store.layers[0].clone()
    case.run()
    assert torch.equal(case.q, q) and torch.equal(case.store.layers[0].nan_to_num(7), kv.nan_to_num(7))


def test_each_layer_has_its_own_keys() -> None:
    case = make_case([(1, 5)])
    case.store.layers[1].copy_(case.store.layers[0])
    case.store.layers[1][:, 1] *= 2
    torch.testing.assert_close(case.run(layer=1), 2 * case.run(layer=0))


def test_equal_rows_that_see_everything_need_no_mask() -> None:
    case = make_case([(1, 5), (1, 5)])
    (group,) = TorchAttention().plan(case.batch, torch.float64)
    assert group.mask is None and group.tokens == slice(0, 2)
    (windowed,) = TorchAttention(window=4).plan(case.batch, torch.float64)
    assert windowed.mask is None and windowed.slots.shape == (2, 4), "four keys are read, and all of them are seen"


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_keys_that_no_query_of_a_windowed_row_can_see_are_not_even_read(lengths: list[tuple[int, int]], window: int) -> None:
    case = make_case([(q, q + before) for q, before in lengths], window=window)
    plan = TorchAttention(window).plan(case.batch, torch.float64)
    read = {int(slot) for group in plan for slot in group.slots.flatten()} - {0}
    seen = set()
    for q_len, kv_len, table in zip(case.batch.q_lens, case.batch.kv_lens, case.batch.tables, strict=True):
        seen |= set(slots_of(table, case.batch.block_size, max(0, kv_len - q_len - window + 1), kv_len).tolist())
    assert read == seen


@pytest.mark.parametrize("window", [None, 3])
def test_the_compiled_forms_single_group_computes_the_same(window: int | None) -> None:
    for lengths in ([(1, 1)], [(1, 1), (1, 30), (1, 2)], [(1, 6)] * 3):
        case = make_case(lengths, group=3, padding=2, window=window)
        backend = TorchAttention(window)
        group = backend.single_group(case.batch, torch.float64)
        keys = max(2, *(min(k, window or k) for _, k in lengths))
        assert group.mask is not None and group.slots.shape[1] == group.mask.shape[3] == keys
        torch.testing.assert_close(backend.forward(case.q, 0, case.store, [group]), case.run(), rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_splitting_by_length_covers_every_row_once_and_pads_little(kv_lens: list[int]) -> None:
    rows = list(range(len(kv_lens)))
    parts = split_by_length(rows, tuple(kv_lens))
    assert sorted(r for part in parts for r in part) == rows and all(parts)
    if len(parts) == 1:
        assert parts[0] == rows or max(kv_lens) <= 1.5 * min(kv_lens)
    for part in parts:
        lengths = [kv_lens[r] for r in part]
        assert max(lengths) <= 1.5 * min(lengths) or max(lengths) * len(lengths) <= MAX_PADDING * sum(lengths)


def test_splitting_takes_only_the_rows_it_was_given() -> None:
    kv_lens = (5, 1000, 6, 1, 5)
    assert split_by_length([0, 2, 4], kv_lens) == [[0, 2, 4]]
    assert split_by_length([1, 0, 4], kv_lens) == [[0, 4], [1]]


@given(
    st.lists(st.integers(1, 9).flatmap(lambda kv: st.tuples(st.integers(1, kv), st.just(kv))), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_a_plan_has_every_token_once(lengths: list[tuple[int, int]], padding: int) -> None:
    case = make_case(lengths, padding=padding)
    tokens = [torch.arange(case.batch.num_tokens)[g.tokens] for g in TorchAttention().plan(case.batch, torch.float64)]
    assert torch.cat(tokens).sort().values.tolist() == list(range(case.batch.num_tokens))
