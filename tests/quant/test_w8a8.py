"""W8A8 and FP8: rounding of tokens, exact sums, migration that is undone, and the engine on top."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import LLM, SamplingParams, Transformer
from minillm.quant import int8_gemm
from minillm.quant.calibrate import LINEARS, Seen
from minillm.quant.config import QuantConfig
from minillm.quant.fold import fold_scales, multiply_inputs, shared_by_heads
from minillm.quant.fp8 import FP8Linear, to_e4m3
from minillm.quant.grid import quantise
from minillm.quant.int8_gemm import GEMMS, LONGEST, choose, moved, usable
from minillm.quant.linear import Linear, PlainLinear
from minillm.quant.quantise import fit, quantise_model
from minillm.quant.smooth import migration, product_loss, search_migration
from minillm.quant.w8a8 import W8A8Linear, quantise_rows

from .conftest import small_config
from .test_quantise import logits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ON_CPU = ["onednn", "int_mm", "float"]


def some(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(seed=st.integers(0, 999), exponent=st.floats(-25, 25), kind=st.sampled_from(["random", "equal", "one-sided", "spike"]))
@settings(max_examples=60, deadline=None)
def test_a_token_is_off_by_half_a_step_at_most_whatever_it_holds(seed, exponent, kind):
    x = some(3, 40, seed=seed) * 10**exponent
    if kind == "equal":
        x = x[:, :1].expand(3, 40)
    elif kind == "one-sided":
        x = x.abs() + x.abs().amax()
    elif kind == "spike":
        x[:, 7] *= 1000
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        given = x.to(dtype)
        codes, scales = quantise_rows(given)
        assert codes.abs().max() <= 127 and scales.dtype == torch.bfloat16
        off = (codes.double() * scales.double() - given.double()).abs()
        assert bool((off <= scales.double() * (0.5 + 1e-5)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_and_no_rows_at_all(dtype):
    codes, scales = quantise_rows(torch.zeros(2, 8, dtype=dtype))
    assert codes.count_nonzero() == 0 and bool((scales > 0).all())
    assert quantise_rows(torch.zeros(0, 8, dtype=dtype))[0].shape == (0, 8)
    method = W8A8Linear()
    packed = method.pack(some(5, 8, dtype), torch.arange(5).to(dtype))
    assert method.apply(packed, torch.zeros(1, 8, dtype=dtype)).tolist() == [[0, 1, 2, 3, 4]]
    assert method.apply(packed, torch.zeros(0, 8, dtype=dtype)).shape == (0, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("make", [W8A8Linear, FP8Linear])
def test_a_number_that_is_not_finite_spoils_its_own_token_and_no_other(make, dtype, bad):
    x, method = some(3, 16, dtype), make()
    packed = method.pack(some(6, 16, dtype, 1), some(1, 6, dtype)[0])
    clean = method.apply(packed, x)
    x[1, 3] = bad
    spoilt = method.apply(packed, x)
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]]) and not spoilt[1].isfinite().any()


@pytest.mark.parametrize("signs", [True, False], ids=["signs", "no signs"])
@pytest.mark.parametrize("gemm", ON_CPU)
@pytest.mark.parametrize("width", [1, 3, 17, 64, 1041, 4099])
def test_every_gemm_gives_the_sums_of_whole_numbers(gemm, width, signs, monkeypatch):
    monkeypatch.setattr(int8_gemm, "multiplies_signs", lambda: signs)
    generator = torch.Generator().manual_seed(width)
    x, w = (torch.randint(-127, 128, (n, width), generator=generator, dtype=torch.int8) for n in (5, 9))
    x[0], w[0], w[1] = 127, 127, -127  # the largest sums there are
    exact = x.double() @ w.double().t()
    x = moved(x, GEMMS[gemm].offset)
    got = GEMMS[gemm].multiply(x, GEMMS[gemm].layout(w), torch.ones(9), torch.float32)
    assert torch.equal(got.double(), exact.float().double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gemm_changes_nothing_not_even_a_bit(dtype):
    x, weight, bias = some(33, 96, dtype), some(40, 96, dtype, 1), some(1, 40, dtype, 2)[0]
    found = []
    for gemm in (name for name in ON_CPU if usable(name, "cpu", dtype)):
        method = W8A8Linear(gemm)
        found.append(method.apply(method.pack(weight, bias), x))
    assert len(found) >= 2 and all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [W8A8Linear, FP8Linear])
def test_the_result_is_near_the_plain_product_and_that_of_its_own_weight(make, dtype):
    x, weight, bias = some(9, 64, dtype), some(24, 64, dtype, 1), some(1, 24, dtype, 2)[0]
    method = make()
    packed = method.pack(weight, bias)
    got = method.apply(packed, x).double()
    step = (x.double().abs().amax(1, keepdim=True) / 16) * weight.double().abs().sum(1) / 8
    assert bool(((got - F.linear(x.double(), weight.double(), bias.double())).abs() <= step).all())
    assert bool((method.unpack(packed) - weight).abs().max() <= weight.abs().max() / 16)
    before = x.clone()
    method.apply(packed, x)
    assert torch.equal(x, before), "the input was written to"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_rows_beside_it_to_the_last_bit(dtype):
    """Sums of whole numbers are exact in any order: 16-bit products cannot promise that."""
    x, method = some(300, 96, dtype), W8A8Linear()
    packed = method.pack(some(40, 96, dtype, 1), None)
    together = method.apply(packed, x)
    for rows in ([0], [299], [5, 4, 3], list(range(17))):
        assert torch.equal(method.apply(packed, x[rows]), together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_that_are_not_contiguous(dtype):
    method = W8A8Linear()
    packed = method.pack(some(16, 32, dtype, 1), None)
    wide = some(7, 100, dtype)
    for x in (wide[:, 5:37], wide[::2, :32], some(32, 7, dtype).t(), wide[:, :64:2], wide[:1, :32].expand(4, 32)):
        assert torch.equal(method.apply(packed, x), method.apply(packed, x.contiguous()))


def test_many_rows_are_rounded_in_parts_as_at_once(monkeypatch):
    x = some(50, 32, torch.bfloat16)
    whole = quantise_rows(x)
    monkeypatch.setattr("minillm.quant.w8a8.TILE", 64)
    assert all(torch.equal(a, b) for a, b in zip(quantise_rows(x), whole, strict=True))


def test_rows_whose_sums_could_pass_32_bits_are_refused():
    assert LONGEST * 127**2 < 2**31 <= (LONGEST + 1) * 127**2
    with pytest.raises(ValueError, match=f"in_features {LONGEST + 1} of the weight must be 1 to {LONGEST}"):
        W8A8Linear().pack(torch.zeros(1, LONGEST + 1), None)
    with pytest.raises(ValueError, match="in_features 0"):
        W8A8Linear().pack(torch.zeros(4, 0), None)
    codes = torch.full((1, LONGEST), 127, dtype=torch.int8)
    assert torch._int_mm(codes, codes.t()).item() == LONGEST * 127**2
    for weight in (codes, -codes):
        for name in (name for name in ON_CPU if usable(name, "cpu", torch.float32)):
            got = GEMMS[name].multiply(moved(codes, GEMMS[name].offset), GEMMS[name].layout(weight), torch.ones(1), torch.float32)
            assert got.item() == float(torch.tensor(weight[0, 0].item() * LONGEST * 127).float()), name


@pytest.mark.parametrize("make", [W8A8Linear, FP8Linear])
@pytest.mark.parametrize(
    "weight", [torch.zeros(3, 8), torch.full((3, 8), 1e-30), torch.full((3, 8), 3e38), torch.eye(3, 8) * 1e4]
)
def test_weights_of_one_kind_are_no_problem(make, weight):
    method = make()
    packed = method.pack(weight, None)
    back = method.unpack(packed)
    assert back.isfinite().all() and bool(((back - weight).abs() <= weight.abs() / 16 + 2.0**-24).all())
    with pytest.raises(ValueError, match="not finite"):
        make().pack(weight.clone().fill_(float("nan")), None)


def test_the_choice_of_a_gemm_is_named_or_refused():
    assert choose("auto", "cpu", torch.float64).name == "int_mm"
    with pytest.raises(ValueError, match="gemm must be 'auto' or one of 'onednn', 'int_mm', 'float', 'triton', got 'mkl'"):
        choose("mkl", "cpu", torch.float32)
    with pytest.raises(ValueError, match="gemm 'onednn' cannot be used on cpu for float64"):
        choose("onednn", "cpu", torch.float64)


@pytest.mark.parametrize("signs", [True, False])
def test_codes_lose_their_sign_where_the_processor_has_no_product_for_it(signs, monkeypatch):
    monkeypatch.setattr(int8_gemm, "multiplies_signs", lambda: signs)
    assert GEMMS["onednn"].offset == (0 if signs else 128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_without_a_sign_are_the_same_moved_up(dtype):
    x = some(40, 33, dtype) * 100
    (codes, scales), (up, theirs) = quantise_rows(x), quantise_rows(x, 128)
    assert up.dtype == torch.uint8 and torch.equal(up.int(), codes.int() + 128) and torch.equal(scales, theirs)
    assert torch.equal(moved(codes, 128), up) and moved(codes, 0) is codes


def test_a_gemm_that_saturates_is_not_chosen(monkeypatch):
    class Saturating(int8_gemm.OneDNN):
        def multiply(self, x, weight, channel, dtype):
            return super().multiply(x, weight, channel, dtype).clamp(-32768, 32767)

    int8_gemm._exact_on_cpu.cache_clear()
    monkeypatch.setitem(GEMMS, "onednn", Saturating())
    try:
        assert choose("auto", "cpu", torch.bfloat16).name == "int_mm"
    finally:
        int8_gemm._exact_on_cpu.cache_clear()


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_migration_is_the_same_product_until_it_is_rounded(strength):
    x, weight = some(20, 16, torch.float64), some(8, 16, torch.float64, 1)
    x[:, 3] *= 40
    scales = migration(weight, x.abs().amax(0), strength)
    torch.testing.assert_close((x / scales) @ (weight * scales).t(), x @ weight.t())
    assert bool((scales > 0).all()) and bool(scales.isfinite().all())


def test_an_outlier_channel_costs_the_others_their_levels_and_migration_gives_them_back():
    x, weight = some(128, 64), some(32, 64, seed=1)
    x[:, 5] *= 60
    seen = Seen.of(x)
    scales, strength = search_migration(weight, seen)
    plain, smooth = product_loss(weight, x), product_loss(weight, x, scales)
    assert strength is not None and smooth < plain / 8
    assert scales.argmax() == 5
    assert plain > 20 * product_loss(weight, x.clone().index_fill_(1, torch.tensor([5]), 0.0))


@pytest.mark.parametrize("kind", ["zero channel", "zero weights", "all zero", "one row"])
def test_searching_is_never_worse_than_leaving_the_weights_alone(kind):
    x, weight = some(1 if kind == "one row" else 40, 16), some(8, 16, seed=2)
    if kind in ("zero channel", "all zero"):
        x[:, 2 if kind == "zero channel" else slice(None)] = 0
    if kind in ("zero weights", "all zero"):
        weight[:, 4 if kind == "zero weights" else slice(None)] = 0
    scales, _ = search_migration(weight, Seen.of(x))
    assert bool(scales.isfinite().all()) and bool((scales > 0).all())
    assert product_loss(weight, x, scales) <= product_loss(weight, x)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 6}, {"num_kv_heads": 1}, {"qk_norm": True}, {"sliding_window": 5}])
def test_whatever_is_multiplied_into_weights_is_divided_out_elsewhere(rows, changes):
    """Random scales on every product's inputs: the model that is left gives the same logits."""
    model = Transformer.random(small_config(qkv_bias=True, mlp_bias=True, **changes), seed=2, dtype=torch.float64)
    work = model.converted(torch.float64, "cpu", PlainLinear())
    generator = torch.Generator().manual_seed(0)
    for layer in work.layers:

        def scaled(name, layer=layer):
            scales = torch.rand(LINEARS[name](layer).in_features, generator=generator, dtype=torch.float64) * 5 + 0.1
            if name == "self_attn.o_proj":
                scales = shared_by_heads(scales, model.config.num_kv_heads, model.config.head_dim)
            multiply_inputs(layer, name, scales)
            return scales

        fold_scales(model.config, layer, scaled)
    assert not torch.allclose(work.layers[0].mlp.down.weight, model.layers[0].mlp.down.weight)
    torch.testing.assert_close(logits(work, rows[0][:20]), logits(model, rows[0][:20]), rtol=1e-9, atol=1e-9)


