"""Lesson 2.2's tools: counts, crossovers, what is chosen and what is found, without a front end."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from minillm.attention.indexer import BoundsIndexer, MeanIndexer
from minillm.attention.window import SparseView
from minillm.course.labs import sparse_attention as lab

from ...strategies import tiny_model

SMALL = dataclasses.replace(lab.TINY, max_position=512)


@pytest.fixture(scope="module")
def bench():
    return lab.Bench(SMALL, block=16, window=16)


def test_a_step_reads_its_keys_and_one_summary_per_candidate(bench):
    view, row = SparseView(3, 16, 16), 2 * SMALL.kv_size * 4
    for context in (100, 250, 505):
        want = int(view.count(context - 1)) + int(view.first_local(context - 1))
        assert bench.work(3, context).kv_read_bytes == SMALL.num_layers * row * want
        flops = lab.index_flops(SMALL, context, 16, 16, 2 * SMALL.head_dim)
        assert bench.work(3, context).index_flops == SMALL.num_layers * flops == 2 * bench.work(3, context, share=2).index_flops
    assert bench.work(None, 250).index_flops == 0


@pytest.mark.parametrize("queries", [1, 40])
def test_every_way_is_measured_and_the_tick_can_stop_it(bench, queries):
    for blocks, share in ((None, 1), (3, 1), (3, 2)):
        assert bench.seconds(blocks, 200, queries, repeats=1, share=share).median > 0
    with pytest.raises(KeyboardInterrupt):
        bench.seconds(3, 200, tick=lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_two_lines_meet_where_they_are_equal():
    dense, sparse = lab.Line.through((100, 1.0), (200, 2.0)), lab.Line.through((100, 2.0), (300, 2.2))
    at = lab.crossover(dense, sparse, 50)
    assert dense.at(at) == pytest.approx(sparse.at(at)) and 200 < at < 250
    assert lab.crossover(dense, sparse, 999) == 999 and lab.crossover(sparse, dense, 1) == math.inf


@pytest.mark.parametrize(
    "dense, sparse, want",
    [
        ([1, 2, 3], [2, 2, 2], 200.0),
        ([1, 3, 9], [2, 2, 2], 150.0),
        ([3, 3, 3], [2, 2, 2], 100.0),
        ([1, 3, 1], [2, 2, 2], math.inf),
    ],
)
def test_the_measured_crossover_is_where_sparse_stays_below(dense, sparse, want):
    assert lab.measured_crossover((100, 200, 300), dense, sparse) == want


def test_what_is_chosen_is_what_the_engine_chooses_and_keeps_more_than_the_window_alone():
    generator = torch.Generator().manual_seed(1)
    q, keys = torch.randn(50, 4, 8, generator=generator), torch.randn(50, 2, 8, generator=generator)
    view = SparseView(2, 5, 4)
    for indexer in (BoundsIndexer(), MeanIndexer()):
        chosen = lab.choose(indexer, q, keys, view)
        assert set(chosen) == set(range(view.first_sparse, 50))
        assert all(len(set(b)) == 2 and max(b) < view.first_local(i) for i, b in chosen.items())
        assert lab.attention_kept(q, keys, view, chosen) > lab.attention_kept(q, keys, view, {i: [] for i in chosen})
    everything = {i: range(20) for i in chosen}
    assert lab.attention_kept(q, keys, view, everything) == pytest.approx(1)
    assert lab.mask_picture(view, 50, chosen).axes


def test_a_look_inside_shows_the_keys_of_the_layer_asked_for():
    q, keys = lab.look_inside(tiny_model(), [3, 4, 5, 6, 7], 1)
    assert q.shape == (5, 6, 4) and keys.shape == (5, 2, 4)
    other, _ = lab.look_inside(tiny_model(), [3, 4, 5, 6, 7], 0)
    assert not torch.equal(q, other)


def test_the_panel_measures_each_point_once_and_says_what_it_counted(bench, monkeypatch):
    monkeypatch.setattr(lab, "CONTEXTS", (128, 256))
    panel = lab.sparse_panel(bench, context=256, blocks=2)
    try:
        panel.wait()
        assert "times as fast" in panel.verdict.value and "context 256, 2 blocks" in panel.verdict.value
        before = panel.picture.value
        panel["context"].value = 128
        panel.wait()
        assert "context 128" in panel.verdict.value and panel.picture.value != before
    finally:
        panel.close()


def test_the_panel_takes_over_what_was_measured_before_and_measures_no_such_point_again(bench, monkeypatch):
    monkeypatch.setattr(lab, "CONTEXTS", (128, 256))
    seen = {n: {name: bench.seconds(k, n, repeats=1) for name, k in (("dense", None), ("sparse", 2))} for n in (128, 256)}
    monkeypatch.setattr(bench, "seconds", lambda *_, **__: pytest.fail("measured again"))
    panel = lab.sparse_panel(bench, context=256, blocks=2, seen=seen)
    try:
        panel.wait()
        before = panel.picture.value
        assert "times as fast" in panel.verdict.value
        panel["context"].value = 128
        panel.wait()
        assert "times as fast" in panel.verdict.value and panel.picture.value != before
    finally:
        panel.close()
