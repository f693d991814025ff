"""Lesson 3.2's lab without a front end: figures and tables on tiny models, and the panel by its update."""

from __future__ import annotations

import pytest
import torch

from minillm import ModelConfig, Transformer
from minillm.bench.quality import Evaluation
from minillm.course.labs import int4_weights as lab
from minillm.perf.hardware import CARDS, card
from minillm.perf.roofline import decode_work
from minillm.quant.config import QuantConfig
from minillm.quant.quantise import quantise_model

from ...strategies import FakeTokenizer

CONFIG = ModelConfig(
    vocab_size=32, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, max_position=256,
)  # fmt: skip
GRID = QuantConfig("rtn", 3, 16)


class Letters(FakeTokenizer):
    """Any text as a few known letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 30 + 2 for c in text[:80]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.random(CONFIG, seed=1, dtype=torch.float32)


@pytest.fixture(scope="module")
def made(model):
    quantised = quantise_model(model, QuantConfig("rtn", 4, 16))
    return lab.benches({"16 bits": model, "4 bits": quantised})


@pytest.fixture(scope="module")
def compared(model) -> lab.Compared:
    return lab.compare_methods(model, Letters(), GRID, rows=3)


def test_the_bytes_of_a_step_are_those_of_the_roofline():
    for batch, context in ((1, 128), (4, 200)):
        parts = lab.step_bytes(CONFIG, batch, context, 16, 16)
        work = decode_work(CONFIG, batch, context)
        assert parts["KV"] == work.kv_read_bytes
        others = 2 * (CONFIG.num_layers * 2 + 1) * CONFIG.hidden_size + 2 * batch * CONFIG.hidden_size  # norms, rows looked up
        assert parts["layers"] + parts["head"] == work.weight_bytes - others
    assert lab.step_bytes(CONFIG, 1, 128, 4, 16)["layers"] * 4 == lab.step_bytes(CONFIG, 1, 128, 16, 16)["layers"]


def test_figures_are_drawn(model, compared):
    lab.grid_figure(torch.linspace(-1, 2, 16))
    lab.grid_figure(torch.zeros(8))
    lab.bytes_figure(CONFIG, [(1, 128), (8, 256)])
    lab.loss_figure(compared)
    seen = lab.inputs_seen(lab.beginning(model), Letters())
    assert list(seen)[0] == "model.layers.0.self_attn.qkv_proj" and len(seen) == 8
    lab.outlier_figure({n: s for n, s in seen.items() if ".1." in n})


def test_methods_are_compared_on_the_same_layers(compared):
    assert len(compared.losses) == 8
    assert all(set(by) == {"awq", "gptq"} and max(by.values()) <= 1 for by in compared.losses.values())


def test_only_the_fitted_layers_change(model, compared):
    for method in ("rtn", "awq", "gptq"):
        mixed = lab.with_fitted(model, compared, method)
        ours, theirs = mixed.dense_weights(), model.dense_weights()
        assert torch.equal(ours["model.layers.2.mlp.down_proj.weight"], theirs["model.layers.2.mlp.down_proj.weight"])
        assert not torch.equal(ours["model.layers.1.mlp.down_proj.weight"], theirs["model.layers.1.mlp.down_proj.weight"])
    evaluation = Evaluation(model, Letters(), {"letters": "abcdef" * 8}, {})
    table = lab.task_table(evaluation, {"same": model, "mixed": mixed})
    assert "letters" in table and table.splitlines()[1].split()[1:] == ["0.0", "100%"]


@pytest.mark.parametrize("config", [GRID, QuantConfig("rtn", 4, 32, True, head_bits=None), QuantConfig("rtn", 8, -1, True)])
def test_rounded_weights_are_those_of_the_codes(model, config):
    ours, theirs, plain = (m.dense_weights() for m in (lab.rounded(model, config), quantise_model(model, config), model))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["model.layers.0.mlp.down_proj.weight"], plain["model.layers.0.mlp.down_proj.weight"])


def test_the_panel_measures_where_the_sliders_stop(made):
    panel = lab.rows_panel(made, card(next(iter(CARDS))))
    try:
        panel.wait(60)
        assert "1 row, 4 bits" in panel.verdict.value and "times as fast as 16 bits" in panel.verdict.value
        panel["rows"].value = 8
        panel.wait(60)
        assert "8 rows, 4 bits" in panel.verdict.value and "measuring" not in panel.verdict.value
        panel["bits"].value = "16 bits"
        panel.wait(60)
        assert "8 rows, 16 bits" in panel.verdict.value
    finally:
        panel.close()


def test_a_crossover_is_named_where_there_is_one(made):
    found = lab.sweep(made, rows=(1, 2), repeats=1)
    assert set(found) == {"16 bits", "4 bits"} and set(found["4 bits"]) == {1, 2}
    assert lab.crossover(found, "4 bits").startswith("4 bits against 16 bits by rows: 1: ")
    assert "no gain from 1 rows on" in lab.crossover({"a": found["4 bits"], "16 bits": found["4 bits"]}, "a")
    lab.time_figure(found, here=2)
