"""Whole models: AWQ and GPTQ lose no more than rounding to nearest in any layer, and change nothing but the rounding."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, Engine, EngineConfig, SamplingParams, Transformer
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.engine.batch import ForwardBatch, Row
from minillm.quant.calibrate import LINEARS, Seen, calibration_rows, layer_by_layer
from minillm.quant.config import QuantConfig
from minillm.quant.gptq import gptq
from minillm.quant.grid import choose_grid, quantise, to_codes
from minillm.quant.group_linear import GroupLinear
from minillm.quant.linear import PlainLinear
from minillm.quant.quantise import fit, quantise_model

from ..reference import Reference
from ..strategies import FakeTokenizer, run_to_end, tiny_model
from .conftest import small_config

GRIDS = [(4, 32, False), (4, 16, True), (3, 32, False), (3, -1, True), (2, 16, False), (8, 16, False)]


def logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    store = PlainKVStore.allocate(model.config, 2 * len(ids), model.dtype)
    backend = TorchAttention(model.config.sliding_window)
    batch = ForwardBatch.build([Row(ids, 0, [1])], len(ids))
    batch = ForwardBatch(**{**batch.__dict__, "logit_indices": torch.arange(len(ids))})
    with torch.inference_mode():
        return model(batch, store, backend, backend.plan(batch, model.dtype)).double()


@pytest.mark.parametrize("bits, group, symmetric", GRIDS)
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_no_layer_loses_more_than_rounding_to_nearest(small, rows, method, bits, group, symmetric):
    losses = fit(small, QuantConfig(method, bits, group, symmetric, calibration=rows)).losses
    assert [loss.name for loss in losses] == [f"model.layers.{i}.{name}" for i in range(2) for name in LINEARS]
    assert all(0 <= loss.chosen <= loss.nearest for loss in losses)
    assert sum(loss.chosen for loss in losses) < 0.9 * sum(loss.nearest for loss in losses)


def test_the_losses_are_those_of_the_layers_real_inputs(small, rows):
    """Gram matrices give the mean squared error; here it is taken over the inputs themselves."""
    work = small.converted(torch.float64, "cpu", PlainLinear())
    inputs = {}

    def watch(prefix, layer, seen):
        for name, find in LINEARS.items():
            hook = lambda m, x, n=f"{prefix}.{name}": inputs.__setitem__(n, x[0])  # noqa: E731
            find(layer).register_forward_pre_hook(hook)

    layer_by_layer(work, rows, watch)
    found = fit(small, QuantConfig("gptq", 3, 16, calibration=rows))
    name = "model.layers.0.mlp.down_proj"  # nothing before it is quantised yet when its inputs are seen
    weight = small.dense_weights()[f"{name}.weight"]
    error = inputs[name] @ (found.codes[name].dequantise(torch.float64) - weight).T
    chosen = next(loss.chosen for loss in found.losses if loss.name == name)
    assert chosen == pytest.approx(float(error.square().sum(1).mean()), rel=1e-9)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 6}, {"num_kv_heads": 1}, {"qk_norm": True}, {"sliding_window": 5}])
def test_awq_is_the_same_function_until_it_is_rounded(rows, changes):
    """Eight bits in groups of 4 hardly round: any scale that is not undone where it should be would show."""
    model = Transformer.random(small_config(qkv_bias=True, mlp_bias=True, **changes), seed=2, dtype=torch.float64)
    found = fit(model, QuantConfig("awq", 2, 16, calibration=rows))  # scales as for two bits ...
    exact = Transformer(model.config, found.weights, PlainLinear())
    assert not torch.equal(exact.layers[0].mlp_norm.weight, model.layers[0].mlp_norm.weight)
    quantised = quantise_model(model, QuantConfig("awq", 8, 4, head_bits=None, calibration=rows))
    ids = rows[0][:20]
    torch.testing.assert_close(logits(quantised, ids), logits(model, ids), rtol=0, atol=0.15)


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_the_engine_computes_what_the_dequantised_weights_say(small, rows, method):
    config = QuantConfig(method, 4, 16, calibration=None if method == "rtn" else rows)
    before = {name: t.clone() for name, t in small.dense_weights().items()}
    llm = LLM(small, quantization=config, num_blocks=40, block_size=4)
    answer = llm.generate(rows[2], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
    reference = Reference(llm.model)
    reference.weights["lm_head.weight"] = llm.model.head.dense()[0]
    assert list(answer) == reference.greedy(rows[2], 8)
    assert all(torch.equal(before[name], t) for name, t in small.dense_weights().items()), "the caller's model is his"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_request_does_not_depend_on_its_batch_mates(small, rows, dtype):
    model = quantise_model(small, QuantConfig("rtn", 4, 32), dtype=dtype)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [row[:9] for row in rows]
    alone = []
    for prompt in prompts:
        engine = Engine(model, None, EngineConfig(num_blocks=30, block_size=4))
        engine.add_request(prompt, params)
        alone += [o.token_ids for o in run_to_end(engine).values()]
    engine = Engine(model, None, EngineConfig(num_blocks=60, block_size=4, max_num_batched_tokens=7))
    names = [engine.add_request(prompt, params) for prompt in prompts]
    done = run_to_end(engine)
    assert [done[name].token_ids for name in names] == alone


def test_the_meter_reads_fewer_bytes_and_holds_what_is_held(small):
    llm = LLM(small, dtype="float32", quantization=QuantConfig("rtn", 4, 32), num_blocks=40)
    plain = LLM(small, dtype="float32", num_blocks=40)
    for one in (llm, plain):
        one.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    layers = 2 * (64 * (96 + 64) + 96 * 64 + 3 * 64 * 96) * 4
    assert plain.meter.weight_bytes_held - llm.meter.weight_bytes_held > 0.7 * layers
    assert llm.meter.weight_bytes < 0.35 * plain.meter.weight_bytes
    assert llm.meter.flops == plain.meter.flops
    assert llm.model.weight_bytes() == llm.meter.weight_bytes_held
    assert "RTN, 4 bits, asymmetric, groups of 32, head in 8 bits; torch's int4 kernel" in llm.engine.description


def test_a_group_that_does_not_divide_is_refused_before_anything_runs(small, rows):
    with pytest.raises(ValueError, match="in_features 96 of model.layers.0.self_attn.o_proj is not a multiple of group 64"):
        LLM(small, quantization="rtn")
    with pytest.raises(ValueError, match="in_features 64 of model.layers.0.self_attn.qkv_proj is not a multiple of group 48"):
        LLM(small, quantization=QuantConfig("gptq", group=48, calibration=rows))


def spoilt(name: str, value: float, dtype: torch.dtype = torch.float32) -> Transformer:
    """A model with one number of one tensor replaced."""
    model = Transformer.random(small_config(tie_embeddings=False), seed=5, dtype=dtype)
    weights = {key: t.clone() for key, t in model.dense_weights().items()}
    weights[name].view(-1)[5] = value
    return Transformer(model.config, weights, PlainLinear()).eval()


def chosen(method: str, rows: list[list[int]]) -> QuantConfig:
    own = {"calibration": rows} if method in ("awq", "gptq", "w8a8") else {}
    return QuantConfig(method, **own, **({"group": 16} if method in ("rtn", "awq", "gptq") else {}))


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq", "w8a8", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_a_weight_that_is_no_number_is_named_whatever_the_method(rows, method, value, name):
    model = spoilt(f"{name}.weight", value, torch.float64)
    what = "beyond float32" if value == 1e300 else "that is not finite"
    with pytest.raises(ValueError, match=f"{name} holds a number {what} and cannot be quantised"):
        quantise_model(model, chosen(method, rows))


@pytest.mark.parametrize("method", ["awq", "gptq", "w8a8"])
@pytest.mark.parametrize(
    "tensor, value, fed",
    [("input_layernorm", float("nan"), "self_attn.qkv_proj"), ("post_attention_layernorm", 1e30, "mlp.gate_up_proj"),
     ("self_attn.qkv_proj", 3e38, "self_attn.o_proj")],
)  # fmt: skip
def test_a_layer_that_is_fed_no_numbers_is_named_and_nothing_fitted_to_them(rows, method, tensor, value, fed):
    with pytest.raises(ValueError, match=f"model.layers.1.{fed} is fed numbers that are not finite, or too large"):
        quantise_model(spoilt(f"model.layers.1.{tensor}.weight", value), chosen(method, rows))


def test_calibration_needs_something_to_read(small):
    with pytest.raises(ValueError, match="calibration on text needs a tokenizer"):
        LLM(small, quantization=QuantConfig("awq", group=16))
    with pytest.raises(ValueError, match="token ids in 0..63, got 64"):
        LLM(small, quantization=QuantConfig("awq", group=16, calibration=[[1, 64]]))
    with pytest.raises(ValueError, match="an empty row"):
        LLM(small, quantization=QuantConfig("gptq", group=16, calibration=[[1], []]))


def test_calibration_rows_are_cut_and_chosen_evenly():
    model = tiny_model()
    rows = calibration_rows(["ab" * 100, [5] * 49], FakeTokenizer(), model)
    assert [len(r) for r in rows] == [48, 48, 48, 48, 8, 48, 1]
    many = calibration_rows([[i % 32] for i in range(160)], None, model)
    assert many == [[i % 32] for i in range(0, 160, 10)]


def test_the_same_text_gives_the_same_codes(small, rows):
    one, two = (fit(small, QuantConfig("gptq", 3, 16, calibration=rows)).codes for _ in range(2))
    assert all(torch.equal(one[name].codes, two[name].codes) for name in one)


def test_a_channel_that_never_fires_is_no_problem(rows):
    model = Transformer.random(small_config(), seed=5)
    model.layers[0].attention_norm.weight[7] = 0
    for method in ("awq", "gptq"):
        losses = fit(model, QuantConfig(method, 4, 16, calibration=rows)).losses
        assert all(torch.isfinite(torch.tensor([x.chosen, x.nearest])).all() and x.chosen <= x.nearest for x in losses)


def test_an_object_of_ones_own_still_plugs_in(small):
    llm = LLM(small, quantization=GroupLinear(4, 32, True), num_blocks=20)
    assert llm.model.head._buffers["codes"].shape == (64, 32)
    assert len(llm.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_gptq_falls_back_to_rounding_to_nearest_where_it_loses(monkeypatch):
    """With a factor that spreads each error over all later columns at random, its updates do harm."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 32, generator=generator), torch.randn(64, 32, generator=generator)
    harmful = torch.eye(32) + 5 * torch.randn(32, 32, generator=generator).triu(1)
    monkeypatch.setattr("minillm.quant.gptq._inverse_factor", lambda gram: harmful)
    found, nearest = gptq(weight, Seen.of(x), 3, 16, False), quantise(weight, 3, 16, False)
    assert torch.equal(found.codes, nearest.codes) and torch.equal(found.scales, nearest.scales)


