"""Norm, rotation and MLP by their formulas; building, copying and unpacking a Transformer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm import ModelConfig, RopeConfig, Transformer
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.layers import MLP, RMSNorm, apply_rope, rope_frequencies, rope_table
from minillm.model.weights import expected_shapes
from minillm.quant.linear import Linear, PlainLinear, PrepackedLinear, prepack_available

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=24, intermediate_size=20, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=10, max_position=64,
)  # fmt: skip
VARIANTS: dict[str, ModelConfig] = {
    "plain": CONFIG,
    "tied": dataclasses.replace(CONFIG, tie_embeddings=True),
    "qwen2": dataclasses.replace(CONFIG, qkv_bias=True, family="qwen2"),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True, family="qwen3"),
    "biased": dataclasses.replace(CONFIG, qkv_bias=True, attention_out_bias=True, mlp_bias=True),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(model: Transformer, ids: list[int], wants_logits: bool = True) -> Tensor:
    """Logits after a prompt, through a store of 64 slots."""
    store, backend = PlainKVStore.allocate(model.config, 68, model.dtype), TorchAttention(model.config.sliding_window)
    batch = ForwardBatch.build([Row(ids, 0, range(1, 17), wants_logits)], 4)
    with torch.inference_mode():
        return model(batch, store, backend, backend.plan(batch, model.dtype))


def hf_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    return {name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(expected_shapes(config).items())}


# --- the small parts ---


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm_divides_by_the_root_mean_square(scale: float, dtype: torch.dtype, tolerance: float) -> None:
    x, weight = (normal(3, 2, 10) * scale).to(dtype), normal(10, seed=1).to(dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x).double(), exact, rtol=tolerance, atol=tolerance)


def test_norm_of_zeros_is_zero() -> None:
    assert (RMSNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)) == 0).all()


def test_mlp_is_down_of_silu_gate_times_up() -> None:
    gate, up, down, x = normal(20, 12), normal(20, 12, seed=1), normal(12, 20, seed=2), normal(5, 12, seed=3)
    mlp = MLP(Linear(torch.cat([gate, up]), None, PlainLinear()), Linear(down, None, PlainLinear()))
    g = x @ gate.T
    torch.testing.assert_close(mlp(x), (g / (1 + torch.exp(-g)) * (x @ up.T)) @ down.T)


# --- rotary positions ---


def rotate(x: Tensor, positions: list[int], config: ModelConfig = CONFIG) -> Tensor:
    cos, sin = rope_table(config, torch.float64)[positions].unsqueeze(2).unbind(1)
    return apply_rope(x, cos, sin)


def test_rotation_turns_each_pair_of_halves_by_its_own_angle() -> None:
    x, position = normal(1, 1, 10), 7
    got = rotate(x, [position])[0, 0]
    for i in range(5):
        angle = position / 10_000 ** (2 * i / 10)
        pair = torch.view_as_complex(torch.stack([x[0, 0, i], x[0, 0, i + 5]]))
        turned = pair * complex(math.cos(angle), math.sin(angle))
        # the table's angles are products of 32-bit numbers, as they are in transformers
        torch.testing.assert_close(torch.view_as_complex(torch.stack([got[i], got[i + 5]])), turned, rtol=0, atol=1e-6)


def test_position_zero_is_left_alone_and_lengths_are_kept_everywhere() -> None:
    x = normal(64, 3, 10)
    turned = rotate(x, list(range(64)))
    torch.testing.assert_close(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 23))
def test_a_score_depends_on_the_distance_only(a: int, b: int, shift: int) -> None:
    q, k = normal(1, 1, 10, seed=1), normal(1, 1, 10, seed=2)

    def score(i: int, j: int) -> float:
        return float((rotate(q, [i]) * rotate(k, [j])).sum())

    assert score(a, b) == pytest.approx(score(a + shift, b + shift), abs=1e-5)


def test_the_table_covers_every_position_and_takes_the_models_dtype() -> None:
    table = rope_table(CONFIG, torch.bfloat16)
    assert table.shape == (64, 2, 10) and table.dtype == torch.bfloat16


def test_a_factor_of_two_halves_the_angles_of_linear_scaling() -> None:
    linear = dataclasses.replace(CONFIG, rope=RopeConfig(kind="linear", factor=2.0))
    torch.testing.assert_close(rope_frequencies(linear)[0] * 2, rope_frequencies(CONFIG)[0])


def test_yarn_keeps_fast_dimensions_and_interpolates_slow_ones() -> None:
    config = dataclasses.replace(CONFIG, head_dim=64, rope=RopeConfig(kind="yarn", factor=4.0, original_max_position=2048))
    plain = rope_frequencies(dataclasses.replace(config, rope=RopeConfig()))[0]
    stretched, scale = rope_frequencies(config)
    turns = 2048 * plain / (2 * math.pi)  # within the trained length
    assert torch.equal(stretched[turns > 64], plain[turns > 64])
    torch.testing.assert_close(stretched[turns < 0.5], plain[turns < 0.5] / 4)
    assert (stretched <= plain).all() and (stretched >= plain / 4 - 1e-9).all()
    assert scale == pytest.approx(0.1 * math.log(4) + 1)


# --- the model as a whole ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_unpacked_weights_are_the_fused_ones_and_build_the_same_model(variant: str) -> None:
    config = VARIANTS[variant]
    weights = hf_weights(config)
    model = Transformer.from_weights(config, weights, torch.float64)
    dense = model.dense_weights()
    p = "model.layers.1.self_attn"
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        parts = [weights[f"{p}.{n}_proj.{kind}"] for n in "qkv"]
        assert torch.equal(dense[f"{p}.qkv_proj.{kind}"], torch.cat(parts))
    assert ("lm_head.weight" in dense) == (not config.tie_embeddings)
    assert torch.equal(run(Transformer(config, dense, PlainLinear()), [1, 2, 3]), run(model, [1, 2, 3]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_copy_in_another_dtype_is_the_model_rounded(variant: str) -> None:
    model = Transformer.random(VARIANTS[variant], dtype=torch.float64)
    before = {name: t.clone() for name, t in model.dense_weights().items()}
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 1e-2)):
        copy = model.converted(dtype, "cpu")
        assert copy.dtype == dtype and {t.dtype for t in copy.dense_weights().values()} == {dtype}
        torch.testing.assert_close(run(copy, [5, 4, 3, 2]).double(), run(model, [5, 4, 3, 2]), rtol=0, atol=tolerance)
    assert all(torch.equal(t, before[name]) for name, t in model.dense_weights().items())


@pytest.mark.skipif(not prepack_available(), reason="this CPU or torch build has no oneDNN linear in bfloat16")
def test_prepacked_weights_give_the_plain_ones_logits_and_come_back_unpacked() -> None:
    plain = Transformer.random(CONFIG, dtype=torch.bfloat16, linear_method=PlainLinear())
    packed = plain.converted(torch.bfloat16, "cpu", PrepackedLinear())
    assert all(torch.equal(t, packed.dense_weights()[name]) for name, t in plain.dense_weights().items())
    torch.testing.assert_close(run(packed, [1, 2, 3]).float(), run(plain, [1, 2, 3]).float(), rtol=0, atol=0.05)


def test_random_weights_depend_on_the_seed_and_not_on_the_dtype() -> None:
    first, again, other = (Transformer.random(CONFIG, seed=s).dense_weights() for s in (1, 1, 2))
    assert all(torch.equal(first[n], again[n]) and not torch.equal(first[n], other[n]) for n in first)
    rounded = Transformer.random(CONFIG, seed=1, dtype=torch.bfloat16).dense_weights()
    assert all(torch.equal(first[n].bfloat16(), rounded[n]) for n in first)


def test_the_callers_weights_are_not_changed() -> None:
    weights = hf_weights(CONFIG)
    kept = {n: t.clone() for n, t in weights.items()}
    run(Transformer.from_weights(CONFIG, weights, torch.float64), [1, 2, 3])
    assert list(weights) == list(kept) and all(torch.equal(weights[n], kept[n]) for n in kept)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_missing_tensor_is_named(variant: str) -> None:
    weights = hf_weights(VARIANTS[variant])
    for name in weights:
        with pytest.raises(ValueError, match=rf"lacks tensor {name}$"):
            Transformer.from_weights(VARIANTS[variant], {n: t for n, t in weights.items() if n != name})


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_wrong_shape_is_named_with_both_shapes(name: str) -> None:
    weights = hf_weights(CONFIG)
    right = tuple(weights[name].shape)
    weights[name] = torch.zeros(3, 3)
    with pytest.raises(ValueError) as error:
        Transformer.from_weights(CONFIG, weights)
    assert all(part in str(error.value) for part in (name, "(3, 3)", str(right)))


def test_spare_tensors_are_ignored() -> None:
    weights = hf_weights(CONFIG)
    more: dict[str, Any] = {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(5)}
    a, b = (Transformer.from_weights(CONFIG, w, torch.float64) for w in (weights, more))
    assert torch.equal(run(a, [1, 2]), run(b, [1, 2]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_that_wants_no_logits_gives_none(dtype: torch.dtype) -> None:
    logits = run(Transformer.random(CONFIG, dtype=dtype), [1, 2, 3], wants_logits=False)
    assert logits.shape == (0, 31) and logits.dtype == dtype


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_counted_as_the_tensors_have_them(variant: str) -> None:
    config = VARIANTS[variant]
    assert config.num_params == sum(math.prod(shape) for shape in expected_shapes(config).values())
    model = Transformer.random(config)
    assert model.weight_bytes() == 4 * config.num_params + model.rope.nbytes


def test_a_tied_embedding_is_held_once_plainly_and_twice_when_it_is_packed() -> None:
    config = VARIANTS["tied"]
    plain = Transformer.random(config, dtype=torch.bfloat16, linear_method=PlainLinear())
    assert plain.weight_bytes() == 2 * config.num_params + plain.rope.nbytes
    if prepack_available():
        packed = plain.converted(torch.bfloat16, "cpu", PrepackedLinear())
        assert packed.weight_bytes() == plain.weight_bytes() + 2 * 31 * 24
