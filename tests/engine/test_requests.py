"""What the engine accepts, what it refuses, and that a refusal or an interrupt changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minillm import SamplingParams

from ..strategies import VOCAB, FakeTokenizer, WatchedAttention, greedy, run_to_end, tiny_engine

THREE = SamplingParams(max_tokens=3, ignore_eos=True)


# --- token ids ---


@pytest.mark.parametrize(
    "prompt",
    [
        [4, 5, 6],
        (4, 5, 6),
        range(4, 7),
        np.array([4, 5, 6]),
        np.array([4, 5, 6], dtype=np.uint8),
        [np.int32(4), np.int64(5), 6],
        torch.tensor([4, 5, 6]),
        (t for t in [4, 5, 6]),
    ],
    ids=lambda p: type(p).__name__,
)
def test_any_sequence_of_whole_numbers_is_a_prompt(prompt):
    engine = tiny_engine()
    name = engine.add_request(prompt, THREE)
    out = run_to_end(engine)[name]
    assert out.token_ids == greedy([4, 5, 6], 3) and out.prompt_token_ids == (4, 5, 6)
    assert all(type(t) is int for t in (*out.token_ids, *out.prompt_token_ids))


@pytest.mark.parametrize(
    "prompt, named",
    [
        ([4, True], "True"),
        ([4, np.True_], "True"),
        ([4, 5.0], "5.0"),
        (np.array([4.5]), "4.5"),
        ([4] * 30 + [None], "None"),
        ([4, "a"], "'a'"),
        ([[4, 5]], r"\[4, 5\]"),
        ([-1], "-1"),
        ([4, VOCAB], f"{VOCAB}"),
        ([2**70], f"{2**70}"),
        (b"ab", "b'ab'"),
        (7, "7"),
        (None, "None"),
        ({"role": "user"}, "role"),
        ([], "no tokens"),
        (np.array([]), "no tokens"),
        ("", "empty string"),
        ("text", "no tokenizer.*'text'"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name_and_changes_nothing(prompt, named):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=named):
        engine.add_request(prompt, THREE)
    assert not engine.has_work and engine.step() == []
    name = engine.add_request([4], THREE)
    assert run_to_end(engine)[name].token_ids == greedy([4], 3)


def test_ids_that_only_the_tokenizer_knows_are_refused():
    engine = tiny_engine(tokenizer=FakeTokenizer(pieces=[b"?"] * VOCAB + [b"z"]))
    with pytest.raises(ValueError, match=f"{VOCAB} is outside the vocabulary of {VOCAB}"):
        engine.add_request("z", THREE)


def test_the_callers_prompt_is_never_changed():
    engine, prompt = tiny_engine(), [4, 5, 6]
    engine.add_request(prompt, THREE)
    prompt_during = list(prompt)
    run_to_end(engine)
    assert prompt == prompt_during == [4, 5, 6]
    name = engine.add_request(prompt, THREE)
    prompt.append(9)  # nor does the engine follow the caller's changes
    assert run_to_end(engine)[name].token_ids == greedy([4, 5, 6], 3)


# --- parameters and ids ---


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"n": 0}, "n .*0"),
        ({"n": 1.0}, "n .*1.0"),
        ({"max_tokens": 0}, "max_tokens .*0"),
        ({"max_tokens": True}, "max_tokens .*True"),
        ({"temperature": -0.1}, "temperature .*-0.1"),
        ({"temperature": float("nan")}, "temperature .*nan"),
        ({"temperature": float("inf")}, "temperature .*inf"),
        ({"temperature": "hot"}, "temperature .*hot"),
        ({"top_k": -1}, "top_k .*-1"),
        ({"top_p": 0}, "top_p .*0"),
        ({"top_p": 1.1}, "top_p .*1.1"),
        ({"seed": -1}, "seed .*-1"),
        ({"seed": 2**63}, "seed .*9223372036854775808"),
        ({"logprobs": -1}, "logprobs .*-1"),
        ({"logprobs": 101}, "logprobs .*100.*101"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [5]}, "stop .*5"),
        ({"stop": 5}, "stop .*5"),
        ({"stop_token_ids": 5}, "stop_token_ids .*5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids .*-1"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids .*1.5"),
        ({"ignore_eos": 1}, "ignore_eos .*1"),
    ],
)
def test_parameters_outside_their_limits_are_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        SamplingParams(**fields)


def test_numpy_numbers_are_kept_as_pythons_own():
    params = SamplingParams(max_tokens=np.uint8(200), seed=np.int64(3), top_k=np.int32(2), stop_token_ids=np.array([4, 5]))
    assert (params.max_tokens, params.seed, params.top_k, params.stop_token_ids) == (200, 3, 2, (4, 5))
    assert all(type(v) is int for v in (params.max_tokens, params.seed, params.top_k, *params.stop_token_ids))
    engine = tiny_engine(num_blocks=100)
    name = engine.add_request([5] * 20, SamplingParams(max_tokens=np.uint8(250), ignore_eos=True))
    assert len(run_to_end(engine)[name].token_ids) == 28


def test_parameters_are_equal_by_value_and_can_be_dictionary_keys():
    a, b = SamplingParams(stop=["x"], stop_token_ids=[3]), SamplingParams(stop=("x",), stop_token_ids=(3,))
    assert a == b and hash(a) == hash(b) and SamplingParams(stop="x").stop == ("x",)


@pytest.mark.parametrize("params", [{}, {"max_tokens": 3}, "greedy", 3, [SamplingParams()]])
def test_parameters_of_another_type_are_refused(params):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=f"SamplingParams, got {type(params).__name__}"):
        engine.add_request([4], params)


def test_stop_ids_outside_the_vocabulary_and_stop_strings_without_a_tokenizer_are_refused():
    engine = tiny_engine()
    with pytest.raises(ValueError, match=rf"\[{VOCAB}\] .* {VOCAB}"):
        engine.add_request([4], SamplingParams(stop_token_ids=[3, VOCAB]))
    with pytest.raises(ValueError, match="need a tokenizer"):
        engine.add_request([4], SamplingParams(stop="a"))


@pytest.mark.parametrize("where", ["waiting", "running", "ended, its last output not yet delivered"])
def test_an_id_in_use_is_refused_and_the_engine_still_works(where):
    engine = tiny_engine()
    engine.add_request([4], SamplingParams(max_tokens=2, ignore_eos=True), "mine")
    outputs = []
    for _ in range({"waiting": 0, "running": 1}.get(where, 2)):
        outputs = engine.step()
    if where.startswith("ended"):
        engine.hold(outputs)
    with pytest.raises(ValueError, match="'mine' is in use"):
        engine.add_request([5], THREE, "mine")
    assert run_to_end(engine)["mine"].token_ids == greedy([4], 2)
    assert engine.add_request([5], THREE, "mine") == "mine", "an id is free again when its request has ended"
    assert run_to_end(engine)["mine"].token_ids == greedy([5], 3)


@pytest.mark.parametrize("name", ["", 5, b"a", None.__class__])
def test_an_id_is_a_non_empty_string(name):
    with pytest.raises(ValueError, match="request_id"):
        tiny_engine().add_request([4], THREE, name)


def test_generated_ids_avoid_those_that_callers_chose():
    engine = tiny_engine()
    mine = [engine.add_request([4], THREE, f"request-{i}") for i in (0, 1, 3)]
    others = [engine.add_request([5], THREE) for _ in range(3)]
    assert len({*mine, *others}) == 6 and len(run_to_end(engine)) == 6


# --- outputs ---


def test_the_same_prompt_twice_gives_two_results():
    engine = tiny_engine()
    a, b = engine.add_request([4, 5], THREE), engine.add_request([4, 5], THREE)
    done = run_to_end(engine)
    assert a != b and done[a].token_ids == done[b].token_ids == greedy([4, 5], 3)


def test_every_step_reports_each_request_that_got_a_token_once():
    engine = tiny_engine()
    name = engine.add_request([4], THREE)
    lengths = [[len(o.token_ids) for o in engine.step()] for _ in range(3)]
    assert lengths == [[1], [2], [3]] and engine.step() == [] and not engine.has_work
    assert engine.abort(name) is None


def test_outputs_handed_back_come_again_first_and_once():
    engine = tiny_engine()
    engine.add_request([4], THREE)
    first = engine.step()
    engine.hold(first)
    second = engine.step()
    assert second[0] is first[0] and [len(o.token_ids) for o in second] == [1, 2]
    engine.hold(second)
    third = engine.step()
    assert [len(o.token_ids) for o in third] == [1, 2, 3]
    engine.hold(third)
    assert engine.has_work, "somebody's output is still to be fetched"
    assert [len(o.token_ids) for o in engine.step()] == [1, 2, 3] and not engine.has_work


def test_an_abort_returns_all_that_was_not_yet_delivered():
    engine = tiny_engine(tokenizer=FakeTokenizer())
    name = engine.add_request([4], SamplingParams(max_tokens=6, ignore_eos=True))
    shown = "".join(o.delta for o in engine.step())
    engine.hold(engine.step())
    engine.hold(engine.step())
    out = engine.abort(name)
    assert out.finish_reason == "abort" and out.token_ids == greedy([4], 3) and shown + out.delta == out.text
    assert engine.step() == [] and not engine.has_work and engine.cache.pool.num_referenced == 0


def test_aborting_a_request_that_ended_unseen_returns_its_last_output():
    engine = tiny_engine()
    name = engine.add_request([4], SamplingParams(max_tokens=1, ignore_eos=True))
    engine.hold(engine.step())
    assert engine.abort(name).finish_reason == "length"
    assert engine.abort(name) is None and not engine.has_work


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
@pytest.mark.parametrize("options", [{}, {"kv_cache": "none"}, {"batching": "static"}, {"max_num_batched_tokens": 2}])
def test_a_step_that_raises_can_be_taken_again(error, options):
    backend = WatchedAttention()
    engine = tiny_engine(attention_backend=backend, **options)
    names = {engine.add_request([t, 4], SamplingParams(max_tokens=4, ignore_eos=True)): [t, 4] for t in (5, 6, 7)}
    kept, outputs = {}, 0
    while engine.has_work:
        backend.error = error
        with pytest.raises(type(error)):
            engine.step()
        for o in engine.step():
            kept[o.request_id], outputs = o, outputs + 1
    assert {n: o.token_ids for n, o in kept.items()} == {n: greedy(p, 4) for n, p in names.items()} and outputs == 12


def test_a_step_that_raises_loses_no_output_that_was_handed_back():
    backend = WatchedAttention()
    engine = tiny_engine(attention_backend=backend)
    engine.add_request([4], THREE)
    held = engine.step()
    engine.hold(held)
    backend.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.step()[0] is held[0]
