"""Lesson 4.2's bill, bench and panel without a front end."""

from __future__ import annotations

import pytest
import torch

from minillm.course.labs import gqa_mla as lab
from minillm.course.plots import png
from minillm.model.presets import preset

SMALL = lab.structures(hidden=32, heads=4, dim=8)


@pytest.fixture(scope="module")
def made():
    benches = {name: lab.LayerBench(config, most=256) for name, config in SMALL.items() if config.mla is None}
    return benches | {f"MLA {form}": lab.LayerBench(SMALL["MLA"], 256, form) for form in ("absorbed", "naive")}


def test_the_bill_is_that_of_the_presets_and_sorted():
    entries = lab.real_models()
    sizes = [entry.bytes_per_token() for entry in entries.values()]
    assert sizes == sorted(sizes, reverse=True) and entries["llama-7b"].bytes_per_token() == 512 * 1024
    assert all(e.bytes_per_token() == preset(n).kv_bytes_per_token() for n, e in entries.items() if n != "falcon-7b")
    assert entries["falcon-7b"].bytes_per_token() == 2 * 32 * 64 * 2
    assert "deepseek-v3" in lab.bill() and len(lab.bill().splitlines()) == 1 + len(entries)


def test_a_latent_is_one_and_three_quarters_of_a_hundredth_of_mha():
    same = lab.same_heads()
    assert same["MLA"] / same["MHA"] == 576 / 32768 and round(100 * 576 / 32768, 2) == 1.76


def test_both_forms_give_the_same(made):
    for context in (1, 2, 17, 256):
        torch.testing.assert_close(made["MLA absorbed"].output(context), made["MLA naive"].output(context), rtol=0, atol=1e-5)


def test_the_structures_are_of_one_width_and_read_what_their_shape_says(made):
    assert len({(c.hidden_size, c.num_heads) for c in SMALL.values()}) == 1
    read = {name: bench.work(256).kv_read_bytes for name, bench in made.items()}
    assert read == {name: 256 * 4 * width for name, width in
                    zip(made, (2 * 4 * 8, 2 * 8, 2 * 8, 16 + 4, 16 + 4), strict=True)}  # fmt: skip


@pytest.mark.parametrize("context", [0, 257, 1.5])
def test_places_outside_the_bench_are_refused(made, context):
    with pytest.raises(ValueError, match="context must be"):
        made["MHA"].batch(context)


def test_ranks_divide_kv_heads_but_not_latents():
    assert lab.per_rank(preset("qwen3-32b"), (1, 8, 16)) == {1: 2**18, 8: 2**15, 16: 2**15}
    assert set(lab.per_rank(preset("deepseek-v3"), (1, 8)).values()) == {70_272}


def test_measuring_draws_and_says_who_is_fastest(made):
    seen = {64: lab.measure(made, 64, repeats=2)}
    assert "fastest" in lab.verdict(seen[64]) and png(lab.time_figure(seen))[:4] == b"\x89PNG"
    assert png(lab.same_heads_figure())[:4] == png(lab.intensity_figure({"H100": 295.0}))[:4]
    panel = lab.context_panel(made, seen)
    panel.settle()
    assert "fastest" in panel.verdict.value and "context 256" in panel.verdict.value
    panel.close()
