"""The arithmetic of the W8A8 study, on layers small enough to be run."""

from __future__ import annotations

import pytest
import torch

from minillm import ModelConfig, Transformer
from minillm.bench.studies import w8a8
from minillm.quant.config import QuantConfig
from minillm.quant.quantise import quantise_model


def test_a_round_measures_every_bar(monkeypatch):
    monkeypatch.setattr(w8a8, "SHAPES", {name: (32, 48) for name in w8a8.SHAPES})
    monkeypatch.setattr(w8a8, "PATIENCE_S", 0.0)
    config = ModelConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        max_position=64,
    )  # fmt: skip
    model = Transformer.random(config, dtype=torch.bfloat16)
    made = {"16": model, "w8": quantise_model(model, QuantConfig("rtn", 8, -1, True)), "w8a8": model}
    state = w8a8.state_of(made, prompt=24, context=16)
    for turn in range(2):
        found = w8a8.measure(state, turn)
        values = {bar.name: bar.value(found) for bar in w8a8.BARS}
        assert len(values) == len(w8a8.BARS), "two bars of one name"
        assert all(v > 0 for name, v in values.items() if "share" not in name and "dynamic" not in name)


def test_what_is_compared_is_the_same_product():
    calls = w8a8.products(64, 40, 7)
    exact = calls["16"]().float()
    for name in ("onednn", "int_mm"):
        assert (calls[name]().float() - exact).abs().max() < 0.06 * exact.abs().max()


def test_the_best_gemm_counts_and_one_that_is_missing_is_zero():
    r = {"16_a_1": 4.0, "int_mm_a_1": 2.0, "float_a_1": 8.0}
    assert w8a8.fastest(r, "a", 1) == 2.0 and w8a8.faster("a", "onednn", 1, r) == 0.0
    r |= {"onednn_a_1": 1.0, "product_a_1": 0.75}
    assert w8a8.fastest(r, "a", 1) == 4.0 and w8a8.share_of_rounding("a", 1, r) == 0.25


def test_a_card_turns_from_bytes_to_arithmetic_at_its_ridge():
    assert w8a8.ridge_rows("h100", "bfloat16", 2) == pytest.approx(295.3, abs=0.1)
    assert w8a8.ridge_rows("h100", "int8", 1) == pytest.approx(295.4, abs=0.1)
    assert w8a8.ridge_rows("h100", "bfloat16", 1) == pytest.approx(147.7, abs=0.1), "weight-only 8 bits compute in 16"
