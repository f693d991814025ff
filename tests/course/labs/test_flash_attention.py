"""Lesson 3.1's counts, pictures and panel without a front end, and the backend made of one function."""

from __future__ import annotations

import json

import pytest
import torch

from minillm import LLM, SamplingParams, kernels
from minillm.course.labs import flash_attention as lab
from minillm.course.plots import png
from minillm.course.rowwise import RowwiseAttention
from minillm.course.tasks.ex_3_1.common import oracle
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware

TOY = Hardware("toy machine", 2e10, {"float32": 1e11}, 1e9, "a test")
SECONDS = 60


def test_bytes_of_the_matrix_counted_one_trip_at_a_time():
    n, d = 10, 4
    trips = 4 * n * n  # scores written and read, weights written and read
    assert lab.matrix_work(n, n, d, heads=1, element=2).total_bytes == 2 * (trips + 4 * n * d)


@pytest.mark.parametrize("new, total, tile", [(10, 10, 4), (10, 10, 16), (1, 9, 4), (3, 8, 2), (8, 8, 8)])
def test_bytes_of_tiles_counted_one_tile_at_a_time(new, total, tile):
    d, numbers = 4, 0
    for first in range(0, new, tile):
        queries = range(first, min(first + tile, new))
        numbers += 2 * len(queries) * d  # read, and their results written
        numbers += 2 * d * max(total - new + q + 1 for q in queries)
    assert lab.tiled_work(new, total, d, tile, heads=1, element=2).total_bytes == 2 * numbers


def test_tiles_count_the_arithmetic_of_visible_pairs_alone():
    assert lab.tiled_work(3, 3, 4, 2, heads=1).total_flops == 4 * 4 * 6
    assert lab.matrix_work(3, 3, 4, heads=1).total_flops == 4 * 4 * 9


def test_the_matrix_loses_most_for_long_prompts_and_nothing_in_decoding():
    factors = [lab.traffic_factor(n, n, 64) for n in (32, 128, 1024, 8192)]
    assert factors == sorted(factors) and factors[-1] > 7
    assert lab.traffic_factor(1, 4096, 64) < 1.05


def test_both_ways_compute_the_same():
    q, k, v = torch.randn(3, 2, 9, 8).unbind()
    expected = oracle(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)
    for way in (lab.with_matrix(2, 9), lab.fused):
        torch.testing.assert_close(way(q, k, v), expected, rtol=1e-5, atol=1e-5)


def test_pictures_can_be_drawn():
    for figure in (lab.tile_grid(8, 2), lab.traffic_figure()):
        assert png(figure).startswith(b"\x89PNG")


def test_split_keys_are_paid_with_a_result_and_a_logsum_of_every_part():
    assert lab.merge_bytes(rows=2, heads=3, head_dim=4, splits=5) == 2 * 3 * 5 * (4 + 1) * 4 * 2
    assert lab.merge_bytes(rows=2, heads=3, head_dim=4, splits=1) == 0


def test_a_measured_factor_is_placed_beside_both_counts():
    said = [lab.explain_factor(measured, by_bytes=3.6, by_flops=2.0) for measured in (1.4, 2.0, 3.0, 5.0)]
    assert "less than either" in said[0] and "within" in said[1] and "within" in said[2] and "more than either" in said[3]


def test_the_panel_measures_and_follows_its_sliders():
    panel = lab.attention_panel(TOY, n=128)
    try:
        panel.wait(SECONDS)
        assert "n = 128, head_dim 64, tiles of 64" in panel.verdict.value and "times as long" in panel.verdict.value
        counted = panel.verdict.value.split("measured")[0]
        panel["tile"].value = 16
        panel.wait(SECONDS)
        assert "tiles of 16" in panel.verdict.value and panel.verdict.value.split("measured")[0] != counted
    finally:
        panel.close()


@pytest.mark.slow
@pytest.mark.skipif(kernels.missing() is not None, reason=str(kernels.missing()))
def test_the_kernel_is_compiled_in_a_process_of_its_own_even_where_kernels_are_interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    entries, source = lab.inspect_kernel()
    assert "compiled here" in source and all(e["registers"] > 0 and not e["spills"] for e in entries)
    assert "registers a thread, 0 spilled" in lab.describe_kernel(entries)


def test_without_triton_the_recorded_kernel_is_shown_and_said_to_be(monkeypatch):
    monkeypatch.setattr(kernels, "missing", lambda: "Triton has no build for darwin")
    entries, source = lab.inspect_kernel()
    assert source.startswith("recorded with triton 3.") and "no build for darwin" in source
    assert entries == json.loads(lab.RECORDED.read_text())["kernels"]


def test_a_function_over_one_row_serves_the_engine():
    config = ModelConfig(
        vocab_size=61, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8,
        max_position=64,
    )  # fmt: skip
    model, prompts = Transformer.random(config, dtype=torch.float64), [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    runs = {}
    for name, backend in (("torch", "torch"), ("rows", RowwiseAttention(oracle))):
        llm = LLM(model, attention_backend=backend, num_blocks=24, block_size=2, max_num_batched_tokens=4)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
        runs[name] = [o.token_ids for o in outputs], llm.meter.snapshot()
    assert runs["rows"] == runs["torch"]
