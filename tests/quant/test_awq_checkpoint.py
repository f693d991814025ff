# ruff: noqa: E501
"""The AutoAWQ layout, read back by a reader that knows only the description of the format, not our code."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file

from minillm import LLM, SamplingParams, Transformer
from minillm.model.config import RopeConfig
from minillm.quant.awq_checkpoint import load_awq, save_awq
from minillm.quant.config import QuantConfig
from minillm.quant.group_linear import GroupLinear
from minillm.quant.quantise import quantise_model
from minillm.quant.words import pack_words, unpack_words

from ..strategies import EXPERTS, tiny_config
from .conftest import small_config


def independent_read(folder, layer: str) -> np.ndarray:
    """A layer's weight [out, in] from the three tensors, word by word in Python's own integers."""
    tensors = load_file(folder / "model.safetensors")
    words, zeros, scales = (tensors[f"{layer}.{kind}"] for kind in ("qweight", "qzeros", "scales"))
    in_features, out_features = words.shape[0], scales.shape[1]
    size = in_features // scales.shape[0]
    place = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}  # channel → nibble

    def nibble(word, channel):
        return (int(word) % 2**32 >> 4 * place[channel % 8]) % 16

    weight = np.empty((out_features, in_features), np.float64)
    for k in range(in_features):
        for n in range(out_features):
            code, zero = nibble(words[k, n // 8], n), nibble(zeros[k // size, n // 8], n)
            weight[n, k] = (code - zero) * float(scales[k // size, n])
    return weight


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 15), min_size=16, max_size=16), min_size=1, max_size=4))
def test_words_keep_every_nibble_also_where_they_are_negative(rows):
    codes = torch.tensor(rows, dtype=torch.uint8)
    assert torch.equal(unpack_words(pack_words(codes)), codes)


def test_a_word_by_hand():
    assert pack_words(torch.tensor([[0, 1, 2, 3, 4, 5, 6, 15]], dtype=torch.uint8)).item() == 0xF5316420 - 2**32
    with pytest.raises(ValueError, match="12 is not a multiple of 8"):
        pack_words(torch.zeros(1, 12, dtype=torch.uint8))


@pytest.mark.parametrize("method, symmetric", [("rtn", False), ("rtn", True), ("awq", False), ("gptq", False)])
def test_what_is_written_is_what_was_quantised(small, rows, tmp_path, method, symmetric):
    config = QuantConfig(method, 4, 16, symmetric, calibration=None if method == "rtn" else rows)
    model = quantise_model(small, config, dtype=torch.float32)
    save_awq(model, tmp_path)
    layer = model.layers[1]
    qkv, gate_up = layer.attention.qkv.dense()[0].numpy(), layer.mlp.gate_up.dense()[0].numpy()
    for name, expected in [
        ("self_attn.q_proj", qkv[:96]), ("self_attn.k_proj", qkv[96:128]), ("self_attn.v_proj", qkv[128:]),
        ("self_attn.o_proj", layer.attention.out.dense()[0].numpy()), ("mlp.gate_proj", gate_up[:96]),
        ("mlp.up_proj", gate_up[96:]), ("mlp.down_proj", layer.mlp.down.dense()[0].numpy()),
    ]:  # fmt: skip
        np.testing.assert_array_equal(independent_read(tmp_path, f"model.layers.1.{name}"), expected.astype(np.float64))
    raw = json.loads((tmp_path / "config.json").read_text())
    quant = raw["quantization_config"]
    assert (quant["quant_method"], quant["bits"], quant["group_size"], quant["version"]) == ("awq", 4, 16, "gemm")


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"qk_norm": True, "family": "qwen3"}])
def test_a_saved_model_answers_as_the_one_that_was_saved(tmp_path, changes):
    model = Transformer.random(small_config(**changes), seed=4, dtype=torch.float32)
    quantised = quantise_model(model, QuantConfig("rtn", 4, 16))
    # the layout's 16 bits round norms and embedding: compare after one trip, which then changes nothing more
    once = load_awq(save_awq(quantised, tmp_path / "once"))
    twice = load_awq(save_awq(once, tmp_path / "twice"))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = (LLM(m, num_blocks=20).generate([[1, 2, 3]], params)[0].token_ids for m in (once, twice))
    assert first == second and once.storage == twice.storage == quantised.storage.replace("RTN", "AWQ")
    for a, b in zip(quantised.layers.buffers(), once.layers.buffers(), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-3, atol=1e-6)


def test_the_engine_opens_a_folder_of_quantised_weights(tmp_path):
    model = quantise_model(Transformer.random(small_config(), seed=4), QuantConfig("rtn", 4, 16))
    folder = save_awq(model, tmp_path / "saved")
    llm = LLM(folder, num_blocks=20, dtype="bfloat16")
    assert llm.model.dtype == torch.bfloat16 and "AWQ, 4 bits, asymmetric, groups of 16" in llm.engine.description
    codes = [m.layers[0].mlp.down for m in (model, llm.model)]
    assert torch.equal(*(linear.method.codes(linear._buffers).codes for linear in codes))
    assert len(llm.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    with pytest.raises(ValueError, match="is quantised already"):
        LLM(folder, quantization="rtn", num_blocks=20)


def test_what_the_layout_does_not_have_is_refused(small, tmp_path):
    with pytest.raises(ValueError, match="not quantised to 4 bits, the only ones"):
        save_awq(quantise_model(small, QuantConfig("rtn", 3, 16)), tmp_path)
    with pytest.raises(ValueError, match="not quantised to 4 bits"):
        save_awq(small, tmp_path)
    save_awq(quantise_model(small, QuantConfig("rtn", 4, 16)), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["version"] = "marlin"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="AWQ layout 'marlin'; minillm reads 'gemm'"):
        load_awq(tmp_path)


RIGHT = [
    {"family": "mistral"}, {"family": "mistral", "sliding_window": 9}, {"family": "qwen2", "qkv_bias": True},
    {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}, {"family": "qwen3", "qk_norm": True, "norm_eps": 1e-5},
    {"rope": RopeConfig(5e5, "llama3", 8.0, 32)}, {"rope": RopeConfig(1e4, "linear", 2.0)}, {"rope": RopeConfig(1e4, "yarn", 4.0, 16)},
    {"eos_token_ids": (3, 9), "bos_token_id": 0}, {"tie_embeddings": True}, {"vocab_size": 61},
]  # fmt: skip


@pytest.mark.parametrize("changes", RIGHT, ids=repr)
def test_a_folder_says_what_the_model_was(tmp_path, changes):
    """A window above all: a Mistral without one would get that of its family, 4,096."""
    model = quantise_model(Transformer.random(small_config(**changes), seed=4), QuantConfig("rtn", 4, 16))
    back, was = load_awq(save_awq(model, tmp_path / "small")).config, model.config
    assert replace(back, rope=was.rope) == was
    assert replace(back.rope, original_max_position=None) == replace(was.rope, original_max_position=None)
    assert was.rope.original_max_position in (None, back.rope.original_max_position)


@pytest.mark.parametrize(
    "changes, lost",
    [({"sliding_window": 9}, "sliding_window 9"), ({"family": "qwen3", "qk_norm": True, "sliding_window": 9}, "sliding_window 9"),
     ({"family": "qwen2", "qkv_bias": True, "sliding_window": 9}, "sliding_window 9"), ({"qk_norm": True}, "qk_norm True"),
     ({"qkv_bias": True}, "attention_out_bias False"), ({"family": "qwen2"}, "qkv_bias False"), ({"family": "mistral", "mlp_bias": True}, "mlp_bias True")],
    ids=repr,
)  # fmt: skip
def test_what_a_folder_could_not_say_is_refused_before_anything_is_written(tmp_path, changes, lost):
    model = quantise_model(Transformer.random(small_config(**changes), seed=4), QuantConfig("rtn", 4, 16))
    with pytest.raises(ValueError, match=f"family '.*' cannot say what small has: .*{lost}"):
        save_awq(model, tmp_path / "small")
    assert not (tmp_path / "small").exists()


class TwoGrids:
    def for_layer(self, name):
        return GroupLinear(4, 32 if "mlp" in name else 16, "qkv" in name)


@pytest.mark.parametrize(
    "make, why",
    [(lambda: Transformer.random(small_config(), linear_method=TwoGrids()), "groups of 16 and groups of 16, symmetric and groups of 32, and the"),
     (lambda: Transformer.random(small_config(head_dim=4), linear_method=GroupLinear(4, 8, False)), None),
     (lambda: Transformer.random(small_config(head_dim=2), linear_method=GroupLinear(4, 4, False)), "self_attn.q_proj has 12 output channels"),
     (lambda: Transformer.random(tiny_config(-1), linear_method=GroupLinear(4, 1, False)), "has latent attention"),
     (lambda: Transformer.random(tiny_config(EXPERTS), linear_method=GroupLinear(4, 1, False)), "is a mixture of experts")],
    ids=["two grids", "eight channels", "four channels", "latent", "experts"],
)  # fmt: skip
def test_what_the_layout_cannot_hold_is_refused_before_anything_is_written(tmp_path, make, why):
    if why is None:
        load_awq(save_awq(make(), tmp_path / "small"))
        return
    with pytest.raises(ValueError, match=why):
        save_awq(make(), tmp_path / "small")
    assert not (tmp_path / "small").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = quantise_model(Transformer.random(small_config(), seed=4), QuantConfig("rtn", 4, 16))
    return save_awq(model, tmp_path_factory.mktemp("awq") / "model")


def with_tensors(saved, folder, **changes):
    """A copy of the folder with tensors changed: {kind of layer 0's q_proj, or full name: new tensor of the old one}."""
    tensors = load_tensors(saved / "model.safetensors")
    for name, change in changes.items():
        full = name if "." in name else f"model.layers.0.self_attn.q_proj.{name}"
        new = change(tensors.pop(full, None))
        if new is not None:
            tensors[full] = new.contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((saved / "config.json").read_text())
    return folder


SHAPES = {
    "flat": lambda t: t.flatten(), "a number": lambda t: t.flatten()[0], "no rows": lambda t: t[:0], "half": lambda t: t[::2],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("how", SHAPES)
def test_a_tensor_of_another_shape_is_named(saved, tmp_path, kind, how):
    with pytest.raises(ValueError, match=rf"q_proj.{kind} of .* has shape \(.*the model's configuration asks for \("):
        load_awq(with_tensors(saved, tmp_path, **{kind: SHAPES[how]}))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qzeros", lambda t: t.float(), "q_proj.qzeros of .* is float32; the layout has int32 there"),
        ("qzeros", lambda t: t.to(torch.int8), "q_proj.qzeros of .* is int8"),
        ("qweight", lambda t: t.long(), "q_proj.qweight of .* is int64"),
        ("scales", lambda t: t.to(torch.int32), "q_proj.scales of .* is int32; the layout has floating-point there"),
        ("scales", lambda t: t * float("nan"), "q_proj.scales of .* holds a scale that is not finite"),
        ("scales", lambda t: t / 0, "not finite"),
        ("bias", lambda _: torch.ones(96), "q_proj.bias, for which the model's configuration has no place"),
        ("scales", lambda _: None, "lacks tensor model.layers.0.self_attn.q_proj.scales"),
        ("model.layers.1.input_layernorm.weight", lambda _: None, "lacks tensor model.layers.1.input_layernorm.weight"),
        ("model.embed_tokens.weight", lambda t: t[:-1], r"embed_tokens.weight of .* has shape \(63, 64\)"),
        ("model.embed_tokens.weight", lambda t: t.to(torch.int32), "embed_tokens.weight of .* is int32"),
    ],
)
def test_a_tensor_that_the_layout_does_not_have_is_refused(saved, tmp_path, kind, change, message):
    with pytest.raises(ValueError, match=message):
        load_awq(with_tensors(saved, tmp_path, **{kind: change}))


