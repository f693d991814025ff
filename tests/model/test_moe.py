"""The mixture of experts against a loop over tokens, against `transformers`, and at the edges where grouped rows go wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from minillm import ModelConfig, Transformer
from minillm.model.layers import MLP
from minillm.model.loads import ExpertLoads
from minillm.model.moe import MoE, Router, route
from minillm.model.moe_config import MoEConfig
from minillm.model.presets import preset
from minillm.quant.linear import Linear, PlainLinear

from ..strategies import one_thread  # noqa: F401

HIDDEN = 10


def linear(out: int, inner: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Linear:
    weight = torch.randn(out, inner, generator=generator, dtype=torch.float64) / inner**0.5
    return Linear(weight.to(dtype), None, PlainLinear())


def mixture(moe: MoEConfig, seed: int = 0, router: Tensor | None = None, dtype: torch.dtype = torch.float64) -> MoE:
    g = torch.Generator().manual_seed(seed)
    gate_up = [linear(2 * moe.expert_size, HIDDEN, g, dtype) for _ in range(moe.num_experts)]
    down = [linear(HIDDEN, moe.expert_size, g, dtype) for _ in range(moe.num_experts)]
    shared = None
    if moe.shared_size:
        shared = MLP(linear(2 * moe.shared_size, HIDDEN, g, dtype), linear(HIDDEN, moe.shared_size, g, dtype))
    weight = torch.randn(moe.num_experts, HIDDEN, generator=g, dtype=torch.float64) if router is None else router
    bias = torch.randn(moe.num_experts, generator=g, dtype=torch.float64) if moe.selection_bias else None
    return MoE(moe, Router(moe, weight.to(dtype), bias), gate_up, down, shared)


def by_token(layer: MoE, x: Tensor) -> Tensor:
    """The same layer, token by token and expert by expert."""
    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        experts, weights = layer.router(row[None])
        for e, w in zip(experts[0].tolist(), weights[0]):
            gate, up = layer.gate_up.linears[e](row[None])[0].chunk(2)
            out[t] += w * layer.down.linears[e]((torch.nn.functional.silu(gate) * up)[None])[0]
        if layer.shared is not None:
            out[t] += layer.shared(row[None])[0]
    return out


@st.composite
def shapes(draw: st.DrawFn) -> MoEConfig:
    groups, each = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    top_groups = draw(st.integers(1, groups))
    return MoEConfig(
        groups * each, draw(st.integers(1, top_groups * each)), draw(st.integers(1, 7)), draw(st.sampled_from([0, 3])),
        draw(st.sampled_from(["softmax", "sigmoid"])), draw(st.booleans()), draw(st.booleans()),
        draw(st.sampled_from([1.0, 2.5])), groups, top_groups,
    )  # fmt: skip


def rows(tokens: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- routing ---


def test_softmax_weights_are_shares_of_all_experts_or_renormalised_to_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).double().log_softmax(-1)
    experts, weights = route(logits, MoEConfig(3, 2, 1, renormalise=False))
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.exp()[:, [1, 2]])
    torch.testing.assert_close(route(logits, MoEConfig(3, 2, 1))[1], (weights / weights.sum()), rtol=1e-12, atol=0)
    torch.testing.assert_close(route(logits, MoEConfig(3, 2, 1, scale=2.5))[1].sum(), torch.tensor(2.5).double())


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5]]).double()
    moe = MoEConfig(4, 2, 1, scoring="sigmoid", selection_bias=True)
    experts, weights = route(logits, moe, torch.tensor([0.0, 0.0, 5.0, 0.0]).double())
    assert experts.tolist() == [[2, 1]], "the bias lifts expert 2 above all others"
    chosen = logits.sigmoid()[0, [2, 1]]
    torch.testing.assert_close(weights[0], chosen / chosen.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equal_scores_the_lower_expert_wins_wherever_the_row_stands(scoring: str) -> None:
    moe = MoEConfig(9, 4, 1, scoring=scoring)
    assert route(torch.zeros(3, 9), moe)[0].tolist() == [[0, 1, 2, 3]] * 3
    tied = torch.tensor([[1.0, 3, 3, 0, 3, 3, 3, 1, 3]])
    for tokens in (1, 2, 17, 300):
        assert route(tied.expand(tokens, -1), moe)[0].tolist() == [[1, 2, 4, 5]] * tokens


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("size", [0.0, 1e4, -1e4, 3e38])
def test_extreme_logits_give_finite_weights(scoring: str, size: float) -> None:
    for row in (torch.full((1, 4), size), torch.tensor([[size, -size, 0.0, 1.0]])):
        experts, weights = route(row, MoEConfig(4, 2, 1, scoring=scoring))
        assert torch.isfinite(weights).all() and (weights >= 0).all() and len(set(experts[0].tolist())) == 2


def test_experts_outside_the_best_groups_are_not_chosen() -> None:
    moe = MoEConfig(6, 2, 1, scoring="sigmoid", num_groups=3, top_groups=1)
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.5, 0.0, 0.5]])
    assert route(logits, moe)[0].tolist() == [[3, 2]], "two good experts outrank one that is best of all"
    assert route(logits, dataclasses.replace(moe, scoring="softmax"))[0].tolist() == [[0, 1]], "here the best one decides"


# --- the layer ---


@given(shapes(), st.integers(0, 40), st.integers(0, 9))
def test_the_layer_equals_a_loop_over_tokens(moe: MoEConfig, tokens: int, seed: int) -> None:
    layer, x = mixture(moe, seed), rows(tokens, seed)
    kept = x.clone()
    torch.testing.assert_close(layer(x), by_token(layer, x), rtol=1e-10, atol=1e-12)
    assert torch.equal(x, kept)


@given(shapes(), st.integers(2, 30), st.data())
def test_a_tokens_output_does_not_depend_on_its_batch_mates(moe: MoEConfig, tokens: int, data: st.DataObject) -> None:
    layer, x = mixture(moe), rows(tokens)
    whole = layer(x)
    some = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=tokens))
    torch.testing.assert_close(layer(x[some]), whole[some], rtol=1e-10, atol=1e-12)


def test_experts_without_tokens_leave_no_memory_uninitialised(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(make: Any) -> Any:
        def empty(*args: Any, **options: Any) -> Tensor:
            made = make(*args, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return empty

    one = torch.zeros(6, HIDDEN).double()
    one[4] = 1.0  # all tokens of positive sum go to expert 4, and to 0 as the lowest of the rest
    cases = [
        (mixture(MoEConfig(6, 2, 5), router=one), rows(7).abs(), [7, 0, 0, 0, 7, 0]),
        (mixture(MoEConfig(6, 1, 5)), rows(1), None),
        (mixture(MoEConfig(4, 4, 5)), rows(3), [3, 3, 3, 3]),
    ]
    expected = [by_token(layer, x) for layer, x, _ in cases]
    for home, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(home, name, poisoned(getattr(home, name)))
    for (layer, x, counts), right in zip(cases, expected):
        loads = ExpertLoads()
        torch.testing.assert_close(layer(x, None, loads, 3), right, rtol=1e-10, atol=1e-12)
        assert counts is None or loads.counts() == {3: counts}


def test_no_capacity_drops_a_token_however_crowded_an_expert_is() -> None:
    layer, x = mixture(MoEConfig(8, 2, 5)), rows(1).expand(200, -1)
    torch.testing.assert_close(layer(x), layer(x[:1]).expand(200, -1), rtol=1e-10, atol=1e-12)


# --- against transformers ---


def from_transformers(block: Any, moe: MoEConfig) -> MoE:
    """Our layer with the weights of a module of transformers."""

    def held(weight: Tensor) -> Linear:
        return Linear(weight.detach(), None, PlainLinear())

    bias = getattr(block.gate, "e_score_correction_bias", None)
    shared = block.shared_experts
    gate_up = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
    return MoE(
        moe, Router(moe, block.gate.weight.detach(), bias if moe.selection_bias else None),
        [held(w) for w in block.experts.gate_up_proj], [held(w) for w in block.experts.down_proj],
        MLP(held(gate_up), held(shared.down_proj.weight)),
    )  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("groups, top_groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_deepseeks_experts_agree_with_transformers(version: int, groups: int, top_groups: int, renormalise: bool) -> None:
    v3 = version == 3  # version 2 never renormalises
    moe = MoEConfig(8, 3, 12, 24, "sigmoid" if v3 else "softmax", renormalise and v3, v3, 2.5, groups, top_groups)
    config = getattr(transformers, f"DeepseekV{version}Config")(
        hidden_size=HIDDEN, moe_intermediate_size=12, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3,
        num_attention_heads=2,
        n_group=groups, topk_group=top_groups, norm_topk_prob=moe.renormalise, routed_scaling_factor=2.5,
        topk_method="greedy" if groups == 1 else "group_limited_greedy",
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = (DeepseekV3MoE if version == 3 else DeepseekV2Moe)(config)
    torch.manual_seed(0)
    for tensor in [*block.parameters(), *block.buffers()]:
        torch.nn.init.normal_(tensor, std=0.5)
    x = rows(20).float()
    with torch.no_grad():
        expected = block(x[None])[0]
        got = from_transformers(block, moe)(x)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


# --- counted work ---


VECTORS = {torch.ops.aten.mv: lambda weight, row, **_: 2 * weight[0] * weight[1]}  # torch does not count these


@given(shapes(), st.integers(1, 20))
def test_flops_equal_torchs_count_and_only_touched_experts_are_read(moe: MoEConfig, tokens: int) -> None:
    layer, x, loads = mixture(moe), rows(tokens), ExpertLoads()
    with FlopCounterMode(display=False, custom_mapping=VECTORS) as counter:
        layer(x, None, loads)
    (counts,) = loads.counts().values()
    assert sum(counts) == tokens * moe.top_k and max(counts) <= tokens
    work = layer.work(tokens) + layer.routed_work(counts)
    assert work.total_flops == counter.get_total_flops()
    touched = sum(1 for n in counts if n)
    assert layer.routed_work(counts).weight_bytes == 8 * touched * moe.expert_params(HIDDEN)
    assert layer.work(tokens).weight_bytes == 8 * moe.common_params(HIDDEN)


def test_padded_rows_are_counted_as_work_wherever_they_pass() -> None:
    layer = mixture(MoEConfig(4, 2, 5), dtype=torch.bfloat16)
    even, uneven = layer.routed_work([7, 7, 7, 0]), layer.routed_work([7, 2, 1, 0])
    assert even.launches + 6 == uneven.launches, "padding shifts rows"
    assert dataclasses.replace(uneven, launches=even.launches) == even, "three experts, seven rows each"
    assert layer.routed_work([7, 0, 2, 0]).total_flops == 2 * 9 * MoEConfig(4, 2, 5).expert_params(HIDDEN), "no neighbours"


def test_distinct_experts_follow_the_formula_of_equal_chances() -> None:
    moe = MoEConfig(256, 8, 1)
    assert moe.distinct_experts(1) == pytest.approx(8) and round(moe.distinct_experts(32)) == 163
    logits = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    assert abs(len(route(logits, moe)[0].unique()) - 163) < 12
    assert MoEConfig(4, 4, 1).distinct_experts(1) == 4


# --- shapes ---


def test_presets_have_the_parameters_that_were_published() -> None:
    qwen, mixtral = preset("qwen3-30b-a3b"), preset("mixtral-8x7b")
    assert (round(qwen.num_params / 1e9, 1), round(qwen.active_params / 1e9, 1)) == (30.5, 3.4)
    assert (round(mixtral.num_params / 1e9, 1), round(mixtral.active_params / 1e9, 1)) == (46.7, 12.9)
    assert preset("qwen3-32b").active_params == preset("qwen3-32b").num_params


CONFIG = ModelConfig(
    vocab_size=31, hidden_size=24, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6, max_position=64,
    moe=MoEConfig(6, 2, 5, shared_size=7, scoring="sigmoid", selection_bias=True, dense_layers=(0,)), name="experts",
)  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_parameters_are_counted_as_the_tensors_have_them(family: str) -> None:
    config = dataclasses.replace(CONFIG, family=family)
    model = Transformer.random(config, dtype=torch.float64)
    weights = model.dense_weights()
    assert sum(t.numel() for t in weights.values()) == config.num_params
    assert model.weight_bytes() == 8 * config.num_params + model.rope.nbytes
    again = model.converted(torch.float64, "cpu").dense_weights()
    assert weights.keys() == again.keys() and all(torch.equal(t, again[name]) for name, t in weights.items())


def test_the_bias_that_chooses_keeps_32_bits_in_a_16_bit_model() -> None:
    exact = Transformer.random(CONFIG)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    half = Transformer.random(CONFIG, dtype=torch.bfloat16)
    for model in (half, exact.converted(torch.bfloat16, "cpu"), half.converted(torch.float16, "cpu")):
        assert torch.equal(model.dense_weights()[bias], exact.dense_weights()[bias])


def test_a_model_of_some_layers_knows_which_of_them_are_dense() -> None:
    model = Transformer.random(CONFIG)
    assert CONFIG.sparse_layers == (1, 2)
    assert model.skipping([2, 0]).config.sparse_layers == (0,) and model.skipping([1, 2]).config.sparse_layers == (0, 1)
    assert model.skipping([0]).config.sparse_layers == ()


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"num_experts": 0}, "num_experts"), ({"top_k": 9}, "9"), ({"top_k": True}, "True"), ({"scoring": "relu"}, "relu"),
        ({"num_groups": 3}, "3 groups"), ({"num_groups": 2, "top_groups": 3}, "3 of 2"), ({"scale": 0.0}, "0.0"),
        ({"scale": "2"}, "'2'"), ({"scale": None}, "None"), ({"scale": True}, "True"), ({"renormalise": "no"}, "'no'"),
        ({"selection_bias": 1}, "selection_bias"), ({"dense_layers": [0]}, "tuple"), ({"dense_layers": ("0",)}, "'0'"),
        ({"dense_layers": 1}, "got 1"), ({"dense_layers": (True,)}, "True"),
        ({"shared_size": -1}, "-1"), ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "2 experts"),
    ],
)  # fmt: skip
def test_a_shape_that_cannot_be_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MoEConfig(**{"num_experts": 8, "top_k": 2, "expert_size": 4, **wrong})


def test_a_model_refuses_layers_it_lacks_and_what_is_no_shape() -> None:
    with pytest.raises(ValueError, match=r"\[3\] are outside the 3 layers"):
        dataclasses.replace(CONFIG, moe=MoEConfig(4, 2, 5, dense_layers=(3,)))
    with pytest.raises(ValueError, match="must be a MoEConfig"):
        dataclasses.replace(CONFIG, moe=8)
    with pytest.raises(ValueError, match="mlp_bias"):
        dataclasses.replace(CONFIG, mlp_bias=True)
