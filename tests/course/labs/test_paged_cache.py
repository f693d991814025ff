"""Lesson 4.1's counts, recording and panel without a front end, on a tiny random model."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.course.labs import paged_cache as lab
from minillm.course.plots import png
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=512
)
SECONDS = 60
MIX = [(30, 40), (100, 20), (7, 90), (60, 60)] * 3


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.random(CONFIG)


@pytest.mark.parametrize("block", [1, 4, 16, 64])
def test_strips_and_pages_hold_the_same_keys_and_give_the_same(model, block):
    bench = lab.AttentionBench(model, most=64, rows=2)
    for context in (1, 33, 64):
        a, b = bench.output(context, block, "strip"), bench.output(context, block, "pages")
        torch.testing.assert_close(a, b)
        made = bench.batch(context, block, scattered=True)
        assert len({x for t in made.tables for x in t}) == sum(map(len, made.tables))
        assert int(made.slots.max()) < bench.store.num_slots


@pytest.mark.parametrize("context, block", [(0, 1), (65, 1), (4, 0), (4, 65)])
def test_places_outside_the_bench_are_refused(model, context, block):
    with pytest.raises(ValueError, match="must be"):
        lab.AttentionBench(model, most=64, rows=2).batch(context, block, False)


def test_every_way_serves_the_same_requests_and_the_pictures_are_drawn():
    held = lab.serve(MIX, 2048, 256)
    assert len({sum(s.live for s in steps) for name, steps in held.items() if name.startswith("pages")}) == 1
    assert lab.waste(held["pages of 1"]) == 0 < lab.waste(held["exact strips"]) < lab.waste(held["reserved strips"])
    for figure in (lab.memory_figure(held, 2048), lab.waste_figure(held), lab.rows_figure({"reserved strips": 2, "pages": 4})):
        assert png(figure)[:4] == b"\x89PNG"


def test_a_recording_shows_the_copy_in_the_step_that_makes_it(model):
    llm = LLM(model, block_size=4, num_blocks=12)
    first = llm.engine.add_request([5] * 6, SamplingParams(max_tokens=4, ignore_eos=True), "a")
    llm.engine.add_request([5] * 6, SamplingParams(max_tokens=4, ignore_eos=True), "b", sibling=first)
    moments = lab.record(llm.engine)
    assert [m.copies for m in moments[:3]] == [(), ((2, 3),), ()]
    assert moments[1].cache.tables == {"a": (1, 2), "b": (1, 3)} and not llm.engine.scheduler.observers
    figure, said = lab.moment_figure(moments[1], 1)
    assert png(figure)[:4] == b"\x89PNG" and said == "step 2: 2 running; block 2 copied to 3"


def test_the_panel_measures_and_says_the_factor(model):
    bench = lab.AttentionBench(model, most=64, rows=2)
    panel = lab.attention_panel(bench, {64: bench.measure(64, 16, repeats=2)})
    try:
        panel.wait(SECONDS)
        assert "context 64, blocks of 16" in panel.verdict.value and "times</b> as long" in panel.verdict.value
    finally:
        panel.close()
