"""Rounding to a grid: the error is at most half a step whatever the group holds, and packing changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minillm.quant.grid import SMALLEST_SCALE, pack_bits, quantise, round_trip, unpack_bits

BITS = st.sampled_from([2, 3, 4, 8])
numbers = st.one_of(
    st.just(0.0), st.floats(-10, 10, width=32), st.floats(5, 6, width=32), st.floats(-(2.0**100), 2.0**100, width=32)
)
groups = st.one_of(
    arrays(np.float32, (3, 24), elements=numbers),
    arrays(np.float32, (3, 24), elements=st.floats(5, 6, width=32)),  # one-sided: its range is far from 0
    arrays(np.float32, (3, 24), elements=st.floats(-6, -5, width=32)),
    numbers.map(lambda x: np.full((3, 24), x, np.float32)),  # constant
)


@settings(max_examples=200)
@given(groups, BITS, st.sampled_from([-1, 4, 8, 24]), st.booleans())
def test_an_error_is_at_most_half_a_step_for_any_group(values, bits, group, symmetric):
    weight = torch.from_numpy(values)
    q = quantise(weight, bits, group, symmetric)
    back = q.dequantise(torch.float64)
    step = q.scales.double().repeat_interleave(q.group, dim=1)
    assert torch.isfinite(back).all() and (q.scales >= SMALLEST_SCALE).all()
    assert ((back - weight.double()).abs() <= step * 0.500001).all()
    assert (back[weight == 0] == 0).all(), "0 is on every grid"


@settings(max_examples=100)
@given(groups, BITS, st.sampled_from([4, 8, 24]), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_a_round_trip_is_quantise_and_dequantise_bit_for_bit(values, bits, size, symmetric, dtype):
    weight = torch.from_numpy(values).to(dtype)
    kept = weight.clone()
    assert torch.equal(round_trip(weight, bits, size, symmetric), quantise(weight, bits, size, symmetric).dequantise(dtype))
    assert torch.equal(weight, kept)


@settings(max_examples=100)
@given(groups, BITS, st.booleans())
def test_a_step_is_no_larger_than_the_range_asks_for(values, bits, symmetric):
    weight = torch.from_numpy(values)
    q = quantise(weight, bits, 8, symmetric)
    grouped = weight.double().unflatten(1, (-1, 8))
    if symmetric:
        needed = grouped.abs().amax(-1) / (2 ** (bits - 1) - 1)
    else:
        needed = (grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)) / (2**bits - 1)
    assert (q.scales.double() <= torch.maximum(needed * (1 + 2**-7), torch.tensor(SMALLEST_SCALE).double())).all()


@settings(max_examples=100)
@given(groups, BITS, st.booleans())
def test_what_is_on_the_grid_already_stays_where_it_is(values, bits, symmetric):
    once = quantise(torch.from_numpy(values), bits, 8, symmetric)
    again = (once.dequantise() / once.scales.repeat_interleave(8, 1)).round() + once.zeros.repeat_interleave(8, 1)
    assert torch.equal(again.to(torch.uint8), once.codes)


def test_scales_are_exact_in_bfloat16_and_codes_within_their_bits():
    weight = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    for bits in (2, 3, 4, 8):
        for symmetric in (False, True):
            q = quantise(weight, bits, 16, symmetric)
            assert torch.equal(q.scales.bfloat16().float(), q.scales)
            assert int(q.codes.max()) < 2**bits and int(q.zeros.max()) < 2**bits
            assert not symmetric or (q.zeros == 2 ** (bits - 1)).all() and int(q.codes.min()) >= 1


@settings(max_examples=100)
@given(st.data(), BITS, st.integers(0, 5), st.integers(1, 21))
def test_packing_is_an_identity_and_takes_the_bits_it_should(data, bits, rows, width):
    codes = torch.tensor(data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=rows * width, max_size=rows * width)))
    codes = codes.to(torch.uint8).reshape(rows, width)
    packed = pack_bits(codes, bits)
    assert packed.shape == (rows, -(-width * bits // 8)) and packed.dtype == torch.uint8
    assert torch.equal(unpack_bits(packed, bits, width), codes)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_a_row_that_is_no_multiple_of_the_group_is_refused_with_both_numbers(group):
    with pytest.raises(ValueError, match=rf"in_features 65 of lm_head is not a multiple of group {group}"):
        quantise(torch.zeros(2, 65), 4, group, False, "lm_head")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="o_proj holds a number that is not finite"):
        quantise(torch.tensor([[1.0, bad]]), 4, -1, False, "o_proj")
