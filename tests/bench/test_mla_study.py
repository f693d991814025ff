"""The arithmetic of the study of latent attention, on a shape small enough to be run."""

from __future__ import annotations

import dataclasses

import pytest

from minillm.bench.studies import mla
from minillm.model.mla_config import MLAConfig


def test_a_round_measures_every_bar_and_both_forms_agree(monkeypatch):
    latent = MLAConfig(kv_rank=24, q_rank=None, nope_dim=16, rope_dim=8, v_dim=16)
    config = dataclasses.replace(mla.shape(), hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=24, mla=latent)
    state = mla.state_of(config, 100)
    for turn in (0, 1):
        found = mla.measure(state, turn)
        values = {bar.name: bar.value(found) for bar in mla.BARS}
        assert all(value > 0 for name, value in values.items() if not name.startswith("largest difference"))
        assert found["difference"] < 1e-5
    up, pairs = 2 * 24 * 2 * 32, 100 * 2 * 2
    assert found["absorbed_flops"] == up + pairs * (32 + 24)
    assert found["naive_flops"] == 100 * up + pairs * (24 + 16)
    assert values["bytes per token, MHA of these heads / latent"] == pytest.approx(2 * (24 + 16) / 32)


def test_the_study_has_the_attention_of_the_published_model():
    config = mla.shape()
    assert (config.num_heads, config.kv_width, config.mla.head_dim, config.mla.v_dim) == (16, 576, 192, 128)
