"""Lesson 6.2's counts, race and panel without a front end, on a tiny random model."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM
from minillm.bench.studies.drafts import LENGTH
from minillm.course.labs import drafts as lab
from minillm.course.plots import png
from minillm.spec.mtp import MTPHead
from minillm.spec.train_mtp import states_of

from ...strategies import VOCAB, greedy, tiny_engine, tiny_model

SECONDS = 60


class TinyRace(lab.Race):
    """Engines without a tokenizer, each drafting in some way that a tiny model has."""

    def __init__(self):
        ways = {
            "ngram": {"speculative": "ngram"},
            "int4": {"speculative": "draft", "draft_model": "int8"},
            "layers": {"speculative": "draft", "draft_model": [0]},
            "mtp": {"speculative": "draft", "draft_model": [1]},
        }
        shared = {"num_blocks": 64, "block_size": 4, "adaptive_drafts": False}
        self.engines = {"none": LLM(tiny_model(), **shared)}
        self.engines |= {who: LLM(tiny_model(), num_draft_tokens=LENGTH[who], **way, **shared) for who, way in ways.items()}
        self.tokens, self.prompts = 12, {"chat": [2, 3, 4], "fix text": [5, 6, 5, 6, 5]}
        self.answers, self.counts = {}, {}


@pytest.fixture(scope="module")
def race() -> TinyRace:
    return TinyRace()


@pytest.fixture(scope="module")
def seen(race):
    return {"chat": {who: race.measure("chat", who) for who in race.engines}}


def test_a_race_measures_each_way_and_gives_an_engine_its_length_back(race):
    speculation = race.engines["layers"].engine.speculation
    before = speculation.longest
    found = race.measure("chat", "layers", length=5, tokens=20)
    assert race.answers["chat", "layers"] == greedy([2, 3, 4], 20) and race.counts["chat", "layers"].output_tokens == 20
    assert speculation.longest == before and found["per pass"] >= 1 and 0 <= found["alpha"] <= 1


def test_prices_are_shares_of_weight_bytes(race):
    prices = lab.prices(race.engines)
    assert prices["ngram"] == 0 and 0 < prices["int4"] < prices["layers"] < 1 and "none" not in prices


def test_the_speed_without_a_price_is_the_tokens_of_a_pass():
    assert lab.speedup(0.5, 0.0, 1.0, 2) == 1.75
    assert lab.speedup(0.5, 0.5, 1.0, 1) == 1.0, "α = c gains nothing"
    assert all(lab.speedup(0.6, 0.7, 1.0, n) < 1 for n in range(1, 12))


def test_guesses_by_depth_are_those_of_guessing_place_by_place():
    torch.manual_seed(2)
    head = MTPHead(16, 8, torch.arange(VOCAB))
    torch.nn.init.normal_(head.join.weight, std=0.5)
    model = tiny_model()
    embedding, output = model.embedding.float(), model.head.dense()[0].float()
    ids = [2, 3, *greedy([2, 3], 18)]
    states = states_of(model, ids)
    expected = [0, 0]
    for i in range(len(ids) - 3):
        state, token, good = states[i : i + 1], ids[i + 1], True
        for k in range(2):
            state = head(state, embedding[[token]])
            token = int((state @ output.T).argmax())
            good = good and token == ids[i + 2 + k]
            expected[k] += good
    assert lab.right_by_depth(head, states, ids, embedding, output, 2) == expected


def test_pictures_and_the_table_show_every_drafter(race, seen):
    parts = {who: lab.parts(seen["chat"][who], seen["chat"]["none"]) for who in lab.NAMES}
    points = {who: (c, alpha) for who, (alpha, c, _) in parts.items()}
    for picture in (lab.price_figure(points), lab.length_figure({w: (a, c) for w, (a, c, _) in parts.items()}, 0.05)):
        assert png(picture)[:4] == b"\x89PNG"
    table = lab.table(seen["chat"], LENGTH)
    assert all(name in table for name in lab.NAMES.values())


def test_the_panel_shows_what_was_measured_and_measures_where_it_is_moved(race, seen):
    panel = lab.draft_panel(race, seen, LENGTH)
    try:
        panel.wait(SECONDS)
        assert "trained head, chat, γ = 2" in panel.verdict.value and "times</b> the speed" in panel.verdict.value
        panel["kind"].value = "fix text"
        panel.wait(SECONDS)
        assert "trained head, fix text" in panel.verdict.value
    finally:
        panel.close()


def test_layers_that_were_counted_are_those_that_are_kept():
    assert lab.RIGHT.keys() == lab.KEPT.keys() and all(len(kept) == n for n, kept in lab.KEPT.items())
    assert tiny_engine().model.config.num_layers == 2
