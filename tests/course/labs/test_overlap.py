"""Lesson 5.3's parts: stripped steps, formulas, recorded lanes, padding."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, ModelConfig, Transformer
from minillm.course.labs import lanes
from minillm.course.labs import overlap as lab
from minillm.perf.timing import Comparison, Timing

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=64
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.random(CONFIG)


def engine(model: Transformer, **options) -> LLM:
    return LLM(model, num_blocks=64, block_size=4, max_num_seqs=4, **options)


def parts(step: float, forward: float, products: float) -> lab.Parts:
    timings = {"step": step, "forward": forward, "products": products}
    return lab.Parts(2, Comparison({name: Timing((t, t)) for name, t in timings.items()}))


def test_shares_of_a_step_are_what_is_left_out_and_add_up() -> None:
    p = parts(10.0, 7.0, 4.0)
    assert (p.host, p.operators, p.products) == pytest.approx((0.3, 0.3, 0.4))
    assert "2 rows" in str(p) and "host 30%" in str(p)
    odd = parts(10.0, 11.0, 12.0)  # noise may make a part longer than the whole
    assert (odd.host, odd.operators, odd.products) == (0.0, 0.0, 1.0)


def test_a_step_is_taken_apart_and_the_engine_is_idle_afterwards(model: Transformer) -> None:
    llm = engine(model)
    found = lab.take_apart(llm, 3, context=16, rounds=2)
    assert set(found.timing.timings) == {"step", "forward", "products"} and found.rows == 3
    assert not llm.engine.has_work and llm.engine.cache.pool.num_referenced == 0
    assert lab.launches_of(llm, 1) == lab.launches_of(llm, 4) > 10 * CONFIG.num_layers
    assert not llm.engine.has_work
    lab.parts_figure([found])


def test_bare_steps_are_those_of_the_model_and_refuse_too_many_rows() -> None:
    bare = lab.Bare(Transformer.random(CONFIG, dtype=torch.float64), context=9, most=4, block_size=4)
    assert bare.forward(3)().shape == (3, 64) and bare.batch(4).kv_lens == (9,) * 4
    torch.testing.assert_close(bare.forward(3)(), bare.forward(4)()[:3])
    assert bare.products(2)() is None
    with pytest.raises(ValueError, match="rows must be at most 4, got 5"):
        bare.batch(5)


def test_what_can_be_hidden_is_at_most_a_factor_of_two() -> None:
    assert [lab.overlap_factor(h, d) for h, d in ((1, 1), (1, 19), (19, 1), (0, 5))] == [2.0, 20 / 19, 20 / 19, 1.0]
    assert lab.replay_factor(0.0) == 1.0 and lab.replay_factor(0.75) == 4.0
    lab.hiding_figure(0.001)


@pytest.mark.parametrize("overlap", [False, True])
def test_lanes_hold_each_step_once_in_order_and_do_what_the_engine_does(model: Transformer, overlap: bool) -> None:
    llm = engine(model, overlap=overlap)
    moments = lanes.Recorder(llm, device=0.002).record([[3], [4, 5]], tokens=5)
    by = {what: [m for m in moments if m.what == what] for what in ("plan", "run", "hand out")}
    assert all([m.step for m in found] == list(range(5)) for found in by.values()), "five steps: planned, run, handed out"
    for plan, run, hand in zip(*by.values(), strict=True):
        assert plan.stop <= run.start + 1e-3 and run.stop <= hand.stop and run.stop - run.start >= 0.002
    ahead = [by["plan"][i + 1].start < by["hand out"][i].start for i in range(4)]
    assert ahead == [overlap] * 4, "with overlap the next step is planned before the last one is handed out"
    assert 0 <= lanes.idle_share(moments) < 1 and lanes.step_seconds(moments) >= 0.002
    assert llm.engine.runner.run.__self__ is llm.engine.runner, "the engine is as it was"
    lanes.timeline_figure({"one": moments}, 1, 3)


def test_lanes_are_stepped_through(model: Transformer) -> None:
    recorded = {name: lanes.Recorder(engine(model, overlap=o), 0.001).record([[3]], 6) for name, o in (("a", False), ("b", True))}
    stepper = lanes.timeline_stepper(recorded, 1, 4)
    assert len(stepper.frames) == 4 and "step 4 ran" in stepper.verdict.value and "a: 0 s of host work" in stepper.verdict.value
    stepper.close()


def test_padding_is_the_engines_own_rule() -> None:
    assert [lab.padding_share(n, 64) for n in (1, 3, 9, 33, 64)] == [0.0, 0.25, 7 / 16, 31 / 64, 0.0]
    assert lab.padding_share(5, 6) == 1 / 6


def test_the_panel_measures_a_step_as_wanted_and_as_padded(model: Transformer) -> None:
    panel = lab.padding_panel(lab.Bare(model, context=8, most=8, block_size=4), most=8, rows=5)
    panel.wait()
    assert "5 rows are computed as 8: 3 are padding, 38% of the batch" in panel.verdict.value
    assert "times</b> as long" in panel.verdict.value
    panel["rows"].value = 3
    panel.wait()
    assert "3 rows are computed as 4: 1 are padding" in panel.verdict.value
    panel.close()
