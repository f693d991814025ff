"""The attention kernels against a loop in float64 that knows no tiles, blocks or batches."""

from __future__ import annotations

import dataclasses
import math
from typing import Sequence

import pytest
import torch
from torch import Tensor

from minillm.attention.triton_backend import TritonAttention, TritonPlan
from minillm.engine.batch import ForwardBatch, Row
from minillm.kernels.flash_prefill import Tile
from minillm.kernels.paged_decode import choose_splits, paged_decode
from minillm.model.config import ModelConfig

from ...attention.test_torch_backend import Case, make_case

SMALL = Tile(16, 16, 4, 1)  # several tiles in a few keys


def backend_for(case: Case, sinks: int = 0, prefill: Tile = SMALL, decode: Tile = SMALL) -> TritonAttention:
    heads, dim = case.q.shape[1:]
    config = ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=heads, num_kv_heads=case.keys[0].shape[1],
        head_dim=dim, max_position=512,
    )  # fmt: skip
    backend = TritonAttention(config, case.q.dtype, torch.device("cpu"), case.window, sinks)
    backend.prefill_tile, backend.decode_tile = prefill, decode
    return backend


def run(case: Case, sinks: int = 0, splits: int | None = None, **tiles: Tile) -> Tensor:
    backend = backend_for(case, sinks, **tiles)
    plan = backend.plan(case.batch, case.q.dtype)
    if splits is not None:
        plan = dataclasses.replace(plan, splits=splits)
    return backend.forward(case.q, 0, case.store, plan)


def agrees(case: Case, tolerance: float = 2e-5, **options) -> None:
    out, expected = run(case, **options), case.expected()
    assert out.shape == case.q.shape and out.dtype == case.q.dtype
    assert out.isfinite().all(), "something read a slot that belongs to nobody"
    torch.testing.assert_close(out[: len(expected)].double(), expected, rtol=tolerance, atol=tolerance)


def case_of(lengths: Sequence[tuple[int, int]], **options) -> Case:
    return make_case(lengths, **{"dtype": torch.float32, **options})


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 3, 17])
def test_lengths_around_a_block_and_a_tile_in_one_batch(block_size: int, window: int | None) -> None:
    lengths = sorted({1, max(block_size - 1, 1), block_size, block_size + 1, 17, 33})
    agrees(case_of([(n, n) for n in lengths] + [(1, n) for n in lengths], group=3, block_size=block_size, window=window))


@pytest.mark.parametrize("dim, group", [(16, 1), (64, 3), (80, 2), (96, 5), (128, 6), (192, 7), (64, 8), (256, 4)])
def test_head_dims_and_groups_that_are_no_powers_of_two(dim: int, group: int) -> None:
    agrees(case_of([(9, 9), (1, 20), (3, 17)], group=group, kv_heads=2, dim=dim))


@pytest.mark.parametrize("q_len, kv_len", [(2, 5), (16, 17), (17, 40), (5, 33)])
def test_queries_fewer_than_keys_sit_at_the_end_of_them(q_len: int, kv_len: int) -> None:
    for group in (1, 3):
        agrees(case_of([(q_len, kv_len)], group=group))


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [None, 20])
def test_any_number_of_splits_gives_the_same_also_where_a_part_has_no_keys(splits: int, window: int | None) -> None:
    agrees(case_of([(1, 1), (1, 16), (1, 49), (2, 70), (1, 33)], group=3, kv_heads=2, window=window, padding=1), splits=splits)


@pytest.mark.parametrize("window, sinks", [(4, 4), (3, 1), (20, 2), (1, 17), (64, 4)])
def test_sinks_stay_visible_beside_a_window(window: int, sinks: int) -> None:
    case = case_of([(40, 40), (1, 50), (3, 37), (9, 9)], group=2, window=window)
    expected, at = torch.empty(case.q.shape, dtype=torch.float64), 0
    for k, v, q_len in zip(case.keys, case.values, case.batch.q_lens, strict=True):
        for position in range(len(k) - q_len, len(k)):
            seen = [j for j in range(position + 1) if j > position - window or j < sinks]
            scores = torch.einsum("hd,kd->hk", case.q[at].double(), k[seen, 0].double()) / math.sqrt(16)
            expected[at] = scores.softmax(-1) @ v[seen, 0].double()
            at += 1
    for splits in (1, 3):
        torch.testing.assert_close(run(case, sinks, splits).double(), expected, rtol=2e-5, atol=2e-5)


