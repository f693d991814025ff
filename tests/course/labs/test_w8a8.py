"""Lesson 2.1's lab without a front end: figures and tables on tiny models, and the panel by its update."""

from __future__ import annotations

import pytest
import torch

from minillm import Transformer
from minillm.course.labs import w8a8 as lab
from minillm.course.labs.int4_weights import inputs_seen
from minillm.perf.hardware import card
from minillm.quant.calibrate import Seen

from .test_int4_weights import CONFIG, Letters


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.random(CONFIG, seed=1, dtype=torch.float32)


@pytest.fixture(scope="module")
def made(model):
    return lab.benches(lab.in_formats(model), most=256)


def test_both_kinds_of_8_bits_are_made(made):
    assert list(made) == [lab.PLAIN, lab.BOTH, lab.WEIGHTS]
    layers = 3 * CONFIG.layer_matmul_params
    work = {name: bench.work(4, 1, False) for name, bench in made.items()}
    assert work[lab.BOTH].flops["int8"] == 2 * 4 * layers and "int8" not in work[lab.WEIGHTS].flops
    assert work[lab.BOTH].weight_bytes < 0.4 * work[lab.PLAIN].weight_bytes


def test_the_roofline_halves_both_and_then_only_one():
    h100 = card("h100")
    at = {n: {kind: lab.ideal_seconds(h100, 10**8, n, kind) for kind in lab.IDEAL} for n in (1, 10_000)}
    assert at[1][lab.BOTH] == at[1][lab.WEIGHTS] == at[1][lab.PLAIN] / 2
    assert at[10_000][lab.BOTH] == pytest.approx(at[10_000][lab.PLAIN] / 2, rel=1e-3)
    assert at[10_000][lab.WEIGHTS] == at[10_000][lab.PLAIN]
    lab.ideal_figure(h100, 10**8)


def test_one_scale_for_all_costs_more_where_tokens_differ():
    x, weight = torch.randn(32, 64), torch.randn(16, 64)
    x[3] *= 100
    assert lab.one_scale_for_all(x, weight) > lab.product_loss(weight, x)
    small = x[[n for n in range(32) if n != 3]]
    assert lab.levels_used(small).median() < 0.05
    x[:, 5] *= 100
    assert lab.levels_used(x).median() > 0.1


def test_a_search_has_the_strengths_on_its_curve(model):
    x = torch.randn(40, 64)
    x[:, 2] *= 50
    losses = lab.strength_losses(torch.randn(16, 64), Seen.of(x))
    assert list(losses)[0] == 0.0 and list(losses)[-1] == 1.0 and min(losses.values()) < 0.5
    seen = inputs_seen(model, Letters())
    linears = lab.linears_of(model, 1)
    assert set(linears) < set(seen)
    lab.strength_figure(linears, seen)
    name = next(iter(linears))
    lab.peaks_figure(linears[name].weight, seen[name], 0.5)


def test_the_sweep_leaves_out_what_would_take_seconds(made):
    found = lab.sweep(made, (1, 64))
    assert set(found[lab.PLAIN]) == set(found[lab.BOTH]) == {1, 64} and set(found[lab.WEIGHTS]) == {1}
    said = lab.crossing(found, lab.BOTH, lab.PLAIN)
    assert said.startswith("W8A8 against 16 bits by tokens: 1: ") and "faster" in said
    same = {"a": found[lab.PLAIN], lab.PLAIN: found[lab.PLAIN]}
    assert lab.crossing(same, "a", lab.PLAIN).endswith("faster nowhere among these")
    lab.time_figure(found, here=64)
    lab.time_figure({name: {} for name in made})


def test_the_panel_measures_where_the_slider_stops(made):
    panel = lab.tokens_panel(made)
    try:
        panel.wait(60)
        assert "1 token in the step" in panel.verdict.value and "8-bit weights" in panel.verdict.value
        panel["tokens"].value = 64
        panel.wait(60)
        assert "64 tokens in the step" in panel.verdict.value
        assert f"measured up to {lab.PACKED_MOST} tokens" in panel.verdict.value
    finally:
        panel.close()
