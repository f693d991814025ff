"""The experts' products: rows find their expert and their way back, padding is bounded and never read, every layout agrees."""

from __future__ import annotations

from typing import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm.model import experts as experts_module
from minillm.model.experts import (
    IN_16_BITS,
    IN_FULL,
    GroupedLinear,
    Padding,
    Places,
    Run,
    SegmentLinear,
    expert_linears,
    runs_alone,
    runs_padded,
)
from minillm.quant.linear import Linear, PlainLinear, PrepackedLinear, prepack_available

from ..strategies import one_thread  # noqa: F401

counts_of_experts = st.lists(st.one_of(st.just(0), st.integers(0, 6), st.integers(0, 200)), min_size=1, max_size=20)
paddings = st.sampled_from([IN_FULL, IN_16_BITS])


def linears(experts: int, out: int, inner: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Linear]:
    g = torch.Generator().manual_seed(seed)
    made = (torch.randn(out, inner, generator=g, dtype=torch.float64) / inner**0.5 for _ in range(experts))
    return [Linear(weight.to(dtype), None, PlainLinear()) for weight in made]


def chosen(counts: Sequence[int]) -> Tensor:
    """Experts [pairs, 1] that are chosen so often, in an order of no meaning."""
    flat = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))][:, None]


def multiplied(layer: SegmentLinear | GroupedLinear, counts: Sequence[int], x: Tensor, runs: list[Run] | None) -> Tensor:
    """What the layer makes of each row of x [pairs, in], back in its order."""
    places = Places.find(chosen(counts), torch.tensor(counts), runs)
    return layer(x[places.tokens], places)[places.slots.flatten()]


@given(counts_of_experts, paddings)
def test_runs_serve_every_row_once_and_no_expert_without_rows(counts: list[int], padding: Padding) -> None:
    for runs in (runs_alone(counts), runs_padded(counts, padding)):
        served = [e for run in runs for e in range(run.first, run.first + run.experts)]
        assert served == [e for e, n in enumerate(counts) if n]
        assert [run.start for run in runs] == [0, *[run.stop for run in runs]][: len(runs)], "side by side"
        for run in runs:
            assert max(counts[run.first : run.first + run.experts]) <= run.rows
    assert sum(run.rows for run in runs_alone(counts)) == sum(counts)


@given(counts_of_experts, paddings)
def test_padding_is_bounded_however_crowded_one_expert_is(counts: list[int], padding: Padding) -> None:
    for many in (counts, [*counts, 5000], [1] * 50 + [10_000] + [1] * 50):
        rows = sum(run.experts * run.rows for run in runs_padded(many, padding))
        assert rows <= padding.share * sum(many) + max(padding.free, padding.tile) * sum(1 for n in many if n)


def test_even_experts_are_one_run_and_few_rows_are_padded_together_in_16_bits() -> None:
    assert runs_padded([64] * 8, IN_FULL) == runs_padded([64] * 8, IN_16_BITS) == [Run(0, 8, 64, 0)]
    counts = [3, 1, 9, 0, 2, 2]
    assert runs_padded(counts, IN_16_BITS) == [Run(0, 3, 9, 0), Run(4, 2, 2, 27)]
    assert runs_padded(counts, IN_FULL) == [Run(0, 1, 3, 0), Run(1, 1, 1, 3), Run(2, 1, 9, 4), Run(4, 2, 2, 13)]
    assert runs_padded([60, 50, 30], IN_FULL) == [Run(0, 2, 60, 0), Run(2, 1, 30, 120)], "half as many rows are not padded"
    assert runs_padded([60, 64, 50], IN_16_BITS) == [Run(0, 3, 64, 0)], "lengths are whole tiles"
    assert runs_padded([70], IN_16_BITS) == [Run(0, 1, 80, 0)]
    assert runs_padded([0, 0], IN_FULL) == runs_padded([], IN_16_BITS) == []


@given(st.integers(0, 30), st.integers(1, 4), st.integers(0, 9), paddings)
def test_places_sort_by_expert_then_token_and_lead_back(tokens: int, top_k: int, seed: int, padding: Padding) -> None:
    experts = torch.stack(
        [torch.randperm(6, generator=torch.Generator().manual_seed(seed + t))[:top_k] for t in range(tokens + 1)]
    )[1:]
    counts = torch.bincount(experts.flatten(), minlength=6)
    for runs in (None, runs_alone(counts.tolist()), runs_padded(counts.tolist(), padding)):
        places = Places.find(experts, counts, runs)
        assert places.slots.shape == (tokens, top_k) and len(places.slots.unique()) == tokens * top_k
        assert (places.tokens[places.slots] == torch.arange(tokens)[:, None]).all()
        order = sorted((slot, e, t) for t in range(tokens) for slot, e in zip(places.slots[t].tolist(), experts[t].tolist()))
        assert [(e, t) for _, e, t in order] == sorted((e, t) for _, e, t in order)


