"""A linear layer over codes: every way to multiply agrees with the dequantised weight, and what is read is counted."""

from __future__ import annotations

import itertools

import pytest
import torch

from minillm.quant.grid import quantise
from minillm.quant.group_linear import COMPILED_DENSE_FROM, DENSE_FROM, TILE, GroupLinear
from minillm.quant.linear import Linear

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}
SHAPES = [(48, 192), (20, 192), (7, 40)]  # [out, in]; the second and third have no kernel


def weights(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in (shape, shape[:1], (8, shape[1])))  # type: ignore


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_every_format_multiplies_by_what_it_unpacks_and_keeps_its_codes(dtype, bits, symmetric):
    for shape, dense_from, group in itertools.product(SHAPES, ("auto", 3), (-1, 8, 32, 96)):
        if group > 0 and shape[1] % group:
            continue
        weight, bias, x = weights(shape, dtype)
        method = GroupLinear(bits, group, symmetric, dense_from)
        layer = Linear(weight, bias, method)
        expected = quantise(weight, bits, group, symmetric)
        kept = method.codes(layer._buffers)
        assert torch.equal(kept.codes, expected.codes) and torch.equal(kept.scales, expected.scales)
        assert torch.equal(kept.zeros, expected.zeros)
        dense, _ = layer.dense()
        assert torch.equal(dense, expected.dequantise(dtype))
        for rows in (0, 1, 8):
            exact = x[:rows].double() @ expected.dequantise().double().T + bias.double()
            y = layer(x[:rows])
            assert y.dtype == dtype and y.shape == (rows, shape[0])
            scale = float(exact.abs().max()) if rows else 1
            torch.testing.assert_close(y.double(), exact, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("shape", [(16, 32), (64, 32), (80, 64), (160, 512)])
def test_codes_come_back_from_the_kernels_layout_however_it_cuts_the_rows(shape):
    expected = quantise(weights(shape, torch.float32)[0], 4, 32, False)
    method = GroupLinear(4, 32, False, None, codes=expected)
    packed = method.pack(torch.empty(shape), None)
    assert "int4" in packed and torch.equal(method.codes(packed).codes, expected.codes)


def test_kernels_serve_the_shapes_they_can_and_only_those():
    def format_of(bits, group, symmetric, shape, dtype):
        packed = GroupLinear(bits, group, symmetric, None).pack(weights(shape, dtype)[0], None)
        return next(name for name in ("int4", "int8", "codes") if name in packed)

    assert format_of(4, 32, False, (48, 192), torch.bfloat16) == "int4" == format_of(4, -1, True, (48, 192), torch.float32)
    assert format_of(4, 96, True, (16, 192), torch.float16) == "int4"  # three groups of 32 with one scale
    assert format_of(8, -1, True, (48, 192), torch.bfloat16) == "int8"
    for bits, group, symmetric, shape, dtype in [
        (4, 32, False, (48, 192), torch.float64), (4, 16, False, (48, 192), torch.bfloat16),
        (4, 32, False, (20, 192), torch.float32), (8, -1, False, (48, 192), torch.bfloat16),
        (8, 32, True, (48, 192), torch.bfloat16), (8, -1, True, (48, 40), torch.bfloat16),
        (3, 32, False, (48, 192), torch.bfloat16), (2, 32, True, (48, 192), torch.bfloat16),
    ]:  # fmt: skip
        assert format_of(bits, group, symmetric, shape, dtype) == "codes"


@pytest.mark.parametrize("bits, group, symmetric", [(4, 32, False), (4, -1, True), (8, -1, True)])
@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 1e-6, 3e-7])
def test_a_small_weight_in_float16_is_no_further_than_half_a_step_and_its_own_rounding(bits, group, symmetric, size):
    """A scale of a few millionths has few bits in float16, and the largest codes multiply what that loses."""
    weight = (weights((48, 192), torch.float32)[0] * size).half()
    method = GroupLinear(bits, group, symmetric, None)
    layer, exact = Linear(weight, None, method), quantise(weight, bits, group, symmetric)
    assert torch.equal(method.codes(layer._buffers).zeros, exact.zeros)
    step = exact.scales.repeat_interleave(192 // exact.scales.shape[1], 1)
    for held in (layer.dense()[0], layer(torch.eye(192, dtype=torch.float16)).T):
        # half a step, half a step more of the scale's rounding, and float16's own
        assert ((held.float() - weight.float()).abs() <= step + 2**-10 * weight.float().abs() + 2.0**-24).all()


@pytest.mark.parametrize(
    "wrong, named",
    [({"bits": n}, "bits must be one of 2, 3, 4, 8, got") for n in (0, 1, 5, 9, -1, 4.0, "4", True)]
    + [({"group": n}, "group must be a whole number of at least 1, or -1 .*, got") for n in (0, -2, 32.0, None, True)]
    + [({"symmetric": n}, "symmetric must be True or False, got") for n in (None, 1, "no")]
    + [({"dense_from": n}, "dense_from must be a whole number of at least 1, None or 'auto', got") for n in (0, True, "x", 1.5)]
    + [({"kernel": n}, "kernel must be one of 'auto', 'torch', 'triton', got") for n in ("cuda", None)],
)  # fmt: skip
def test_a_layer_that_nobody_can_build_is_refused_as_a_config_would_be(wrong, named):
    with pytest.raises(ValueError, match=named):
        GroupLinear(**{"bits": 4, "group": 32, "symmetric": False, **wrong})


@pytest.mark.parametrize(
    "bits, group, other",
    [(4, 32, (48, 96)), (4, 32, (40, 192)), (3, 32, (48, 192)), (4, 64, (48, 192)), (4, -1, (48, 192))],
)
def test_codes_of_another_weight_or_grid_are_refused(bits, group, other):
    codes = quantise(weights(other, torch.float32)[0], 4, 32, False)
    with pytest.raises(ValueError, match=r"the codes of o_proj must be \[48, 192\] in . bits and groups of .*, got "):
        Linear(weights((48, 192), torch.float32)[0], None, GroupLinear(bits, group, False, codes=codes, name="o_proj"))


def test_a_tile_smaller_than_the_weight_changes_nothing(monkeypatch):
    weight, bias, x = weights((20, 192), torch.float64)
    layer = Linear(weight, bias, GroupLinear(3, 32, False))
    whole = layer(x)
    monkeypatch.setattr("minillm.quant.group_linear.TILE", 192 * 7)
    assert TILE > 192 * 20
    torch.testing.assert_close(layer(x), whole, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("units, threshold", [(True, COMPILED_DENSE_FROM), (False, DENSE_FROM)])
def test_a_compiled_step_multiplies_by_the_codes_for_as_many_rows_as_that_is_faster_here(units, threshold, monkeypatch):
    monkeypatch.setattr("minillm.quant.group_linear.has_matrix_units", lambda: units)
    weight, bias, _ = weights((48, 192), torch.bfloat16)
    assert list(Linear(weight, bias, GroupLinear(4, 64, False)).traced()) == [1, threshold]
    assert list(Linear(weight, bias, GroupLinear(4, 64, False, dense_from=9)).traced()) == [1, 9], "what was asked for stays"


def test_a_step_is_counted_with_the_bytes_that_it_reads():
    weight, bias, _ = weights((48, 192), torch.bfloat16)
    layer = Linear(weight, bias, GroupLinear(4, 64, False))
    packed = 48 * 192 // 2 + 48 * 3 * 2 * 2  # nibbles; scale and offset of 16 bits for each of three groups a row
    copy = 48 * 192 * 2
    assert layer.nbytes() == packed + copy + 48 * 2, "the copy is held as well"
    few, many = layer.work(DENSE_FROM - 1), layer.work(DENSE_FROM)
    assert few.weight_bytes == packed + 48 * 2 and many.weight_bytes == copy + 48 * 2
    assert few.flops == {"bfloat16": 2 * (DENSE_FROM - 1) * 48 * 192}, "arithmetic stays in the model's dtype"
    assert few.activation_bytes == (DENSE_FROM - 1) * 240 * 2
    slow = Linear(weight, None, GroupLinear(3, 64, False)).work(1)
    assert slow.weight_bytes == 48 * 192 * 3 // 8 + 48 * 3 * 3, "three bits; a scale of 16 bits and a zero of 8"
    assert slow.activation_bytes == 240 * 2 + 2 * 48 * 192 * 2, "the dequantised weight is written and read"


def test_the_copy_appears_where_it_was_asked_for():
    weight, bias, _ = weights((48, 192), torch.float32)
    assert "dense_copy" not in GroupLinear(4, 64, False).pack(weight, bias), "16-bit matrix units are what makes it pay"
    assert "dense_copy" in GroupLinear(4, 64, False, 4).pack(weight, bias)
    assert "dense_copy" not in GroupLinear(4, 64, False, None).pack(weight.bfloat16(), bias)


def test_one_method_may_serve_layers_of_different_shapes():
    method = GroupLinear(4, 32, True, 4)
    for shape in [(48, 192), (20, 64), (16, 32)]:
        weight, bias, x = weights(shape, torch.float32)
        layer = Linear(weight, bias, method)
        for rows in (1, 8):
            exact = x[:rows] @ quantise(weight, 4, 32, True).dequantise().T + bias
            torch.testing.assert_close(layer(x[:rows]), exact, rtol=1e-4, atol=1e-4)


def test_the_callers_weight_is_not_changed():
    weight, bias, x = weights((48, 192), torch.float32)
    before = weight.clone(), bias.clone()
    Linear(weight, bias, GroupLinear(4, 32, False))(x)
    assert torch.equal(weight, before[0]) and torch.equal(bias, before[1])
