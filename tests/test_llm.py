"""The door: what generate, chat and stream accept, return, and leave behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import LLM, SamplingParams

from .reference import ending
from .strategies import (
    EOS,
    MAX_LEN,
    VOCAB,
    FakeTokenizer,
    assert_empty,
    greedy,
    one_thread,  # noqa: F401
    reference,
    scripted_llm,
    tiny_llm,
    tiny_model,
    watched,
)

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


class ChatTokenizer(FakeTokenizer):
    """A conversation becomes the letters of its contents with a space after each."""

    def apply_chat_template(self, messages, add_generation_prompt=True):
        return self.encode("".join(m["content"] + " " for m in messages))


# --- generate ---


@pytest.mark.parametrize(
    "prompts, separate",
    [
        ([4, 5], [[4, 5]]),
        ((4, 5), [[4, 5]]),
        (np.array([4, 5]), [[4, 5]]),
        (torch.tensor([4, 5]), [[4, 5]]),
        ([[4, 5]], [[4, 5]]),
        ([[4, 5], [6]], [[4, 5], [6]]),
        (([4, 5], (6,)), [[4, 5], [6]]),
        ([np.array([4, 5]), np.array([6])], [[4, 5], [6]]),
        ([torch.tensor([4, 5]), [6]], [[4, 5], [6]]),
        (np.array([[4, 5], [6, 7]]), [[4, 5], [6, 7]]),
        ([np.int64(4), np.int64(5)], [[4, 5]]),
    ],
)
def test_one_prompt_or_several_in_any_kind_of_sequence(prompts, separate):
    outs = tiny_llm().generate(prompts, SHORT)
    assert [list(o.prompt_token_ids) for o in outs] == separate
    assert [o.token_ids for o in outs] == [greedy(p, 4) for p in separate]


def test_text_is_one_prompt_and_a_list_of_texts_is_several():
    llm = LLM(tiny_model(), tokenizer=FakeTokenizer(EOS), num_blocks=64, block_size=4)
    (one,), two = llm.generate("ab", SHORT), llm.generate(["ab", "c"], SHORT)
    assert one.prompt_token_ids == (2, 3) and one.text == FakeTokenizer().decode(one.token_ids)
    assert [o.token_ids for o in two] == [greedy([2, 3], 4), greedy([8], 4)]


@pytest.mark.parametrize("nothing", [[], (), np.array([])])
def test_no_prompts_give_no_results(nothing):
    llm = tiny_llm()
    assert llm.generate(nothing) == [] and llm.generate(nothing, []) == [] and llm.generate(nothing, SHORT) == []
    assert_empty(llm)


@pytest.mark.parametrize(
    "prompts, named",
    [
        ("", "empty string"),
        ([""], "empty string"),
        ([[]], "no tokens"),
        ([[4], []], "no tokens"),
        (["a", ""], "no tokenizer|empty string"),
        ([[4], [VOCAB]], f"{VOCAB}"),
        ([[4], [-1]], "-1"),
        ([[4], [True]], "True"),
        ([[4], [5.0]], "5.0"),
        ([4, 5.0], "4|5.0"),
        ([4.0], "4.0"),
        ([[4], 5], "5"),
        ([[4], [5] * MAX_LEN], f"{MAX_LEN} tokens.*{MAX_LEN - 1}"),
        ([[4], None], "None"),
        (None, "None"),
        (7, "7"),
        (b"ab", "b'ab'"),
        ({"role": "user", "content": "a"}, "role"),
    ],
)
def test_one_bad_prompt_of_many_is_refused_by_name_and_leaves_the_engine_empty_and_working(prompts, named):
    llm = tiny_llm()
    with watched(llm.model) as batches, pytest.raises(ValueError, match=named):
        llm.generate(prompts, SHORT)
    assert batches == [], "every prompt is checked before the first is run"
    assert_empty(llm)
    assert llm.generate([4, 5], SHORT)[0].token_ids == greedy([4, 5], 4)


@pytest.mark.parametrize(
    "params, named",
    [
        ([SHORT], "2 prompts with 1 "),
        ([SHORT] * 3, "2 prompts with 3 "),
        ([SHORT, None], "NoneType"),
        ({"max_tokens": 3}, "2 prompts with 1|dict|str"),
        (5, "5"),
        ([SHORT, SamplingParams(stop_token_ids=[VOCAB])], f"{VOCAB}"),
        ([SHORT, SamplingParams(stop="x")], "tokenizer"),
    ],
)
def test_bad_parameters_are_refused_and_leave_the_engine_empty(params, named):
    llm = tiny_llm()
    with pytest.raises(ValueError, match=named):
        llm.generate([[4], [5]], params)
    assert_empty(llm)


def test_a_request_too_large_for_the_pool_is_refused_before_the_others_run():
    llm = tiny_llm(num_blocks=2, block_size=4)
    with watched(llm.model) as batches, pytest.raises(ValueError, match="needs 12 KV slots, the whole pool has 8"):
        llm.generate([[4], [5] * 9], SHORT)
    assert batches == []
    assert_empty(llm)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.lists(st.integers(2, 31), min_size=1, max_size=9), st.integers(1, 9)), max_size=6), st.integers(1, 4)
)
def test_results_come_in_input_order_each_with_its_own_parameters(work, seqs):
    llm = tiny_llm(max_num_seqs=seqs, max_num_batched_tokens=8)
    prompts = [p for p, _ in work]
    before = [list(p) for p in prompts]
    for _ in range(2):
        outs = llm.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in work])
        assert [o.token_ids for o in outs] == [greedy(p, n) for p, n in work]
        assert [list(o.prompt_token_ids) for o in outs] == prompts == before, "the caller's lists stay as they are"
    assert_empty(llm)


def test_an_over_long_text_is_refused_not_cut():
    llm = scripted_llm("a", "b", max_model_len=8)
    with pytest.raises(ValueError, match="8 tokens.* 7"):
        llm.generate(["a", "ab" * 4])
    assert [o.text for o in llm.generate(["a" * 7, "a"], SamplingParams(max_tokens=3))] == ["b", "bbb"]


def test_n_samples_of_a_prompt_stand_next_to_each_other():
    llm = tiny_llm()
    hot = dict(max_tokens=8, temperature=1.5, ignore_eos=True)
    outs = llm.generate([[4], [5]], [SamplingParams(n=3, seed=11, **hot), SamplingParams(n=2, **hot)])
    assert [o.prompt_token_ids for o in outs] == [(4,)] * 3 + [(5,)] * 2
    assert len({o.token_ids for o in outs}) == 5, "independent samples"
    alone = [tiny_llm().generate([4], SamplingParams(seed=11 + i, **hot))[0].token_ids for i in range(3)]
    assert [o.token_ids for o in outs[:3]] == alone, "sample i has seed + i"
    largest = SamplingParams(seed=2**63 - 1, **hot)
    assert llm.generate([4], largest)[0].token_ids == llm.generate([4], replace(largest, n=2))[0].token_ids


def test_the_same_prompt_twice_in_one_call_gives_two_results():
    outs = tiny_llm().generate([[4, 5], [4, 5]], SHORT)
    assert outs[0].token_ids == outs[1].token_ids == greedy([4, 5], 4) and outs[0].request_id != outs[1].request_id


def test_the_default_parameters_are_greedy():
    out = tiny_llm().generate([4, 5])[0]
    end = ending(reference().greedy([4, 5], MAX_LEN - 2), SamplingParams(), EOS, room=MAX_LEN - 2)
    assert (out.token_ids, out.finish_reason) == (end.token_ids, end.finish_reason)


# --- chat ---


def test_a_conversation_gives_one_result_and_a_list_of_them_several():
    llm = LLM(tiny_model(), tokenizer=ChatTokenizer(EOS), num_blocks=64, block_size=4)
    one = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    other = ({"role": "user", "content": "c"},)
    ids = [[2, 7, 3, 7], [8, 7]]
    assert [o.token_ids for o in llm.chat(one, SHORT)] == [greedy(ids[0], 4)]
    assert [o.token_ids for o in llm.chat([one, other], SHORT)] == [greedy(p, 4) for p in ids]
    assert "".join(llm.stream(one, SHORT)) == llm.chat(one, SHORT)[0].text
    assert one == [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    "messages", [[], "hello", None, {"role": "user", "content": "a"}, ["hello"], [[]], [[{"role": "user"}], 5]]
)
def test_what_is_no_conversation_is_refused(messages):
    llm = LLM(tiny_model(), tokenizer=ChatTokenizer(EOS), num_blocks=64)
    with pytest.raises(ValueError, match="role"):
        llm.chat(messages)
    assert_empty(llm)


def test_a_model_without_a_chat_template_says_so():
    for llm in (tiny_llm(), LLM(tiny_model(), tokenizer=FakeTokenizer(), num_blocks=64)):
        with pytest.raises(ValueError, match="no chat template"):
            llm.chat([{"role": "user", "content": "a"}])


# --- the object itself ---


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(tiny_model(), max_num_seq=3)
    with pytest.raises(ValueError, match="unknown option 'zzz'"):
        LLM(tiny_model(), zzz=3)


def test_a_transformer_given_to_llm_is_not_copied_and_not_changed():
    model = tiny_model()
    before = [t.clone() for t in model.buffers()]
    llm = LLM(model, num_blocks=20)
    assert llm.model is model
    llm.generate([[4, 5], [6]], SamplingParams(max_tokens=5, temperature=1.0))
    list(llm.stream([4], SHORT))
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_makes_a_copy_and_leaves_the_transformer_as_it_is(dtype):
    model = tiny_model()
    before = [t.clone() for t in model.buffers()]
    llm = LLM(model, dtype=dtype, num_blocks=20)
    assert llm.model is not model and str(llm.model.dtype) == f"torch.{dtype}"
    llm.generate([[4, 5]], SHORT)
    assert model.dtype == torch.float64 and all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def test_two_llms_over_one_transformer_are_independent():
    a, b = tiny_llm(max_num_seqs=1), tiny_llm(kv_cache="none")
    one, two = a.stream([4, 5], SHORT), b.stream([6], SHORT)
    got = [(x, y) for x, y in zip(one, two, strict=True)]
    assert tuple(x for x, _ in got) == greedy([4, 5], 4) and tuple(y for _, y in got) == greedy([6], 4)
    a.meter.reset()
    assert a.meter.steps == 0 and b.meter.steps == 4


def test_the_engine_says_what_it_chose():
    text = repr(tiny_llm(num_blocks=20, block_size=4, max_num_seqs=3))
    for part in ("tiny", "float64", "cpu", "20 blocks of 4 tokens", "num_blocks=20", "3 requests", f"{MAX_LEN} tokens"):
        assert part in text


@pytest.mark.parametrize("tokenizer, lacks", [("x", "decode, eos_token_ids"), (object(), "encode, decode, eos_token_ids")])
def test_what_is_no_tokenizer_is_refused_when_the_engine_is_built(tokenizer, lacks):
    with pytest.raises(ValueError, match=f"tokenizer must be None or a tokenizer, got .* which lacks {lacks}"):
        LLM(tiny_model(), tokenizer=tokenizer, num_blocks=8)
