"""Lesson 6.1's counts and pictures without a front end, on a tiny random model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.course.labs import speculation as lab
from minillm.model.transformer import Transformer

from ...strategies import tiny_config


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(Transformer.random(tiny_config(max_position=256)), num_blocks=120, block_size=4, dtype="float64")


@pytest.fixture(scope="module")
def written(llm: LLM):
    return llm.generate([[5, 9, 5, 9, 3]], SamplingParams(max_tokens=60, ignore_eos=True))[0]


def test_one_pass_over_a_text_gives_the_tokens_that_follow_each_of_its_last_ones(llm, written):
    ids, prompt = [*written.prompt_token_ids, *written.token_ids], len(written.prompt_token_ids)
    assert lab.next_tokens(llm.model, ids[:-1], len(written.token_ids)) == list(written.token_ids)
    assert lab.next_tokens(llm.model, ids[:prompt]) == list(written.token_ids[:1])


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_a_replay_counts_what_the_engine_counts(llm, written, gamma):
    engine = LLM(
        llm.model, num_blocks=120, block_size=4, speculative="ngram", adaptive_drafts=False, num_draft_tokens=gamma,
        max_draft_batch=64,
    )  # fmt: skip
    (out,) = engine.generate([list(written.prompt_token_ids)], SamplingParams(max_tokens=60, ignore_eos=True))
    assert out.token_ids == written.token_ids
    ids = [*out.prompt_token_ids, *out.token_ids]
    assert lab.stats(lab.replay(ids, len(out.prompt_token_ids), gamma)) == out.drafts and out.drafts.accepted > 0


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 9))
def test_the_passes_of_a_replay_write_the_whole_text_once(ids, gamma):
    at = 1
    for p in lab.replay(ids, 1, gamma):
        assert p.accepted <= len(p.draft) <= gamma and (p.start, p.draft) == (at, p.draft)
        assert list(p.draft[: p.accepted]) == ids[at : at + p.accepted]
        at += p.accepted + 1
    assert at == len(ids)


def test_a_trace_goes_back_to_its_first_pass(llm, written):
    view = lab.trace(llm, written, gamma=4)
    try:
        assert "drafted" in view.verdict.value and bytes(view.picture.value).startswith(b"\x89PNG")
        view.go(0)
        assert "pass 1: 0 drafted, 0 accepted" in view.verdict.value
    finally:
        view.close()


def test_every_kind_and_temperature_has_a_line(llm, written, monkeypatch):
    texts = {(kind, t): written for kind in lab.KINDS for t in lab.TEMPERATURES}
    lines = lab.acceptance_table(texts, gamma=4)
    assert len(lines) == 1 + 12 and len({len(line) for line in lines}) == 1
    assert [line.split()[0] for line in lines[1::3]] == list(lab.KINDS)


def test_the_counts_of_a_right_sampler_stay_below_the_limit_and_those_of_a_wrong_one_do_not():
    p, draw = np.array([0.5, 0.3, 0.15, 0.05]), np.random.default_rng(3)
    right = np.bincount([lab.pick(p, u) for u in draw.random(4000)], minlength=4)
    assert lab.chi_square(right, 4000 * p) < lab.limit(3) < lab.chi_square(right, 4000 * p[::-1])
    assert lab.limit(3) == pytest.approx(16.27, abs=0.5) and lab.pick(p, 0.0) == 0 and lab.pick(p, 1 - 2**-53) == 3
