"""Lesson 2.3's counts, figures, balance and panel without a front end, on tiny layers."""

from __future__ import annotations

import pytest
import torch

from minillm.bench.studies import moe as study
from minillm.course.labs import experts as lab
from minillm.course.plots import png
from minillm.model.config import ModelConfig
from minillm.model.moe_config import MoEConfig
from minillm.model.presets import preset

SECONDS = 60
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=64,
    moe=MoEConfig(8, 2, 16, shared_size=4), name="tiny",
)  # fmt: skip


def test_twins_differ_in_their_mlps_only():
    mixture, active, total = lab.dense_twins(CONFIG).values()
    assert mixture is CONFIG and (active.intermediate_size, total.intermediate_size) == (36, 132)
    router = 2 * 8 * 32
    assert CONFIG.num_params - router == total.num_params and CONFIG.active_params - router == active.num_params
    with pytest.raises(ValueError, match="has no experts"):
        lab.dense_twins(active)


def test_a_mixture_reads_between_its_twins_and_ever_closer_to_the_large_one():
    mixture, active, total = lab.dense_twins(preset("qwen3-30b-a3b")).values()
    shares = [lab.step_bytes(mixture, b) / lab.step_bytes(total, b) for b in lab.BATCHES]
    assert shares == sorted(shares) and shares[-1] > 0.99
    routers = 2 * 48 * 128 * 2048
    assert lab.step_bytes(mixture, 1) == pytest.approx(lab.step_bytes(active, 1) + routers)


def test_counted_experts_follow_the_formula():
    moe = MoEConfig(64, 8, 1)
    for tokens in (1, 8, 32):
        assert lab.count_distinct(moe, tokens) == pytest.approx(moe.distinct_experts(tokens), rel=0.05)


def test_a_bias_evens_out_a_router_that_likes_some_experts():
    moe = MoEConfig(16, 2, 1, scoring="sigmoid", selection_bias=True)
    off, _ = lab.balance(moe, 1.0, 40, 0.0)
    on, bias = lab.balance(moe, 1.0, 40, 0.02)
    assert on[0] == off[0] > 2 and on[-1] < off[-1] / 1.5 and bias.abs().max() <= 0.02 * 40 + 1e-6
    assert lab.imbalance([4, 4, 4, 4]) == 1 and lab.imbalance([8, 0, 0, 0]) == 4 and lab.imbalance([0, 0]) == 0


def test_every_way_of_one_layer_gives_the_same_and_the_dense_one_costs_as_much():
    bench = lab.LayerBench(hidden=16, expert_size=8)
    layers = bench.layers(8, 2)
    x = layers.inputs(9)
    ways = layers.ways()
    torch.testing.assert_close(ways["grouped"](x), ways["loop"](x), rtol=1e-4, atol=1e-5)
    chosen = layers.moe.routed_work([9, 9, *[0] * 6])
    assert chosen.total_flops == layers.dense.work(9).total_flops
    assert layers.touched(9) == len(layers.moe.router(x)[0].unique())
    assert set(bench.measure(lab.LOOPED + 1, 8, 2, repeats=1)) == {"grouped", "dense"}
    with pytest.raises(ValueError, match="tokens"):
        bench.measure(0, 8, 2)


def test_the_pictures_are_drawn():
    bench = lab.LayerBench(hidden=16, expert_size=8)
    seen = {n: bench.measure(n, 8, 2, repeats=2) for n in (1, 40)}
    figures = (
        lab.bytes_figure(lab.dense_twins(CONFIG)), lab.distinct_figure({"top 2 of 8": CONFIG.moe}, {"counted": [(1, 0.25)]}),
        lab.balance_figure({"rate 0": [3.0, 2.0]}), lab.rows_figure(list(range(20))), lab.rows_figure([1, 2]),
        lab.layer_figure(seen), lab.layer_figure({40: seen[40]}),
    )  # fmt: skip
    for figure in figures:
        assert png(figure)[:4] == b"\x89PNG"


def test_the_panel_measures_and_says_the_factor():
    bench = lab.LayerBench(hidden=16, expert_size=8)
    panel = lab.layer_panel(bench, {1: bench.measure(1, 64, 8, repeats=1)})
    try:
        panel.wait(SECONDS)
        assert "32 tokens, top 8 of 64" in panel.verdict.value and "times</b> as long" in panel.verdict.value
        panel["top_k"].value = 1
        panel.wait(SECONDS)
        assert "top 1 of 64" in panel.verdict.value
    finally:
        panel.close()


def test_the_study_measures_every_way_and_its_bars_are_read_from_that(monkeypatch):
    monkeypatch.setattr(study, "TOKENS", (1, 8, 32, 128, 512))
    layers = study.Layers.random(MoEConfig(8, 2, 8), 16, torch.float32)
    found = study.measure(study.State(layers, layers), 1, repeats=1)
    assert {"loop_32", "grouped_512", "dense_512", "touched_32", "f32_grouped_512"} < set(found) and "loop_128" not in found
    assert all(bar.value(found) > 0 for bar in study.BARS)
    assert {"products_512", "f32_products_512"} < set(found) and "products_32" not in found
    found |= {"loop_32": 6.0, "grouped_32": 1.0, "grouped_512": 3.0, "dense_512": 1.5, "read": 1.2}
    assert [bar.judge([found])["met"] for bar in study.BARS[:2]] == [True, False]
    judged = {bar.name: bar for bar in study.BARS}
    floor = judged["its floor: reading the experts / dense, at least 1"]
    assert floor.value(found) == 1.0, "the dense layer's arithmetic takes longer than reading all experts"
    assert floor.value(found | {"read": 3.0}) == 2.0
    exact = judged["grouped / dense of equal active size, 512 tokens, float32"]
    assert exact.judge([found | {"f32_grouped_512": 3.0, "f32_dense_512": 1.5}])["met"] is False
