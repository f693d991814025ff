"""Layers that draft: their acceptance is counted as decoding would meet it."""

from __future__ import annotations

from minillm import LLM, SamplingParams
from minillm.spec.choose_layers import agreement, leave_out

from ..strategies import greedy, tiny_model

PROMPTS = ([2, 3, 4], [5], [6, 7, 8, 9])
TEXTS = [([*p, *greedy(p, n)], len(p)) for p, n in zip(PROMPTS, (9, 17, 20), strict=True)]


def test_the_model_itself_agrees_with_all_that_it_said():
    assert agreement(tiny_model(), TEXTS) == (46, 46)


def test_agreement_is_that_of_asking_token_by_token():
    shallow = tiny_model().skipping([1])
    llm, right = LLM(shallow, num_blocks=32), 0
    for ids, prompt_len in TEXTS:
        for i in range(prompt_len, len(ids)):
            right += llm.generate([ids[:i]], SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids == (ids[i],)
    assert agreement(shallow, TEXTS) == (right, 46)


def test_each_round_leaves_out_the_layer_that_costs_least():
    whole, less = leave_out(tiny_model(), TEXTS, fewest=1, width=8)
    assert (whole.layers, whole.alpha) == ((0, 1), 1.0)
    counts = {kept: agreement(tiny_model().skipping([kept]), TEXTS)[0] for kept in (0, 1)}
    best = max(counts.values())
    assert less.right == best and less.layers == (max(kept for kept in counts if counts[kept] == best),)
