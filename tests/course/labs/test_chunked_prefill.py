"""Lesson 5.2's panel, pictures and simulations without a front end, on a tiny random model."""

from __future__ import annotations

import pytest

from minillm import LLM
from minillm.course.labs import chunked_prefill as lab
from minillm.course.panel import Cancelled
from minillm.course.plots import png
from minillm.model.config import ModelConfig
from minillm.model.presets import preset
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware, card
from minillm.perf.roofline import step_work

CONFIG = ModelConfig(
    vocab_size=96, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=512
)
TOY = Hardware("toy machine", 2e10, {"float32": 1e11}, 1e9, "a test")
SECONDS = 60


@pytest.fixture(scope="module")
def bench() -> lab.Bench:
    return lab.Bench(LLM(Transformer.random(CONFIG), num_blocks=8), running=3, context=6, late=64)


def test_a_prompt_is_cut_without_gap_or_overlap():
    assert lab.chunks_of(33, 8) == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 1)] and lab.chunks_of(33, 64) == [(0, 33)]
    for prompt in (1, 7, 33):
        for chunk in (1, 4, 33, 64):
            cut = lab.chunks_of(prompt, chunk)
            assert [p for past, new in cut for p in range(past, past + new)] == list(range(prompt))
    with pytest.raises(ValueError, match="chunk"):
        lab.chunks_of(5, 0)


@pytest.mark.parametrize("prompt, chunk", [(64, 16), (33, 8), (5, 9)])
def test_formula_of_kv_reads_is_what_the_engine_counts(prompt, chunk):
    llm = LLM(Transformer.random(CONFIG), num_blocks=8, max_num_batched_tokens=chunk)
    llm.generate([[1] * prompt], lab_params())
    counted = llm.meter.snapshot()
    assert counted.kv_read_bytes == lab.kv_reads(prompt, chunk) * CONFIG.kv_bytes_per_token(4)
    assert counted.total_flops == sum(w.total_flops for w in lab.prompt_steps(CONFIG, prompt, chunk, dtype="float32", size=4))


def lab_params():
    from minillm import SamplingParams

    return SamplingParams(max_tokens=1)


def test_chunks_change_when_tokens_come_and_not_which(bench):
    first, chunked = bench.measure(None), bench.measure(16)
    assert first.needles.steps == 1 and chunked.needles.steps == 4
    for a, b in zip(first.tokens, chunked.tokens, strict=True):
        assert a[: len(b)] == b[: len(a)]
    assert chunked.tokens[-1] == first.tokens[-1] and len(chunked.tokens[-1]) == 1
    assert "meanwhile" in lab.describe("chunks of 16", chunked)


def test_smaller_chunks_are_predicted_to_shorten_the_pause_and_to_lengthen_the_way_to_the_first_token(bench):
    pauses, firsts = zip(*(lab.trade_off(bench, TOY, c) for c in (8, 16, 32, 64)))
    assert sorted(pauses) == list(pauses) and sorted(firsts, reverse=True) == list(firsts)


def test_the_panel_follows_its_slider_and_can_be_stopped(bench):
    base = bench.measure(None)
    panel = lab.chunk_panel(bench, TOY, base, chunk=32)
    try:
        panel.wait(SECONDS)
        first = panel.picture.value
        assert bytes(first).startswith(b"\x89PNG") and "chunks of 32" in panel.verdict.value
        assert "measured" in panel.verdict.value and "Against prefill first" in panel.verdict.value
        panel["chunk"].value = 16
        panel.wait(SECONDS)
        assert panel.picture.value != first and "chunks of 16" in panel.verdict.value and "in 4 steps" in panel.verdict.value
        assert list(panel["chunk"].options) == [16, 32, 64], "no chunk above the prompt"
    finally:
        panel.close()

    class Stopped:
        def check(self) -> None:
            raise Cancelled

    with pytest.raises(Cancelled):
        bench.measure(16, Stopped())


def test_the_prediction_stands_before_the_measurement(bench):
    base = bench.measure(None)
    said = lab.explain(16, lab.trade_off(bench, TOY, 16), None, base)
    assert "predicted" in said and "measuring" in said and "measured" not in said


def test_figures_are_drawn(bench):
    base = bench.measure(None)
    for made in (
        lab.timeline(preset("qwen3-32b"), card("h100"), 4096, 512), lab.trade_off_figure(bench, TOY, {}),
        lab.trade_off_figure(bench, TOY, {16: bench.measure(16)}, base, here=16),
    ):  # fmt: skip
        assert png(made).startswith(b"\x89PNG")


def test_two_pools_send_every_prompt_token_once_and_smooth_the_decoding():
    trace, big, h100 = lab.traffic(12, rate=8.0), preset("qwen3-32b"), card("h100")
    mixed = lab.together(trace, big, h100, prefill="first", max_num_batched_tokens=8192)
    chunked = lab.together(trace, big, h100, max_num_batched_tokens=512)
    split, run = lab.apart(trace, big, h100, link=50e9, max_num_batched_tokens=8192)
    assert run.transfer_bytes == sum(len(a.prompt) for a in trace.arrivals) * big.kv_bytes_per_token()
    assert mixed["gap p99"] > chunked["gap p99"] > split["gap p99"] and split["TTFT p99"] > mixed["TTFT p50"]
    slow, _ = lab.apart(trace, big, h100, link=0.5e9, max_num_batched_tokens=8192)
    assert slow["longest"] > split["longest"], "a slow link is felt between the first token and the second"


def test_a_step_without_the_prompt_is_what_the_others_cost():
    (step,) = lab.prompt_steps(CONFIG, 8, 8, decodes=2, context=10)
    assert step.total_flops == step_work(CONFIG, [(10, 1), (10, 1), (0, 8)], logits=3).total_flops
