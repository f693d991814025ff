"""How a request ends: end-of-sequence ids, stop ids, stop strings, lengths and aborts; ids and text are cut at the same place."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import SamplingParams

from ..reference import ending
from ..strategies import PIECES, FakeTokenizer, reference, run_to_end, scripted_llm, tiny_engine, tiny_model


def outputs_of(llm, **params):
    """Everything that the engine says about one request to a scripted model."""
    llm.engine.add_request([0], SamplingParams(**params))
    outputs = []
    while llm.engine.has_work:
        outputs += llm.engine.step()
    return outputs


def last(llm, **params):
    return outputs_of(llm, **params)[-1]


# --- end-of-sequence and stop ids ---


@pytest.mark.parametrize("eos", [(2,), (2, 4), (4, 2)])
def test_the_first_of_several_eos_ids_ends_the_text_and_is_not_part_of_it(eos):
    out = last(scripted_llm("a", "E", "b", "F", "c", eos=eos), max_tokens=5)
    assert (out.text, out.token_ids, out.finish_reason) == ("a", (1,), "stop")


def test_both_eos_ids_of_a_model_end_a_text():
    for script, want in ((["a", "E", "b"], "a"), (["a", "b", "E"], "ab")):
        out = last(scripted_llm(*script, eos=(script.index("E") + 1, 0)), max_tokens=9)
        assert (out.text, out.finish_reason) == (want, "stop")


def test_the_tokenizers_eos_ids_count_as_well_as_the_models():
    llm = scripted_llm("a", "E", "b", eos=())
    llm.tokenizer.eos_token_ids = (2,)
    assert last(llm, max_tokens=3).text == "a"
    assert last(llm, max_tokens=3, ignore_eos=True).text == "aEb"


def test_ignore_eos_runs_on_and_shows_the_token():
    out = last(scripted_llm("a", "E", "b", eos=(2,)), max_tokens=3, ignore_eos=True)
    assert (out.text, out.token_ids, out.finish_reason) == ("aEb", (1, 2, 3), "length")


def test_stop_token_ids_end_a_text_also_when_eos_is_ignored():
    for ignore in (False, True):
        out = last(scripted_llm("a", "b", "c", "E", eos=(4,)), max_tokens=9, stop_token_ids=[3], ignore_eos=ignore)
        assert (out.text, out.token_ids, out.finish_reason) == ("ab", (1, 2), "stop")


def test_an_eos_id_in_the_prompt_ends_nothing():
    llm = scripted_llm("a", "b", eos=(0,))
    assert last(llm, max_tokens=2).text == "ab"


def test_a_stop_id_as_the_very_last_token_is_a_stop():
    out = last(scripted_llm("a", "E", eos=(2,)), max_tokens=2)
    assert (out.text, out.finish_reason) == ("a", "stop")


def test_a_request_that_ends_at_once_has_no_tokens_and_no_text():
    out = last(scripted_llm("E", eos=(1,)), max_tokens=3, logprobs=1)
    assert (out.text, out.token_ids, out.finish_reason, out.logprobs) == ("", (), "stop", ())


# --- stop strings ---


def test_a_stop_string_across_two_tokens_shows_only_what_stands_before_it():
    outs = outputs_of(scripted_llm("xa", "b", "c"), max_tokens=3, stop="ab")
    assert [o.delta for o in outs] == ["x", ""]
    assert (outs[-1].text, outs[-1].token_ids, outs[-1].finish_reason) == ("x", (1,), "stop")


def test_with_eos_instead_of_the_second_half_the_first_half_is_shown():
    outs = outputs_of(scripted_llm("xa", "E", eos=(2,)), max_tokens=3, stop="ab")
    assert [o.delta for o in outs] == ["x", "a"] and outs[-1].text == "xa" and outs[-1].finish_reason == "stop"


@pytest.mark.parametrize("stop, text, ids", [("b", "xa", (1,)), ("xab", "", ()), ("c", "xab", (1, 2)), ("bc", "xa", (1,))])
def test_text_and_ids_are_cut_at_the_same_place(stop, text, ids):
    out = last(scripted_llm("xa", "b", "c", "d"), max_tokens=4, stop=[stop, "zz"], logprobs=0)
    assert (out.text, out.token_ids, out.finish_reason) == (text, ids, "stop")
    assert len(out.logprobs) == len(ids)


def test_a_stop_string_at_the_last_allowed_token_is_a_stop():
    out = last(scripted_llm("a", "b"), max_tokens=2, stop="ab")
    assert (out.text, out.finish_reason) == ("", "stop")


def test_a_stop_string_in_front_of_half_a_character_is_found_at_the_last_token():
    out = last(scripted_llm("x", b"ab\xe2"), max_tokens=2, stop="ab")
    assert (out.text, out.token_ids, out.finish_reason) == ("x", (1,), "stop")


def test_a_stop_string_is_not_looked_for_in_the_prompt():
    out = last(scripted_llm("a", "b"), max_tokens=2, stop="?")
    assert (out.text, out.finish_reason) == ("ab", "length")


# --- half characters ---


def test_half_a_character_is_held_back_and_shown_at_max_tokens():
    outs = outputs_of(scripted_llm("a", b"\xe2", b"\x82", b"\xac"), max_tokens=3)
    assert [o.delta for o in outs] == ["a", "", "\ufffd"] and outs[-1].text == "a\ufffd"
    assert outputs_of(scripted_llm("a", b"\xe2", b"\x82", b"\xac"), max_tokens=4)[-1].text == "a€"


def test_half_a_character_is_shown_at_eos_and_at_abort():
    outs = outputs_of(scripted_llm("a", b"\xe2", "E", eos=(3,)), max_tokens=9)
    assert [o.delta for o in outs] == ["a", "", "\ufffd"]
    llm = scripted_llm("a", b"\xe2", b"\x82", b"\xac")
    name = llm.engine.add_request([0], SamplingParams(max_tokens=4))
    shown = "".join(o.delta for _ in range(2) for o in llm.engine.step())
    out = llm.engine.abort(name)
    assert shown == "a" and out.delta == "\ufffd" and out.text == "a\ufffd" and out.token_ids == (1, 2)


def test_an_abort_shows_what_might_have_become_a_stop_string():
    llm = scripted_llm("xa", "b")
    name = llm.engine.add_request([0], SamplingParams(max_tokens=4, stop="ab"))
    (first,) = llm.engine.step()
    out = llm.engine.abort(name)
    assert (first.delta, out.delta, out.text, out.finish_reason) == ("x", "a", "xa", "abort")


def test_an_abort_before_the_first_step_has_nothing():
    llm = scripted_llm("a")
    name = llm.engine.add_request([0], SamplingParams(max_tokens=1))
    out = llm.engine.abort(name)
    assert (out.token_ids, out.text, out.finish_reason) == ((), "", "abort") and not llm.engine.has_work


# --- any model, any parameters ---

some_params = st.builds(
    SamplingParams, max_tokens=st.integers(1, 16), ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, 31), max_size=3),
    stop=st.lists(st.sampled_from(["a", "b", "ab", "€", "é", " ", "xa", "bab", "\ufffd"]), max_size=2),
    logprobs=st.sampled_from([None, 0, 2]),
)  # fmt: skip


@settings(max_examples=60)
@given(st.permutations(PIECES), st.lists(st.integers(2, 31), min_size=1, max_size=8), some_params)
def test_every_request_ends_where_the_rules_say_and_deltas_add_up(pieces, prompt, params):
    """Shuffled pieces give one model many languages."""
    tokenizer = FakeTokenizer((5,), pieces)
    engine = tiny_engine(tokenizer=tokenizer)
    engine.add_request(prompt, params)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    want = ending(reference().greedy(prompt, params.max_tokens), params, (0, 1, 5), tokenizer.decode)
    out = outputs[-1]
    assert (out.token_ids, out.text, out.finish_reason) == (want.token_ids, want.text, want.finish_reason)
    assert "".join(o.delta for o in outputs) == out.text and not any(o.finished for o in outputs[:-1])
    assert (out.logprobs is None) == (params.logprobs is None)
    assert out.logprobs is None or [next(iter(lp)) for lp in out.logprobs] == list(out.token_ids)


def test_logprobs_are_those_of_the_model_whatever_the_temperature():
    prompt = [4, 5, 6]
    engine = tiny_engine(max_num_batched_tokens=2)
    name = engine.add_request(prompt, SamplingParams(max_tokens=4, temperature=2.0, seed=1, logprobs=31, ignore_eos=True))
    out = run_to_end(engine)[name]
    assert len(out.logprobs) == len(out.token_ids) == 4
    logits = reference().logits([*prompt, *out.token_ids])
    for i, (token, logprobs) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        want = torch.log_softmax(logits[len(prompt) - 1 + i], dim=-1)
        assert next(iter(logprobs)) == token and len(logprobs) in (31, 32)
        assert all(value == pytest.approx(float(want[t]), abs=1e-9) for t, value in logprobs.items())
        assert math.fsum(map(math.exp, logprobs.values())) <= 1 + 1e-9
    assert tiny_model().config.vocab_size == 32
