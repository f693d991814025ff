"""Needles: what is hidden stands in the text, is asked for behind it, and is read from the store."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, ModelConfig, Transformer
from minillm.bench.needles import FACTS, ask, divergence, haystack
from minillm.bench.quality import logprobs

from .letters import Letters


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        max_position=1024,
    )  # fmt: skip
    return Transformer.random(config, dtype=torch.float64)


@pytest.mark.parametrize("length", [120, 300, 777])
def test_every_fact_stands_in_the_text_once_and_spreads_over_it(length):
    hay = haystack(Letters(251), length, seed=3)
    text = tuple(hay.tokens)
    assert length - 1 < len(text) < length + 60 and len(hay.questions) == len(FACTS) == len(set(map(tuple, hay.questions)))
    places = []
    for question, answer in zip(hay.questions, hay.answers, strict=True):
        fact = (*question, answer)
        found = [i for i in range(len(text)) if text[i : i + len(question)] == fact[:-1]]
        assert len(found) == 1 and text[found[0] : found[0] + len(fact) - 1] == fact[:-1]
        places.append(found[0])
    assert places == sorted(places) and places[0] < length / 4 and places[-1] > length * 3 / 4


def test_another_seed_hides_other_words_and_the_same_seed_the_same():
    assert haystack(Letters(251), 200, 1) == haystack(Letters(251), 200, 1) != haystack(Letters(251), 200, 2)


@pytest.mark.parametrize("length", [120, 300])  # one piece of the text, and two
def test_asking_through_the_store_is_one_pass_over_text_and_question(model, length):
    hay = haystack(Letters(251), length)
    whole = torch.stack([row[-1] for row in logprobs(model, [[*hay.tokens, *q] for q in hay.questions])])
    torch.testing.assert_close(ask(model, hay), whole, atol=1e-5, rtol=1e-5)
    assert divergence(whole, whole) == 0 < divergence(whole, ask(model, hay, "fp8"))


def test_found_counts_the_words_that_are_likelier_than_the_other_hidden_ones():
    hay = haystack(Letters(251), 120)
    scores = torch.full((8, 256), -9.0)
    scores[:, 0] = 5.0  # a word that is not hidden anywhere does not count
    hay.answers[:] = range(1, 9)
    for i in range(8):
        scores[i, hay.answers[i if i < 5 else 0]] = 1.0
    assert hay.found(scores) == 5 and hay.chance == 1 / 8


def test_recalled_counts_the_questions_that_an_engine_answers_with_the_hidden_word_itself():
    hay = haystack(Letters(251), 120)
    asked = [[*hay.tokens, *question] for question in hay.questions]

    class Parrot:
        """Answers every question with the first hidden word."""

        def generate(self, prompts, params):
            assert params.temperature == 0 and params.max_tokens == 1 and prompts in (hay.tokens, asked)
            return [type("Out", (), {"token_ids": [hay.answers[0]]})() for _ in prompts]

    hay.answers[:] = range(1, 9)
    assert hay.recalled(Parrot()) == 1


def test_an_engine_recalls_what_one_pass_over_text_and_question_makes_likeliest(model):
    hay = haystack(Letters(251), 120)
    likeliest = [int(row[-1].argmax()) for row in logprobs(model, [[*hay.tokens, *q] for q in hay.questions])]
    hay.answers[:] = [token if i < 3 else (token + 1) % 256 for i, token in enumerate(likeliest)]
    llm = LLM(model, dtype="float64", block_size=16, num_blocks=128, max_model_len=512, prefix_cache="radix")
    assert hay.recalled(llm) == 3
