"""Lesson 3.3's lab without a front end: its arithmetic, roundings, figures and tables on tiny models, the panel by its update."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, ModelConfig, SamplingParams, Transformer
from minillm.bench.needles import haystack
from minillm.course.labs import kv_quantisation as lab
from minillm.model.presets import preset
from minillm.perf.hardware import CARDS, card
from minillm.perf.roofline import step_work

from ...bench.letters import Letters

CONFIG = ModelConfig(
    vocab_size=256, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.random(CONFIG, seed=1, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def made(model):
    return lab.benches(model, most=128, batch=2)


def test_balance_is_where_the_counted_bytes_of_a_step_are_equal():
    config = preset("qwen3-32b")
    tokens = round(lab.balance(config))
    work = step_work(config, [(tokens - 1, 1)], logits=1)
    assert work.kv_read_bytes == pytest.approx(lab.kv_bytes(config, tokens), rel=1e-3)
    assert work.kv_read_bytes == pytest.approx(2 * config.matmul_params, rel=1e-3)
    assert lab.balance(config, kv_dtype="int8") == pytest.approx(tokens * 128 / 65, rel=1e-3)


def test_gains_in_bytes_do_not_multiply():
    config, tokens = preset("qwen3-32b"), 32 * 8192
    kv, weights, both = (lab.step_gain(config, tokens, *f) for f in ((16, "int8"), (4, "auto"), (4, "int8")))
    assert (kv, weights, both) == pytest.approx((1.34, 1.57, 2.61), abs=0.01)  # 262,144 tokens of 256 KiB, 32 billion weights
    assert both > 1.2 * kv * weights, "each alone is held back by the bytes that it leaves"
    assert lab.step_gain(config, 0, kv_dtype="int8") == 1


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("make, levels", [(lab.symmetric, lambda n: 2**n - 1), (lab.lopsided, lambda n: 2**n)])
@pytest.mark.parametrize("axes", [(-1,), (0,), (0, 1, 2)])
def test_a_rounded_group_has_few_levels_and_is_off_by_half_a_step(bits, make, levels, axes):
    x = torch.randn(40, 2, 8, generator=torch.Generator().manual_seed(0))
    after = make(bits, axes)(x)
    groups = after.movedim([a % 3 for a in axes], list(range(len(axes)))).flatten(0, len(axes) - 1)
    groups = groups.reshape(len(groups), -1)
    assert all(len(column.round(decimals=4).unique()) <= levels(bits) for column in groups.T)
    low, high = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
    reach = high - low if make is lab.lopsided else 2 * torch.maximum(high, -low)
    assert ((after - x).abs() <= reach / (levels(bits) - 1) / 2 * 1.001).all()
    assert torch.equal(make(bits, axes)(torch.zeros(3, 2, 8)), torch.zeros(3, 2, 8))


def test_a_rounded_store_serves_the_engine(model):
    options = {"num_blocks": 16, "dtype": "float32"}
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    lab_store = LLM(model, kv_store=lab.rounded_kv(lab.symmetric(8)), **options).generate([[1, 2, 3]], greedy)
    assert lab_store[0].token_ids == LLM(model, kv_dtype="int8", **options).generate([[1, 2, 3]], greedy)[0].token_ids
    assert "RoundedKV" in type(LLM(model, kv_store=lab.rounded_kv(lab.lopsided(3)), **options).engine.store).__name__


def test_real_kv_is_what_the_engine_holds(model):
    llm, prompt = LLM(model, num_blocks=4, block_size=8), [5, 6, 7, 8, 9]
    llm.engine.add_request(prompt, SamplingParams(max_tokens=4))
    llm.engine.step()
    (table,) = llm.engine.cache_snapshot().tables.values()
    for layer, (k, v) in enumerate(lab.real_kv(model, prompt)):
        held = llm.engine.store.read(layer, torch.arange(table[0] * 8, table[0] * 8 + 5)[None])
        assert torch.equal(held[0][0].float(), k) and torch.equal(held[1][0].float(), v)


def test_figures_and_tables_say_what_was_asked(model, made):
    kv = lab.real_kv(model, list(range(20)))
    assert len(lab.row_figure(kv[0][0][3, 1]).axes) == 2
    assert lab.channel_figure(kv, 1, 0).axes and lab.balance_figure(CONFIG).axes
    said = lab.errors(kv, {"eight": lab.symmetric(8), "two": lab.symmetric(2)}).splitlines()
    eight, two = ([float(x.rstrip("%")) for x in line.split()[1:]] for line in said[1:])
    assert all(a < 1 < 10 < b for a, b in zip(eight, two, strict=True))
    table = lab.needle_table(model, [haystack(Letters(251), 120)], {"16 bits": "auto", "4": lab.rounded_kv(lab.symmetric(4))})
    assert "KL  0.000" in table.splitlines()[1] and "of 8" in table.splitlines()[2]


def test_the_sweep_measures_every_kind_and_counts_its_bytes(made):
    found = lab.sweep(made, (16, 128), batch=2, repeats=1)
    assert set(found) == {"16 bits", "int8", "fp8"} and all(set(steps) == {16, 128} for steps in found.values())
    for name in ("int8", "fp8"):
        wide, narrow = found["16 bits"][128].work, found[name][128].work
        assert narrow.kv_read_bytes * 16 == wide.kv_read_bytes * 10 and narrow == made[name].work(128, 2, True)
        assert "1.60× fewer bytes" in lab.compared(found, name)
    assert lab.time_figure(found, here=128).axes and lab.time_figure({}).axes


def test_the_panel_measures_where_its_controls_stop(made):
    panel = lab.context_panel(made, card(next(iter(CARDS))))
    panel.wait()
    assert "context 64, 2 rows, int8" in panel.verdict.value and "times as fast as 16 bits" in panel.verdict.value
    panel["rows"].value = 1
    panel["kind"].value = "16 bits"
    panel.wait()
    assert "1 row, 16 bits" in panel.verdict.value and panel.picture.value
    panel.close()