@pytest.mark.parametrize("bits, group, symmetric", [(3, 16, False), (2, 24, True), (4, -1, False)])
def test_gptq_is_column_after_column_with_the_inverse_of_what_is_left(bits, group, symmetric):
    """The paper's rule as it stands: after a column its error is spread over those to come, and the column leaves the problem."""
    generator = torch.Generator().manual_seed(7)
    weight, x = (torch.randn(n, 48, generator=generator, dtype=torch.float64) for n in (20, 200))
    x = x @ torch.randn(48, 48, generator=generator, dtype=torch.float64)
    seen, left = Seen.of(x), weight.clone()
    hessian = seen.gram + 0.01 * seen.gram.diagonal().mean() * torch.eye(48, dtype=torch.float64)
    size, codes = 48 if group == -1 else group, []
    for j in range(48):
        if j % size == 0:
            scale, zero = choose_grid(left[:, j : j + size], bits, symmetric)
        codes.append(to_codes(left[:, j : j + 1], scale, zero, bits))
        error = left[:, j : j + 1] - (codes[-1].double() - zero) * scale
        inverse = torch.linalg.inv(hessian[j:, j:])
        left[:, j:] -= error / inverse[0, 0] * inverse[0]
    assert torch.equal(gptq(weight, seen, bits, group, symmetric).codes, torch.cat(codes, 1))
