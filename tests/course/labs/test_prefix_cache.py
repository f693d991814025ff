"""Lesson 1.2's traces, tree and panel without a front end, on tiny random models."""

from __future__ import annotations

import pytest

from minillm import LLM
from minillm.course.labs import prefix_cache as lab
from minillm.course.labs import prefix_tree as tree
from minillm.course.panel import Cancelled
from minillm.course.plots import png
from minillm.course.stepper import Stepper
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.hardware import Hardware

CONFIG = ModelConfig(
    vocab_size=300, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8,
    max_position=1600,
)  # fmt: skip
TOY = Hardware("toy machine", 2e10, {"float32": 1e11}, 1e9, "a test")
SECONDS = 60


class Letters:
    """One token a byte; a conversation is its contents in a row, the answer's opening behind."""

    eos_token_ids = ()

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def apply_chat_template(self, messages, add_generation_prompt):
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.random(CONFIG)


def engine(model, kind="radix", **options) -> LLM:
    return LLM(model, tokenizer=Letters(), prefix_cache=kind, **({"num_blocks": 400, "block_size": 8} | options))


def test_every_trace_but_its_cold_start_finds_what_its_requests_share(model):
    for trace in (lab.shared_system, lab.few_shot, lab.conversation):
        cold, warm = trace(engine(model, "none")), trace(engine(model))
        assert [a.token_ids for a in cold] == [a.token_ids for a in warm] and not any(a.cached for a in cold)
        assert warm[0].cached == 0 and all(0 < a.cached < a.prompt and a.computed == a.prompt - a.cached for a in warm[1:])
        assert all(a.seconds > 0 for a in warm)


def test_a_turn_finds_the_answer_before_it(model):
    turns = lab.conversation(engine(model, block_size=1, num_blocks=1600))
    for before, after in zip(turns, turns[1:]):
        assert after.cached == before.prompt + len(before.token_ids) - 1, "all but the last token, which was never computed"


def test_the_time_in_front_leaves_nothing_to_find(model):
    first, last = (lab.with_the_time(engine(model), first) for first in (True, False))
    assert {a.cached for a in first[1:]} == {16}, "what the template itself puts in front"
    assert all(a.cached > 400 for a in last[1:])


def test_the_table_counts_the_cold_start(model):
    answers = [lab.Answer(100, 0, 1.0, "", ()), lab.Answer(100, 80, 0.2, "", ())]
    row = lab.table({"two": answers}).splitlines()[1].split()
    assert row == ["two", "2", "200", "80", "120", "40.0%", "80.0%"]


def recorded(model):
    llm = engine(model, block_size=4, num_blocks=8, max_num_seqs=1)
    prompts = [("A", "you are a cook."), ("B", "you are a poet?"), ("C", "something else!!"), ("D", "you are a cook.")]
    return llm, tree.record(llm, prompts, max_tokens=2)


def test_a_recording_has_a_frame_before_and_two_for_each_request(model):
    _, frames = recorded(model)
    assert len(frames) == 1 + 2 * 4
    assert "B runs: 8 of 15 tokens found, 7 computed" in frames[3].event
    for i, frame in enumerate(frames):
        assert bool(frame.shot.tables) == (i % 2 == 1), "in use while a request runs"
        assert len(frame.shot.free) + len(frame.shot.referenced) + len(frame.shot.cached) == 8


def test_the_tree_says_what_was_evicted_and_draws_every_kept_block(model):
    llm, frames = recorded(model)
    captions = []
    for i in range(len(frames)):
        drawn, said = tree.tree_figure(frames, i, llm.tokenizer.decode)
        captions.append(said)
        numbers = [t.get_text() for t in drawn.axes[0].texts if t.get_text().isdigit()]
        assert sorted(map(int, numbers)) == sorted(frames[i].shot.kept)
        assert png(drawn).startswith(b"\x89PNG")
    assert any("Evicted" in said for said in captions) and "Evicted" not in captions[3]


def test_no_two_nodes_are_drawn_on_top_of_each_other(model):
    _, frames = recorded(model)
    for frame in frames:
        strips = tree._layout(frame.shot.tree)
        places = [(s.row, s.column + j) for s in strips for j in range(len(s.node.blocks))]
        assert len(set(places)) == len(places) == len(frame.shot.kept)


def test_the_stepper_goes_on_and_back_through_the_recording(model):
    llm, frames = recorded(model)
    view = Stepper("a test of the tree", frames, lambda frame, i: tree.tree_figure(frames, i, llm.tokenizer.decode))
    try:
        view.go(3)
        third = view.picture.value
        assert "4 of 9" in view.verdict.value and "B runs" in view.verdict.value
        view.forward.click()
        assert "B has ended" in view.verdict.value and view.picture.value != third
        view.back.click()
        assert view.picture.value == third
    finally:
        view.close()


@pytest.fixture(scope="module")
def bench(model) -> lab.HitBench:
    return lab.HitBench(model, prompt=160)


def test_a_measurement_finds_exactly_what_it_cached(bench):
    for hit in (0, 16, 144):
        before = bench.llm.meter.snapshot()
        assert len(bench.measure(hit, repeats=2)) == 2
        spent = bench.llm.meter.snapshot() - before
        assert spent.prefix_tokens == 2 * hit
        assert spent.tokens_computed == 2 * (160 - hit) + (hit + 1 if hit else 0)


@pytest.mark.parametrize("hit", [-16, 7, 160])
def test_a_hit_that_is_not_whole_blocks_inside_the_prompt_is_refused(bench, hit):
    with pytest.raises(ValueError, match=f"below 160 tokens, got {hit}"):
        bench.measure(hit)


def test_a_measurement_can_be_stopped_between_chunks(bench):
    ticks = []

    def tick(done: float) -> None:
        ticks.append(done)
        if len(ticks) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        bench.measure(0, tick)
    assert not bench.llm.engine.has_work, "the request that was under way is gone"


def test_the_floor_falls_with_the_hit_and_never_to_nothing(bench):
    floors = [bench.predict(hit, TOY) for hit in range(0, 160, 16)]
    assert floors == sorted(floors, reverse=True) and floors[-1] > 0


def test_the_panel_follows_its_slider(bench):
    seen = {0: [0.5, 0.5]}
    panel = lab.hit_panel(bench, TOY, seen, hit=128)
    try:
        panel.wait(SECONDS)
        first = panel.picture.value
        assert "128 of 160 tokens cached" in panel.verdict.value
        assert "times</b> as long and computes 5 times the tokens" in panel.verdict.value
        panel["cached"].value = 0
        panel.wait(SECONDS)
        assert panel.picture.value != first and "0 of 160 tokens cached" in panel.verdict.value
        assert list(panel["cached"].options) == [0, 128] and seen == {0: [0.5, 0.5]}, "what was handed in is not changed"
    finally:
        panel.close()


def test_figures_are_drawn(bench):
    answers = {"one": [lab.Answer(100, 0, 1.0, "", ()), lab.Answer(100, 80, 0.2, "", ())]}
    for made in (lab.ttft_figure(answers), lab.hit_figure(bench, TOY, {}), lab.hit_figure(bench, TOY, {16: [0.1, 0.2]}, 16)):
        assert png(made).startswith(b"\x89PNG")
