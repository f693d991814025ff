"""Streams: as they grow, abandoned, interleaved with each other and with other calls; and calls that are interrupted."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import LLM, SamplingParams

from ..strategies import (
    EOS,
    VOCAB,
    FakeTokenizer,
    WatchedAttention,
    assert_empty,
    greedy,
    scripted_llm,
    tiny_llm,
    tiny_model,
    watched,
)

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


# --- stream ---


def test_a_stream_without_a_tokenizer_yields_the_token_ids():
    llm = tiny_llm()
    assert tuple(llm.stream([4, 5], SHORT)) == greedy([4, 5], 4)
    assert_empty(llm)


@settings(max_examples=25)
@given(st.lists(st.integers(2, 31), min_size=1, max_size=6), st.lists(st.sampled_from(["a", "ab", "€", " "]), max_size=2))
def test_streamed_text_equals_generated_text_in_pieces_that_are_never_empty(prompt, stop):
    llm = LLM(tiny_model(), tokenizer=FakeTokenizer(EOS), num_blocks=64, block_size=4)
    params = SamplingParams(max_tokens=12, stop=stop)
    pieces = list(llm.stream(prompt, params))
    assert "".join(pieces) == llm.generate([prompt], params)[0].text and all(pieces)
    assert_empty(llm)


def test_a_stream_shows_text_as_it_grows():
    llm = scripted_llm("a", "b", "c")
    stream = llm.stream("?", SamplingParams(max_tokens=3))
    with watched(llm.model) as batches:
        assert next(stream) == "a" and len(batches) == 1
        assert next(stream) == "b" and len(batches) == 2


@pytest.mark.parametrize(
    "prompt, params, named",
    [
        ([], SHORT, "no tokens"),
        ([VOCAB], SHORT, "32"),
        ([4], SamplingParams(n=2), "n=2"),
        ([4], {}, "params"),
        ([[4], [5]], SHORT, "4"),
    ],
)
def test_a_bad_stream_is_refused_when_it_is_asked_for_not_when_it_is_read(prompt, params, named):
    llm = tiny_llm()
    with pytest.raises(ValueError, match=named):
        llm.stream(prompt, params)
    assert_empty(llm)


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("how", ["close", "forget", "break"])
def test_an_abandoned_stream_frees_its_blocks(taken, how):
    llm = tiny_llm()
    stream = llm.stream([4, 5], SamplingParams(max_tokens=9, ignore_eos=True))
    if how == "break":
        for i, _ in enumerate(stream):
            if i >= taken:
                break
    else:
        for _ in range(taken):
            next(stream)
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    assert_empty(llm)


def test_an_exception_in_the_loop_over_a_stream_frees_its_blocks():
    llm = tiny_llm()
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.stream([4], SHORT):
            raise KeyboardInterrupt
    gc.collect()
    assert_empty(llm)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 1), max_size=30), st.integers(1, 9), st.integers(1, 9))
def test_two_interleaved_streams_each_give_their_own_tokens(turns, n, m):
    """Whichever is read steps the engine for both; what belongs to the other waits for it."""
    llm = tiny_llm()
    prompts, lengths = ([4, 5], [6]), (n, m)
    streams = [llm.stream(p, SamplingParams(max_tokens=k, ignore_eos=True)) for p, k in zip(prompts, lengths, strict=True)]
    got: list[list[int]] = [[], []]
    for i in turns:
        got[i] += [t for t in [next(streams[i], None)] if t is not None]
    for i in (0, 1):
        got[i] += list(streams[i])
        assert tuple(got[i]) == greedy(prompts[i], lengths[i])
    assert_empty(llm)


def test_a_stream_abandoned_while_another_is_read_leaves_no_output_behind():
    llm = tiny_llm()
    a, b = llm.stream([4], SHORT), llm.stream([5], SHORT)
    next(a), next(b)
    rest = list(b)  # the engine now holds outputs of a
    a.close()
    assert len(rest) == 3
    assert_empty(llm)


def test_generate_while_a_stream_is_open_disturbs_neither():
    llm = tiny_llm()
    stream = llm.stream([4, 5], SamplingParams(max_tokens=8, ignore_eos=True))
    got = [next(stream)]
    assert llm.generate([[6], [7]], SHORT)[1].token_ids == greedy([7], 4)
    assert tuple(got + list(stream)) == greedy([4, 5], 8)
    assert_empty(llm)


def test_a_request_added_by_hand_gets_all_its_outputs_although_generate_ran_between():
    llm = tiny_llm()
    name = llm.engine.add_request([4], SHORT)
    llm.generate([5], SHORT)
    outs = [o for _ in range(4) for o in llm.engine.step()]
    assert [len(o.token_ids) for o in outs if o.request_id == name] == [1, 2, 3, 4] and outs[-1].token_ids == greedy([4], 4)
    assert_empty(llm)


def test_a_stream_whose_request_somebody_else_aborted_ends():
    llm = tiny_llm()
    stream = llm.stream([4], SHORT)
    next(stream)
    (request,) = llm.engine.scheduler.running
    llm.engine.abort(request.request_id)
    assert list(stream) == []
    assert_empty(llm)


# --- interrupts ---


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory")])
@pytest.mark.parametrize("options", [{}, {"batching": "static"}, {"kv_cache": "none"}, {"max_num_seqs": 1}])
def test_an_interrupt_in_the_middle_of_generate_leaves_no_request_behind_and_the_engine_usable(error, options):
    backend = WatchedAttention()
    llm = tiny_llm(attention_backend=backend, **options)
    for steps in (0, 2):
        backend.fail_after(steps, error)
        with pytest.raises(type(error)):
            llm.generate([[4, 5], [6], [7]], SHORT)
        assert_empty(llm)
        assert [o.token_ids for o in llm.generate([[4, 5], [6]], SHORT)] == [greedy([4, 5], 4), greedy([6], 4)]


def test_an_interrupted_generate_loses_nothing_of_an_open_stream():
    backend = WatchedAttention()
    llm = tiny_llm(attention_backend=backend)
    stream, other = llm.stream([4, 5], SHORT), llm.stream([6], SHORT)
    got = [next(stream), next(other)]  # the second one holds a token of the first
    backend.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([7], SHORT)
    assert (got[0], *stream) == greedy([4, 5], 4) and (got[1], *other) == greedy([6], 4)
    assert_empty(llm)


def test_an_interrupt_while_requests_are_added_leaves_none_behind(monkeypatch):
    llm = tiny_llm()
    add = llm.engine.add_request

    def interrupted(prompt, *rest, **options):
        if list(prompt) == [6]:
            raise KeyboardInterrupt
        return add(prompt, *rest, **options)

    monkeypatch.setattr(llm.engine, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[4], [5], [6]], SHORT)
    assert_empty(llm)