def test_a_window_reads_no_key_before_it() -> None:
    # blocks that a window has left behind are given to others: what lies in them must not matter, not even NaN
    case = case_of([(1, 40), (3, 41)], window=6, group=2)
    for row, table in enumerate(case.batch.tables):
        gone = case.batch.kv_lens[row] - case.batch.q_lens[row] + 1 - 6
        case.store.poison(torch.tensor([table[p // 4] * 4 + p % 4 for p in range(gone)]))
    agrees(case)


@pytest.mark.parametrize("lengths", [[(1, 7), (1, 3)], [(20, 37), (2, 2)]])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-2), (torch.float16, 2e-2)])
def test_scores_near_1e5_stay_exact(dtype: torch.dtype, tolerance: float, lengths: list[tuple[int, int]]) -> None:
    agrees(case_of(lengths, group=2, dtype=dtype, scale=160.0), tolerance)


def test_scores_of_minus_1e5_weigh_as_much_as_any() -> None:
    # every score is near −1e5: a finite "minus infinity" such as −1e4 would outweigh them all
    case = case_of([(20, 20), (1, 20)], dim=16)
    case.q.fill_(160.0)
    for row, table in enumerate(case.batch.tables):
        slots = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(20)])
        case.keys[row].fill_(-160.0)
        case.store.write(0, slots, case.keys[row], case.values[row])
    assert torch.einsum("d,d->", case.q[0, 0], case.keys[0][0, 0]) / 4 < -1e5
    agrees(case, splits=2)


def test_half_precision_agrees_within_its_precision() -> None:
    agrees(case_of([(20, 20), (1, 20), (3, 17)], group=3, kv_heads=2, dim=64, dtype=torch.float16, window=15, padding=1), 4e-3)


def test_a_row_without_keys_gives_zero() -> None:
    case = case_of([(1, 5)], group=2)
    plan = backend_for(case).plan(case.batch, torch.float32)
    nothing = torch.zeros(1, dtype=torch.int32)
    for splits in (1, 2):
        out = torch.full_like(case.q, 7)
        paged_decode(
            case.q, case.store.layers[0], plan.tables, plan.q_starts, plan.q_lens, nothing, plan.decode_rows, out,
            block_size=4, tile=SMALL, num_splits=splits,
        )  # fmt: skip
        assert (out == 0).all()


def test_padding_rows_are_finite() -> None:
    agrees(case_of([(1, 30), (20, 20)], padding=5))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    together = case_of([(1, 9), (4, 6), (1, 30), (20, 23)], group=2)
    out, at = run(together), 0
    for i, q_len in enumerate(together.batch.q_lens):
        row = Row([0] * q_len, together.batch.kv_lens[i] - q_len, together.batch.tables[i])
        alone = dataclasses.replace(together, batch=ForwardBatch.build([row], 4), q=together.q[at : at + q_len])
        torch.testing.assert_close(run(alone), out[at : at + q_len], rtol=1e-6, atol=1e-6)
        at += q_len


def test_queries_need_not_be_contiguous() -> None:
    case = case_of([(1, 5), (12, 15)], group=3, kv_heads=2)
    plain = run(case)
    wide = torch.full((len(case.q), 10, 16), float("nan"))
    wide[:, 2:8] = case.q  # a slice of a fused QKV product
    for q in (wide[:, 2:8], case.q.permute(1, 2, 0).contiguous().permute(2, 0, 1)):
        assert not q.is_contiguous()
        assert torch.equal(run(dataclasses.replace(case, q=q)), plain)


def test_neither_queries_nor_store_are_changed() -> None:
    case = case_of([(1, 5), (12, 17)], group=2)
    q, kv = case.q.clone(), case.store.layers[0].clone()
    run(case)
    assert torch.equal(case.q, q) and torch.equal(case.store.layers[0].nan_to_num(7), kv.nan_to_num(7))


def test_short_rows_split_their_keys_and_long_ones_do_not() -> None:
    case = case_of([(1, 9), (20, 20), (5, 30), (6, 30)], group=3)
    plan: TritonPlan = backend_for(case).plan(case.batch, torch.float32)
    assert plan.decode_rows.tolist() == [0, 2]  # 3 and 15 packed rows fit one tile of 16, 60 and 18 do not
    tiles = sorted(zip(plan.prefill_rows.tolist(), plan.prefill_firsts.tolist(), strict=True))
    assert tiles == [(1, 0), (1, 16), (1, 32), (1, 48), (3, 0), (3, 16)]


def test_splits_fill_the_processors_and_leave_no_part_short() -> None:
    assert choose_splits(1, 8, 4096, 132) == 16  # bounded by 256 keys a part
    assert choose_splits(1, 8, 100_000, 132) == 33
    assert choose_splits(32, 8, 4096, 132) == 2
    assert choose_splits(256, 8, 4096, 132) == 1 == choose_splits(1, 1, 100, 132) == choose_splits(0, 8, 0, 132)
