"""The AutoAWQ layout, read back by a reader that knows only the description of the format, not our code."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from minillm import LLM, SamplingParams, Transformer
from minillm.quant.awq_checkpoint import load_awq, save_awq
from minillm.quant.config import QuantConfig
from minillm.quant.quantise import quantise_model
from minillm.quant.words import pack_words, unpack_words

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