@pytest.mark.parametrize("group", [None, "x", 0, [1], 8, 32, -1, 10**30, 16.5])
def test_a_group_size_that_is_not_that_of_the_weights_is_refused(saved, tmp_path, group):
    """Nothing of the answer would show it: layers are multiplied in the groups that their scales have."""
    folder = with_tensors(saved, tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["group_size"] = group
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="must be a whole number|has shape|not a multiple of group"):
        load_awq(folder)


@pytest.mark.parametrize(
    "wrong, why",
    [({"kernel": "cuda"}, "^kernel must be one of 'auto', 'torch', 'triton', got 'cuda'"), ({"dtype": "float32"}, "^dtype must be a .*got 'float32'"),
     ({"dtype": torch.int8}, "^dtype must be a floating-point torch.dtype, got torch.int8"), ({"dtype": None}, "got None"),
     ({"folder": "nowhere"}, "nowhere is no folder with a config.json")],
)  # fmt: skip
def test_what_a_caller_gets_wrong_is_not_blamed_on_the_folder(saved, tmp_path, monkeypatch, wrong, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=why):
        load_awq(**{"folder": saved, **wrong})


def test_a_damaged_file_and_a_tensor_in_two_files_are_named(saved, tmp_path):
    folder = with_tensors(saved, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-40])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        load_awq(folder)
    (folder / "model.safetensors").unlink()
    for part in ("a", "b"):
        (folder / f"{part}.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match="is in b.safetensors and in another file"):
        load_awq(folder)


def test_a_file_beside_the_configuration_names_further_ends_of_a_text(saved, tmp_path):
    folder = with_tensors(saved, tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert {7, 9} <= set(load_awq(folder).config.eos_token_ids)


def test_a_folder_below_the_home_folder_is_found(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(with_tensors(saved, tmp_path).parent))
    assert LLM(f"~/{tmp_path.name}", num_blocks=20).model.storage.startswith("AWQ")
