"""The study of drafts: its clock, its parts and its prediction, on a tiny model."""

from __future__ import annotations

import itertools

import pytest

from minillm import LLM
from minillm.bench.studies import drafts

from ..strategies import greedy, tiny_model


def engine(**options):
    shared = {"num_blocks": 64, "block_size": 4, "adaptive_drafts": False}
    return LLM(tiny_model(), **shared, **options)


def test_a_run_counts_tokens_after_the_first_and_leaves_the_engine_as_it_was():
    clock = itertools.count()
    llm = engine(speculative="draft", draft_model=tiny_model(), num_draft_tokens=3)
    before = dict(vars(llm.engine.runner)), dict(vars(llm.engine.speculation.proposer))
    found = drafts.run(llm, [2, 3, 4], 13, lambda: float(next(clock)))
    assert found.tokens == len(greedy([2, 3, 4], 13)) - 1 == 12
    assert found.passes == [(1.0, 3)] * 3 and found.drafts == [(1.0, 3)] * 3, "of itself the model accepts all"
    assert found.accepted == found.tried == 9 and found.seconds == 13
    assert before[0].keys() == vars(llm.engine.runner).keys()
    assert before[1].keys() == vars(llm.engine.speculation.proposer).keys()


def test_a_run_without_drafts_has_passes_of_one_token():
    found = drafts.run(engine(), [2, 3, 4], 6)
    assert [n for _, n in found.passes] == [0] * 5 and not found.drafts and found.tried == 0


def test_a_summary_takes_passes_that_check_something_and_drafts_that_are_some():
    runs = [
        drafts.Run(2.0, tuple(range(7)), 3, 4, [(0.2, 2), (0.9, 0)], [(0.5, 2), (9.0, 0)]),
        drafts.Run(1.0, tuple(range(4)), 1, 2, [(0.4, 2)], [(0.7, 2)]),
    ]
    assert drafts.summary(runs) == pytest.approx({"tok/s": 3.0, "per pass": 3.0, "alpha": 4 / 6, "draft s": 0.15, "pass s": 0.6})


def test_the_prediction_is_the_formula():
    r = {"chat/int4 alpha": 0.5, "chat/int4 draft s": 0.2, "chat/int4 pass s": 1.2, "chat/none pass s": 1.0}
    assert drafts.predicted(r, "chat", "int4") == pytest.approx(1.875 / (3 * 0.2 + 1.2))


def test_every_bar_can_be_computed_from_a_round():
    engines = {"none": engine()} | {who: engine(speculative="ngram", num_draft_tokens=2) for who in drafts.LENGTH}
    for llm in engines.values():
        llm.encode = lambda messages: [2, 3, 2, 3, len(messages[0]["content"])]  # a model without a chat template
    state = drafts.State(engines, 12, {kind: ("ab", "abcd") for kind in drafts.KINDS})
    found = drafts.measure(state, 1)
    assert all(bar.value(found) >= 0 for bar in drafts.BARS)
    assert [bar.at_least for bar in drafts.BARS if bar.at_least] == [1.2]