@given(counts_of_experts)
def test_one_product_for_neighbours_equals_a_product_for_each_expert(counts: list[int]) -> None:
    each = linears(len(counts), 6, 5)
    grouped, segments = GroupedLinear([one.weight for one in each]), SegmentLinear(each)
    x = torch.randn(sum(counts), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = multiplied(segments, counts, x, runs_alone(counts))
    for runs in (runs_alone(counts), grouped.runs(counts), runs_padded(counts, IN_16_BITS)):
        torch.testing.assert_close(multiplied(grouped, counts, x, runs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padded_and_ragged_products_agree_in_every_dtype(dtype: torch.dtype) -> None:
    each = linears(5, 16, 24, dtype)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    for counts in ([3, 0, 1, 0, 4], [0, 0, 9, 0, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1], [40, 3, 0, 36, 33]):
        x = torch.randn(sum(counts), 24, generator=torch.Generator().manual_seed(1)).to(dtype)
        grouped, segments = GroupedLinear([one.weight for one in each]), SegmentLinear(each)
        expected = multiplied(segments, counts, x, segments.runs(counts))
        torch.testing.assert_close(multiplied(grouped, counts, x, grouped.runs(counts)), expected, rtol=near, atol=near)
        if dtype != torch.float16:
            ragged = GroupedLinear([one.weight for one in each], ragged=True)
            torch.testing.assert_close(multiplied(ragged, counts, x, None), expected, rtol=near, atol=near)
            assert ragged.work(ragged.runs(counts)).flops == segments.work(segments.runs(counts)).flops


def test_what_padding_holds_reaches_no_result() -> None:
    counts, grouped = [7, 2, 1], GroupedLinear([one.weight for one in linears(3, 4, 5)])
    runs = runs_padded(counts, IN_16_BITS)
    places = Places.find(chosen(counts), torch.tensor(counts), runs)
    x = torch.randn(10, 5, dtype=torch.float64)
    rows = torch.full((runs[-1].stop, 5), float("nan"), dtype=torch.float64)
    rows[places.slots.flatten()] = x
    assert runs[-1].stop == 21 and torch.equal(
        grouped(rows, places)[places.slots.flatten()], grouped(x[places.tokens], places)[places.slots.flatten()]
    )


def test_work_counts_touched_weights_once_and_padded_rows_as_work() -> None:
    grouped = GroupedLinear([one.weight for one in linears(6, 4, 5, torch.bfloat16)])
    counts = [7, 2, 0, 1, 0, 0]
    work = grouped.work(grouped.runs(counts))
    assert (work.weight_bytes, work.launches) == (3 * 4 * 5 * 2, 2)
    assert work.flops == {"bfloat16": 2 * (2 * 7 + 1) * 4 * 5} and work.activation_bytes == (2 * 7 + 1) * (4 + 5) * 2
    assert grouped.work([]).total_bytes == 0 and not any(grouped.work([]).flops.values())


def test_plain_weights_share_a_tensor_and_others_keep_their_method() -> None:
    up, down = linears(3, 4, 5), linears(3, 5, 2, seed=1)
    first, second = expert_linears(up, down)
    assert isinstance(first, GroupedLinear) and isinstance(second, GroupedLinear) and not first.ragged
    for held, given_ in ((first, up), (second, down)):
        assert all(torch.equal(a, b.weight) for a, b in zip(held.dense(), given_, strict=True))
        assert [one.weight.data_ptr() for one in held.linears] == [weight.data_ptr() for weight in held.weight], "no copy"

    class Own(PlainLinear):
        pass

    for others in (Linear(down[1].weight, None, Own()), Linear(down[1].weight, torch.ones(5).double(), PlainLinear())):
        parts = expert_linears(up, [down[0], others, down[2]])
        assert all(isinstance(part, SegmentLinear) for part in parts), "one expert of another kind, and each is asked by itself"


@pytest.mark.skipif(not prepack_available(), reason="needs oneDNN's bfloat16 products")
@pytest.mark.parametrize("matrix_units", [True, False])
def test_weights_that_onednn_packed_are_multiplied_as_this_cpu_is_faster(
    matrix_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_module, "has_matrix_units", lambda: matrix_units)
    plain = linears(3, 16, 32, torch.bfloat16)
    packed = [Linear(one.weight, None, PrepackedLinear()) for one in plain]
    counts, x = [2, 0, 5], torch.randn(7, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2))
    held, _ = expert_linears(packed, packed)
    assert isinstance(held, GroupedLinear if matrix_units else SegmentLinear)
    assert all(torch.equal(a, b.weight) for a, b in zip(held.dense(), plain, strict=True)), "held as they were"
    truth = multiplied(SegmentLinear(plain), counts, x, runs_alone(counts))
    torch.testing.assert_close(multiplied(held, counts, x, held.runs(counts)), truth, rtol=0.02, atol=0.02)
