"""The arithmetic of the quantisation studies, on models small enough to be run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minillm import ModelConfig, Transformer
from minillm.bench.studies import int4, kv_quant, quant_tasks
from minillm.quant.config import QuantConfig
from minillm.quant.quantise import quantise_model

from .letters import Letters


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        max_position=4096,
    )  # fmt: skip
    return Transformer.random(config, dtype=torch.bfloat16)


def test_the_crossover_is_the_first_number_of_rows_that_does_not_gain():
    times = {f"16_{n}": 10.0 for n in int4.ROWS} | {f"4_{n}": t for n, t in zip(int4.ROWS, (4, 6, 9, 10, 11, 10.2), strict=True)}
    assert int4.crossover(times, "4") == 8 and int4.beyond(times, "4") == pytest.approx(1.1)
    assert int4.crossover(times | {"4_8": 9.0, "4_16": 9.0, "4_32": 9.9}, "4") == 64


def test_a_round_measures_every_bar(model, monkeypatch):
    monkeypatch.setattr(int4, "CONTEXT", 16)
    quantised = {bits: quantise_model(model, config) for bits, config in int4.CONFIGS.items()}
    packed = quantise_model(model, QuantConfig("rtn", 4, 64, dense_from=None))
    state = int4.state_of({"16": model, **quantised, "packed": packed})
    for turn in range(2):
        found = int4.measure(state, turn)
        values = {bar.name: bar.value(found) for bar in int4.BARS}
        assert all(v > 0 for v in values.values())
        assert values["bytes held, int4 with its copy / 16-bit"] > 1 > values["bytes held, int4 without / 16-bit"]


def test_a_round_of_the_kv_study_measures_every_bar(model, monkeypatch):
    monkeypatch.setattr(kv_quant, "CONTEXTS", (16, 32))
    state = kv_quant.state_of(model, Letters(), (16, 32))
    results = kv_quant.measure(state, 1)
    assert results["int8_bytes"] == results["fp8_bytes"] == results["auto_bytes"] * (16 + 2) / 32
    assert all(results[f"{k}_step_{n}"] > 0 for k in kv_quant.KINDS for n in (16, 32))
    assert results["auto_kl"] == 0 and results["auto_same"] == 1 and results["int8_kl"] < 0.1
    for bar in kv_quant.BARS:
        if not bar.name.startswith("step"):
            bar.value(results)


def test_methods_are_compared_task_by_task_on_one_grid(model):
    rows = [[(7 * i + r) % 64 for i in range(40)] for r in range(3)]
    grid, letters = QuantConfig("rtn", 2, 16, calibration=rows), SimpleNamespace(encode=lambda text: [ord(c) % 64 for c in text])
    state = quant_tasks.state_of(model.converted(torch.float32, "cpu"), letters, grid, most=24)
    assert [m.storage.split(",")[0] for m in state.models.values()] == ["RTN", "AWQ", "GPTQ"]
    first, second = (quant_tasks.measure(state, turn) for turn in (0, 1))
    assert first == second and set(quant_tasks.TASKS) == set(state.evaluation.rows)
    values = {bar.name: bar.value(first) for bar in quant_tasks.BARS}
    assert values["KL on code, AWQ / RTN"] == first["awq_code"] / first["rtn_code"] and all(v > 0 for v in values.values())
