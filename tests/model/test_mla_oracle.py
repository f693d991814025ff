"""Latent attention against `transformers`: tiny random DeepSeek models with dense layers, in 32 bits, in every form."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Sequence

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import LLM, ModelConfig, SamplingParams
from minillm.model.loader import load_checkpoint

from .test_transformer_oracle import (
    LATENT,
    ROPES,
    SIZES,
    TOLERANCE,
    Paged,
    oracle,
    ours,
    prompt,
    quick,  # noqa: F401
    reference,
    save,
)

FORMS = ["auto", "absorbed", "naive"]
WIDTHS: dict[str, Any] = {
    "kv_lora_rank": 20, "q_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14,
    "num_key_value_heads": 6, "head_dim": 8, "first_k_dense_replace": 99, "rms_norm_eps": 1e-3,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "queries that are not compressed": {"q_lora_rank": None},
    "values wider than keys": {"v_head_dim": 24},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    **{f"rope {name}": {"rope_parameters": {"rope_theta": 500.0, **rope}} for name, rope in ROPES.items() if "mscale" in name},
    "rope of real models": {
        "rope_parameters": {**ROPES["yarn with mscale"], "rope_theta": 500.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    },
    "experts": {
        "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
        "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "topk_method": "group_limited_greedy",
    },
    "linear rope": {"rope_parameters": {"rope_theta": 500.0, **ROPES["linear"]}},
}


def assert_forms_agree(folder: Path, forms: Sequence[str] = ("auto",)) -> None:
    """A prompt, tokens one by one, and a chunk after all these give the logits that transformers gives."""
    model, cuts = ours(folder), [0, 17, 18, 19, 20, 26]
    ids = prompt(cuts[-1], model.config.vocab_size)
    expected = reference(folder, ids)
    assert expected.std() > 0.3, "logits this small would agree whatever the code does"
    for form in forms:
        paged = Paged(model, form=form)
        got = torch.cat([paged.step([(0, ids[a:b], a)]) for a, b in zip(cuts, cuts[1:])])
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", LATENT)
def test_each_family_agrees_with_transformers_in_every_form(family: str, variant: str, tmp_path: Path) -> None:
    folder = save(tmp_path, family, **{**WIDTHS, **VARIANTS[variant]})
    assert_forms_agree(folder, FORMS)


def test_v3_may_store_rotated_dimensions_in_halves(tmp_path: Path) -> None:
    folder = save(tmp_path, "deepseek_v3", **{**WIDTHS, "rope_interleave": False})
    assert not load_checkpoint(folder).config.mla.interleaved  # type: ignore[union-attr]
    assert_forms_agree(folder)
    expected = reference(folder, prompt(24))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"rope_interleave": True}))
    pairs = Paged(ours(folder)).step([(0, prompt(24), 0)])
    assert (expected - pairs).abs().max() > 100 * TOLERANCE, "or the two orders would be one"


@settings(max_examples=8)
@given(st.data(), st.sampled_from(sorted(LATENT)), st.integers(0, 99))
def test_any_shape_agrees_with_transformers(data: st.DataObject, family: str, seed: int) -> None:
    heads, rope_dim = data.draw(st.integers(1, 5)), 2 * data.draw(st.integers(1, 8))
    even = 2 if family == "deepseek_v2" else 1  # transformers wants V2 to have even strides
    sizes = {
        **WIDTHS, "num_attention_heads": heads, "num_key_value_heads": heads,
        "hidden_size": heads * data.draw(st.integers(8, 14)),
        "kv_lora_rank": even * data.draw(st.integers(1, 20)), "q_lora_rank": data.draw(st.none() | st.integers(1, 30)),
        "qk_nope_head_dim": even * data.draw(st.integers(1, 10)), "qk_rope_head_dim": rope_dim, "head_dim": rope_dim,
        "v_head_dim": data.draw(st.integers(1, 30)),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        assert_forms_agree(save(folder, family, seed, **sizes), [data.draw(st.sampled_from(FORMS))])


@pytest.mark.parametrize("family", LATENT)
def test_greedy_ids_of_the_engine_are_those_of_generate(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path, family, **WIDTHS)
    prompts = [prompt(n, seed=n) for n in (1, 4, 17)]
    llm = LLM(folder, dtype="float32", block_size=4, max_num_batched_tokens=8, prefix_cache="radix")
    peer = oracle(folder)
    for ids, output in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=12)), strict=True):
        mask = torch.ones(1, len(ids), dtype=torch.long)
        full = peer.generate(torch.tensor([ids]), attention_mask=mask, max_new_tokens=12, do_sample=False)
        assert list(output.token_ids) == full[0, len(ids) :].tolist()


def test_the_old_spelling_of_yarn_is_that_of_the_published_models(tmp_path: Path) -> None:
    folder = save(tmp_path, "deepseek_v3", **WIDTHS)
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
    raw |= {"rope_theta": 500.0, "rope_scaling": {**yarn, "beta_fast": 32, "beta_slow": 1}}
    (folder / "config.json").write_text(json.dumps(raw))
    assert_forms_agree(folder)


RAW = {
    **{k: v for k, v in SIZES.items() if v is not None}, **WIDTHS, "architectures": ["DeepseekV2ForCausalLM"],
}  # fmt: skip


def test_a_config_gives_the_cache_and_the_parameters_of_the_model() -> None:
    config = ModelConfig.from_hf(RAW)
    assert (config.head_dim, config.rope_dim, config.kv_width, config.group_size) == (18, 8, 28, 1)
    assert config.kv_bytes_per_token(4) == 2 * 28 * 4
    model = transformers.DeepseekV2ForCausalLM(LATENT["deepseek_v2"](**{**SIZES, **WIDTHS}))
    assert config.num_params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_bias": True}, "attention_bias beside latent attention"),
        ({"num_key_value_heads": 2}, "2 KV heads for 6 heads"),
        ({"kv_lora_rank": None}, "no kv_lora_rank"),
        ({"kv_lora_rank": 0}, "kv_rank of latent attention must be a whole number of at least 1, got 0"),
        ({"qk_rope_head_dim": 7}, "rope_dim of latent attention must be even for rotary embeddings, got 7"),
        ({"q_lora_rank": "12"}, "q_lora_rank '12'"),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(RAW | changes)

