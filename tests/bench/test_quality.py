"""The evaluation: a model loses nothing against itself, and what it is scored by can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from minillm import LLM, SamplingParams, Transformer
from minillm.bench.quality import ChoiceScore, Evaluation, Question, logprobs, quality_table
from minillm.bench.quality_text import CHOICES, TEXTS
from minillm.quant.calibration_text import TEXTS as CALIBRATION
from minillm.quant.config import QuantConfig
from minillm.quant.quantise import quantise_model

from ..strategies import FakeTokenizer, tiny_config

TEXT = {"letters": "abxab" * 4, "more": "bbaax"}
ASKED = {"first": [Question("ab", ("a", "b")), Question("ax", ("b", "a", "x"))]}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.random(tiny_config(2), seed=2)


@pytest.fixture(scope="module")
def evaluation(model) -> Evaluation:
    return Evaluation(model, FakeTokenizer(), TEXT, ASKED)


def test_a_model_loses_nothing_against_itself(model, evaluation):
    for score in evaluation.text_scores(model).values():
        assert score.kl == pytest.approx(0, abs=1e-6) and score.agreement == 1
    assert evaluation.choice_scores(model) == evaluation.reference_choices


def test_fewer_bits_lose_more(model, evaluation):
    kl = [
        sum(s.kl for s in evaluation.text_scores(quantise_model(model, QuantConfig("rtn", bits, 4, head_bits=None))).values())
        for bits in (8, 4, 2)
    ]
    assert 0 < kl[0] < kl[1] < kl[2]


def test_a_score_is_what_its_formula_says(model, evaluation):
    ids = FakeTokenizer().encode(TEXT["more"])
    other = quantise_model(model, QuantConfig("rtn", 2, 4))
    p, q = (logprobs(m, [ids])[0][:-1].double() for m in (model, other))
    score = evaluation.text_scores(other)["more"]
    assert score.tokens == 4 and score.kl == pytest.approx(float((p.exp() * (p - q)).sum() / 4), rel=1e-4)
    assert score.loss == pytest.approx(-sum(float(q[i, ids[i + 1]]) for i in range(4)) / 4, rel=1e-5)
    assert score.agreement == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))


def test_the_answer_with_the_highest_mean_log_probability_is_given(model, evaluation):
    tokenizer, right = FakeTokenizer(), 0
    for question in ASKED["first"]:
        prompt = tokenizer.encode(question.prompt)
        values = []
        for answer in question.answers:
            ids = prompt + tokenizer.encode(answer)
            found = logprobs(model, [ids])[0]
            values.append(float(found[len(prompt) - 1, ids[-1]]))
        right += values.index(max(values)) == 0
    score = evaluation.reference_choices["first"]
    assert (score.right, score.questions) == (right, 2) and score.chance == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_rows_in_one_pass_are_those_of_their_own_and_of_the_engine(model):
    ids = [[2, 3, 7, 8], [9], [4, 4, 4, 2, 3]]
    together = logprobs(model, ids)
    for row, found in zip(ids, together, strict=True):
        torch.testing.assert_close(found, logprobs(model, [row])[0], rtol=1e-4, atol=1e-5)
        first = LLM(model, num_blocks=10).generate([row], SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids[0]
        assert int(found[-1].argmax()) == first


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_kv_in_fewer_bits_can_be_scored_too(model, evaluation, kind):
    assert all(0 < s.kl < 0.1 for s in evaluation.text_scores(model, kind).values())


def test_a_task_informs_only_well_above_chance():
    assert ChoiceScore(8, 8, 0.25).informative and ChoiceScore(3, 8, 0.25).informative
    assert not ChoiceScore(2, 8, 0.25).informative and not ChoiceScore(0, 8, 0.25).informative


def test_questions_have_one_right_answer_and_are_not_calibrated_on():
    assert set(TEXTS) == set(CHOICES) == {"prose", "code", "arithmetic", "JSON", "retrieval"}
    for asked in CHOICES.values():
        assert len(asked) == 8 and all(len(set(answers)) == len(answers) == 4 for _, answers in asked)
    seen = "\n".join(CALIBRATION)
    assert not any(line in seen for text in TEXTS.values() for line in text.splitlines() if len(line) > 30)


def test_the_table_carries_its_note(model, evaluation):
    table = quality_table(evaluation, {"same": model}, "stored in 4 bits")
    assert table.startswith("stored in 4 bits") and "same" in table and not math.isnan(len(table))
