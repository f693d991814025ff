from __future__ import annotations

import time

import pytest

from minillm import LLM
from minillm.course.labs.phases import PhaseTimes, explain, phase_points, phase_work, phases_panel, request_timeline, time_phases
from minillm.course.panel import Cancelled, Job
from minillm.course.plots import png
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware
from minillm.perf.roofline import predict
from minillm.perf.timing import Timing

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=512,
    tie_embeddings=True,
)  # fmt: skip
MACHINE = Hardware("toy", 1e10, {"float32": 1e11, "bfloat16": 4e11}, 1e9, "made up")
TIMES = PhaseTimes(64, 2, Timing((0.020, 0.024)), Timing((0.002, 0.003, 0.002)))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.random(CONFIG)


def test_both_phases_are_timed_step_by_step_and_nothing_stays_in_the_engine(model: Transformer) -> None:
    llm = LLM(model, num_blocks=32, max_model_len=128)
    found = time_phases(llm, 20, 3, answer=4, repeats=2, patience=60)
    assert (found.prefill.repeats, found.decode.repeats) == (2, 8)
    assert not llm.engine.has_work and llm.meter.kv_allocated_bytes == 0
    # the warm-up has prompts of 16 and two further tokens each
    assert llm.meter.tokens_computed == 3 * (16 + 2) + 2 * 3 * (20 + 4)


def test_a_prompt_that_would_take_two_steps_is_refused(model: Transformer) -> None:
    llm = LLM(model, num_blocks=32, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=4)
    with pytest.raises(ValueError, match="2 prompts of 17 tokens .* at most 32 tokens"):
        time_phases(llm, 17, 2)
    with pytest.raises(ValueError, match="and 4 requests"):
        time_phases(llm, 1, 5)
    with pytest.raises(ValueError, match="answer must be a whole number of at least 1, got 0"):
        time_phases(llm, 1, answer=0)
    llm.engine.add_request([1, 2])
    with pytest.raises(ValueError, match="idle"):
        time_phases(llm, 1)


def test_a_cancelled_run_leaves_no_request_behind(model: Transformer) -> None:
    llm = LLM(model, num_blocks=32, max_model_len=128)
    job = Job({}, lambda *_: None)
    job.cancel()
    with pytest.raises(Cancelled):
        time_phases(llm, 8, 2, job=job)
    assert not llm.engine.has_work and llm.meter.kv_allocated_bytes == 0


def test_flops_of_a_phase_are_the_meters(model: Transformer) -> None:
    llm = LLM(model, num_blocks=32, max_model_len=128)
    before = llm.meter.snapshot()
    time_phases(llm, 16, 2, answer=1, repeats=1)  # warm-up: 16 prompt tokens and two steps; then 16 and one
    flops = (llm.meter.snapshot() - before).total_flops
    prefill = phase_work(CONFIG, "prefill", 16, 2, "float32").total_flops
    steps = [phase_work(CONFIG, "decode", 16 + i, 2, "float32", answer=0).total_flops for i in range(2)]
    assert flops == 2 * prefill + 2 * steps[0] + steps[1]
    with pytest.raises(ValueError, match="phase must be"):
        phase_work(CONFIG, "both", 16, 2, "float32")


def test_what_an_answer_token_costs() -> None:
    assert TIMES.even_answer == pytest.approx(11) and TIMES.per_token == pytest.approx(64 / 11)
    prefill, decode = phase_points(CONFIG, TIMES, "float32")
    assert prefill.seconds == pytest.approx(0.022) and decode.fastest == pytest.approx(0.002)
    assert prefill.intensity > decode.intensity
    assert png(request_timeline(TIMES, 3)).startswith(b"\x89PNG")


def test_the_verdict_names_both_phases_before_and_after_the_measurement() -> None:
    floors = [predict(phase_work(CONFIG, phase, 64, 2, "float32"), MACHINE) for phase in ("prefill", "decode")]
    early, late = explain(64, 2, floors, None), explain(64, 2, floors, TIMES)
    assert "Prefill, 128 tokens: the roofline predicts" in early and "Decode, 2 requests" in early and "measuring" in early
    assert "<b>bandwidth</b>-bound" in early
    assert "measured 22.0 ms" in late and "measuring" not in late and "5.82 times as much time" in late
    assert "1 token:" in explain(1, 1, floors, None) and "1 request:" in explain(1, 1, floors, None)


def test_moving_prompt_batch_and_dtype_changes_picture_and_verdict(model: Transformer) -> None:
    import torch

    panel = phases_panel(MACHINE, [model, model.converted(torch.bfloat16, "cpu")], prompts=(1, 8, 64), batches=(1, 4), repeats=1)
    try:
        panel.wait(60)
        seen = [(panel.verdict.value, bytes(panel.picture.value))]
        moves = (("prompt", 1, "Prefill, 1 token:"), ("batch", 4, "Prefill, 4 tokens:"), ("dtype", "bfloat16", "Decode, 4"))
        for control, value, said in moves:
            panel[control].value = value
            panel.wait(60)
            seen.append((panel.verdict.value, bytes(panel.picture.value)))
            assert said in panel.verdict.value and "measured" in panel.verdict.value
        assert len({verdict for verdict, _ in seen}) == len({picture for _, picture in seen}) == 4
        # the largest position fits into the panel's engine
        panel["prompt"].value = 64
        panel.wait(60)
        assert "Prefill, 256 tokens" in panel.verdict.value and "failed" not in panel.verdict.value
    finally:
        panel.close()


def test_a_newer_position_cancels_the_older_one(model: Transformer) -> None:
    panel = phases_panel(MACHINE, [model], prompts=(1, 64), batches=(1, 4), repeats=1)
    try:
        for batch in (4, 1, 4, 1):
            panel["batch"].value = batch
        start = time.monotonic()
        panel.wait(60)
        assert "Decode, 1 request:" in panel.verdict.value and time.monotonic() - start < 30
    finally:
        panel.close()