def test_no_layer_loses_by_searching_and_outliers_gain(small, rows):
    found = fit(small, QuantConfig("w8a8", calibration=rows))
    assert [loss.name for loss in found.losses] == [f"model.layers.{i}.{name}" for i in range(2) for name in LINEARS]
    assert all(0 <= loss.chosen <= loss.nearest * 1.0001 for loss in found.losses)
    with_outliers = [loss for loss in found.losses if "qkv" in loss.name or "gate_up" in loss.name]
    assert all(loss.chosen < loss.nearest / 3 for loss in with_outliers)
    assert set(found.strengths) == {loss.name for loss in found.losses}
    none = fit(small, QuantConfig("w8a8", migration=None))  # nothing to calibrate on, nothing to read
    assert not none.losses and set(none.codes) == set(found.codes)


def test_scales_of_heads_that_share_a_value_are_shared():
    shared = shared_by_heads(torch.arange(12.0), kv_heads=2, head_dim=3)
    assert shared.tolist() == [1.5, 2.5, 3.5, 1.5, 2.5, 3.5, 7.5, 8.5, 9.5, 7.5, 8.5, 9.5]


@pytest.mark.parametrize("method", ["w8a8", "fp8"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_engine_runs_on_it_and_answers_alone_as_in_a_batch(small, rows, method, dtype):
    config = QuantConfig(method, calibration=rows if method == "w8a8" else None)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    before = {name: t.clone() for name, t in small.dense_weights().items()}
    llm = LLM(small, dtype=dtype, quantization=config, num_blocks=60, block_size=4, max_num_batched_tokens=7)
    together = [o.token_ids for o in llm.generate([row[:9] for row in rows], params)]
    if dtype != "bfloat16":
        assert [llm.generate(row[:9], params)[0].token_ids for row in rows] == together
    assert all(torch.equal(before[name], t) for name, t in small.dense_weights().items()), "the caller's model is his"
    assert ("W8A8" if method == "w8a8" else "emulated") in llm.engine.description


def test_the_meter_counts_bytes_multiplied_and_bytes_moved(small, rows):
    def counted(quantization):
        llm = LLM(small, dtype="float32", quantization=quantization, num_blocks=40)
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        return llm.meter

    plain, w8a8 = counted(None), counted(QuantConfig("w8a8", calibration=rows))
    assert w8a8.total_flops == plain.total_flops and 0 < w8a8.flops["int8"] < plain.flops["float32"]
    assert w8a8.weight_bytes < 0.4 * plain.weight_bytes and w8a8.activation_bytes > plain.activation_bytes
    emulated = counted("fp8")
    assert emulated.flops == plain.flops, "emulated arithmetic must not be counted as 8 bits"


def test_the_traffic_is_that_of_the_tensors_held():
    linear = Linear(some(24, 64), some(1, 24)[0], W8A8Linear())
    assert linear.nbytes() == 24 * 64 + 4 * 24 + 4 * 24
    work = linear.work(5)
    assert work.flops == {"int8": 2 * 5 * 24 * 64} and work.weight_bytes == linear.nbytes()
    assert work.activation_bytes == 5 * (64 + 24) * 4 + 2 * 5 * 66 and linear.work(0).total_bytes == 0


def test_e4m3_numbers_keep_three_bits_of_what_is_small():
    x = torch.tensor([[448.0, 1.0, -3.3, 0.0]])
    codes, scales = to_e4m3(x)
    off = (codes.float() * scales.float() - x).abs()
    assert bool((off <= x.abs() / 16 + scales.float() / 1024).all())
    int8, step = quantise_rows(x)
    assert int8[0, 1] == 0 and codes[0, 1].float() > 0, "beside an outlier a whole number of 8 bits loses what a float keeps"
    assert (int8.float() * step.float() - x).abs()[0, 1] == 1.0


def test_codes_that_were_given_are_taken_once(small):
    weight = some(8, 16)
    given = quantise(weight * 2, 8, -1, True)
    method = W8A8Linear(codes=given)
    torch.testing.assert_close(method.unpack(method.pack(weight, None)), given.dequantise())
    torch.testing.assert_close(method.unpack(method.pack(weight, None)), quantise(weight, 8, -1, True).dequantise())


def test_calibration_is_asked_for_as_by_the_other_methods(small):
    with pytest.raises(ValueError, match="calibration on text needs a tokenizer"):
        LLM(small, quantization="w8a8")
    LLM(small, quantization=QuantConfig("w8a8", migration=None), num_blocks=20)
    assert quantise_model(small, QuantConfig("fp8")).storage.startswith("FP8, e4m3 weights")


@pytest.mark.parametrize("row", [["a"], [1.5, 2], [None]])
def test_calibration_on_what_is_no_token_id_is_refused(small, row):
    with pytest.raises(ValueError, match="calibration must hold texts or lists of token ids, got"):
        fit(small, QuantConfig("w8a8", calibration=[row]))


@pytest.mark.parametrize("bits, group, symmetric", [(4, -1, True), (8, 16, True), (8, -1, False)])
def test_codes_that_are_no_whole_numbers_around_zero_are_refused(bits, group, symmetric):
    weight = torch.randn(8, 32)
    with pytest.raises(ValueError, match="the codes of the weight must be "):
        Linear(weight, None, W8A8Linear(codes=quantise(weight, bits, group, symmetric)))
