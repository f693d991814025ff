"""Lesson 1.1's panel and pictures without a front end, on a tiny random model."""

from __future__ import annotations

import pytest
import torch

from minillm.course.labs import kv_cache as lab
from minillm.course.panel import Cancelled
from minillm.course.plots import png
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware
from minillm.perf.roofline import step_work

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=512
)
TOY = Hardware("toy machine", 2e10, {"float32": 1e11}, 1e9, "a test")
SECONDS = 60


@pytest.fixture(scope="module")
def bench() -> lab.DecodeBench:
    return lab.DecodeBench(Transformer.random(CONFIG), most=64, batch=2)


def test_a_step_is_one_token_a_row_with_a_cache_and_the_whole_text_without(bench):
    cached, whole = bench.build(40, 2, True), bench.build(40, 2, False)
    assert (cached.q_lens, cached.kv_lens) == ((1, 1), (40, 40))
    assert (whole.q_lens, whole.kv_lens) == ((40, 40), (40, 40))
    assert cached.token_ids.tolist() == whole.token_ids[[39, 79]].tolist(), "the same token"
    assert not set(cached.tables[0]) & set(cached.tables[1]) and 0 not in cached.tables[0]
    for made in (cached, whole):
        assert int(made.slots.max()) < bench.store.num_slots


@pytest.mark.parametrize("position, batch", [(0, 1), (65, 1), (8, 0), (8, 3), (True, 1)])
def test_positions_and_batches_outside_the_bench_are_refused(bench, position, batch):
    with pytest.raises(ValueError, match="position must|batch must"):
        bench.build(position, batch, True)


def test_counted_arithmetic_is_that_of_the_formula(bench):
    for position in (1, 17, 64):
        assert bench.work(position, 1, True).total_flops == step_work(CONFIG, [(position - 1, 1)], logits=1).total_flops
        assert bench.work(position, 2, False).total_flops == step_work(CONFIG, [(0, position)] * 2, logits=2).total_flops


def test_a_cached_step_reads_as_much_kv_as_recomputation(bench):
    assert bench.work(50, 1, True).kv_read_bytes == bench.work(50, 1, False).kv_read_bytes > 0


def test_a_measurement_can_be_stopped_inside_a_step(bench):
    layers = []

    def tick() -> None:
        layers.append(1)
        if len(layers) > 1:
            raise Cancelled

    with pytest.raises(Cancelled):
        bench.measure(64, 2, False, tick)
    assert len(layers) == 2


def test_the_panel_follows_its_sliders(bench):
    panel = lab.decode_panel(bench, TOY, position=16)
    try:
        panel.wait(SECONDS)
        first, said = panel.picture.value, panel.verdict.value
        assert bytes(first).startswith(b"\x89PNG") and "position 16, batch 1" in said and "measured" in said
        panel["position"].value = 64
        panel.wait(SECONDS)
        second = panel.picture.value
        assert second != first and "position 64, batch 1" in panel.verdict.value
        panel["batch"].value = 2
        panel.wait(SECONDS)
        assert panel.picture.value != second and "position 64, batch 2" in panel.verdict.value
        assert "compute</b>-bound" in panel.verdict.value or "bandwidth</b>-bound" in panel.verdict.value
        assert max(panel["position"].options) == 64 and list(panel["batch"].options) == [1, 2], "bounds are the bench's"
    finally:
        panel.close()


def test_the_prediction_stands_before_the_measurement(bench):
    floors = {way: lab.predict(bench.work(32, 1, way == "cache"), TOY) for way in lab.WAYS}
    assert "measuring" in lab.explain(32, 1, floors, None)
    found = bench.compare(32)
    said = lab.explain(32, 1, floors, found)
    assert "measuring" not in said and said.count("measured") == 3 and lab.ratio(found) > 0


def test_the_grid_counts_a_triangle_against_a_line():
    titles = [ax.get_title(loc="left") for ax in lab.work_grid(6, 8).axes]
    assert titles == ["without a cache: 76 token-forwards", "with a cache: 13 token-forwards"]
    assert sum(range(6, 14)) == 76 and 6 + 7 == 13
    with pytest.raises(ValueError, match="new must be"):
        lab.work_grid(6, 0)


def test_attention_is_half_of_the_arithmetic_at_the_crossing():
    at, products = lab.crossing(CONFIG), 2 * CONFIG.matmul_params
    assert lab.attention_flops(CONFIG, at) >= products > lab.attention_flops(CONFIG, at - 1)


def test_figures_are_drawn(bench):
    found = bench.compare(32)
    for made in (
        lab.growth_figure(CONFIG, 512), lab.work_grid(3, 1), lab.time_figure(bench, TOY, 1, {}, (16, 64)),
        lab.time_figure(bench, TOY, 1, {32: found}, (16, 64), here=32), lab.roofline_figure(bench, TOY, found, 32),
    ):  # fmt: skip
        assert png(made).startswith(b"\x89PNG")


def test_logits_are_the_same_with_and_without_a_cache():
    model = Transformer.random(CONFIG)
    ids = [5, 9, 2, 7, 1]
    whole, stepped = (lab.last_logits(model, ids, cached) for cached in (False, True))
    assert whole.shape == (CONFIG.vocab_size,)
    torch.testing.assert_close(whole, stepped, rtol=1e-4, atol=1e-4)
