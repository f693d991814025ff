"""Lesson 0.1's panel and figures, without a front end."""

from __future__ import annotations

from typing import Any, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from minillm.course.labs.roofline import linear_work, make_linear, roofline_panel, sweep, sweep_figure
from minillm.perf.hardware import Hardware
from minillm.quant.linear import Linear, PlainLinear

MACHINE = Hardware("a machine", 20e9, {"float32": 2e11, "bfloat16": 4e11}, 16e9, "made up for a test")


@pytest.fixture
def panel() -> Iterator[Any]:
    made = roofline_panel(MACHINE, sizes=(64, 128), repeats=3)
    yield made
    made.close()


def test_work_of_a_product_agrees_with_torchs_counter_and_the_engines_layer() -> None:
    with FlopCounterMode(display=False) as counter:
        F.linear(torch.ones(5, 7), torch.ones(11, 7))
    work = linear_work(5, 7, 11, "float32")
    assert work.total_flops == counter.get_total_flops()
    layer = Linear(torch.ones(11, 7), None, PlainLinear())
    assert work == layer.work(5)


def test_every_call_takes_the_next_of_several_weights() -> None:
    torch.manual_seed(0)
    call = make_linear(16, 16, "float32", swept=4 * 16 * 16 * 4)(2)
    results = [call() for _ in range(5)]
    assert not torch.equal(results[0], results[1]) and torch.equal(results[0], results[4])


def test_moving_rows_size_and_dtype_changes_picture_and_verdict(panel: Any) -> None:
    panel.wait()
    seen = {(panel.picture.value, panel.verdict.value.split(":")[0])}
    assert "1 row:" in panel.verdict.value and "measured" in panel.verdict.value
    for control, value in (("rows", 64), ("size", 128), ("dtype", "float32")):
        panel[control].value = value
        panel.wait()
        assert panel.picture.value not in {picture for picture, _ in seen}
        seen.add((panel.picture.value, control))
    assert "64 rows:" in panel.verdict.value


def test_the_verdict_names_the_bound_that_the_roofline_predicts(panel: Any) -> None:
    panel["size"].value = 128
    panel.wait()
    assert "<b>bandwidth</b>-bound" in panel.verdict.value
    panel["rows"].value = 512
    panel.wait()
    assert "<b>compute</b>-bound" in panel.verdict.value


def test_a_sweep_covers_its_rows_and_its_figure_marks_the_corner() -> None:
    found = sweep(64, 64, "float32", rows=(1, 8, 64), repeats=2)
    assert list(found) == [1, 8, 64] and all(t.repeats == 2 for t in found.values())
    texts = [t.get_text() for t in sweep_figure(found, 64, 64, "float32", MACHINE).axes[0].texts]
    assert any("compute-bound from" in t for t in texts)
