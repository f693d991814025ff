"""What comes over HTTP is what LLM.generate gives, whole or in pieces."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import SamplingParams

from ..strategies import prompts
from .conftest import Served, direct, served, tiny

LONG = {"ignore_eos": True}


def pieces(stream: Any) -> list[Any]:
    return list(stream)


def test_a_completion_is_what_generate_gives(server: Served) -> None:
    (want,) = direct("abc", SamplingParams(max_tokens=20, ignore_eos=True))
    got = server.client.completions.create(model="tiny", prompt="abc", max_tokens=20, temperature=0, extra_body=LONG)
    assert (got.choices[0].text, got.choices[0].finish_reason) == (want.text, want.finish_reason)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (3, 20, 23)
    assert got.object == "text_completion" and got.model == "tiny" and got.id.startswith("cmpl-")


def test_sixteen_tokens_are_the_default_of_a_completion(server: Served) -> None:
    got = server.client.completions.create(model="tiny", prompt="abc", temperature=0, extra_body=LONG)
    assert got.usage.completion_tokens == 16


def test_the_pieces_of_a_stream_make_up_the_text_and_the_last_one_says_why_it_ended(server: Served) -> None:
    (want,) = direct("abc", SamplingParams(max_tokens=20, ignore_eos=True))
    stream = server.client.completions.create(
        model="tiny", prompt="abc", max_tokens=20, temperature=0, stream=True, extra_body=LONG
    )
    got = pieces(stream)
    assert "".join(p.choices[0].text for p in got) == want.text and len(got) > 3
    assert [p.choices[0].finish_reason for p in got] == [None] * (len(got) - 1) + ["length"]
    assert len({p.id for p in got}) == 1 and all(p.usage is None for p in got)


def test_usage_comes_behind_the_last_piece_when_it_is_asked_for(server: Served) -> None:
    stream = server.client.completions.create(
        model="tiny", prompt=["abc", "x"], n=2, max_tokens=5, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body=LONG,
    )  # fmt: skip
    *others, last = pieces(stream)
    assert last.choices == [] and (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 20)
    assert all(p.usage is None and p.choices for p in others)


def test_the_raw_stream_is_events_that_end_with_done(server: Served) -> None:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 3, "stream": True}
    status, headers, content = server.call("POST", "/v1/completions", body)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = content.split(b"\n\n")
    assert events.pop() == b"" and events[-1] == b"data: [DONE]" and all(e.startswith(b"data: {") for e in events[:-1])


@pytest.mark.parametrize("prompt, each", [
    ("abc", ["abc"]), ([2, 3], [[2, 3]]), (["abc", "x"], ["abc", "x"]), ([[2, 3], [4]], [[2, 3], [4]]), (["ab"], ["ab"]),
])  # fmt: skip
def test_a_prompt_is_text_or_token_ids_or_a_list_of_these(server: Served, prompt: Any, each: list[Any]) -> None:
    wants = direct(each, SamplingParams(max_tokens=6))
    got = server.client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
    assert [c.text for c in got.choices] == [w.text for w in wants]
    assert [c.index for c in got.choices] == list(range(len(each)))


def test_n_samples_of_each_prompt_stand_next_to_each_other_and_a_seed_repeats_them(server: Served) -> None:
    wants = direct(["abc", "x"], SamplingParams(n=3, max_tokens=8, temperature=0.9, top_p=0.8, seed=7))
    ask = dict(model="tiny", prompt=["abc", "x"], n=3, max_tokens=8, temperature=0.9, top_p=0.8, seed=7)
    whole = server.client.completions.create(**ask)
    assert [c.text for c in whole.choices] == [w.text for w in wants]
    texts = [""] * 6
    for piece in server.client.completions.create(**ask, stream=True):
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [w.text for w in wants]


def test_top_k_of_one_is_greedy_at_any_temperature(server: Served) -> None:
    (want,) = direct("abc", SamplingParams(max_tokens=8))
    got = server.client.completions.create(model="tiny", prompt="abc", max_tokens=8, temperature=5, extra_body={"top_k": 1})
    assert got.choices[0].text == want.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_in_neither_the_text_nor_any_piece(server: Served, stream: bool) -> None:
    free = direct("abc", SamplingParams(max_tokens=40, ignore_eos=True))[0].text
    stop = free[5:7]
    (want,) = direct("abc", SamplingParams(max_tokens=40, ignore_eos=True, stop=stop))
    got = server.client.completions.create(
        model="tiny", prompt="abc", max_tokens=40, temperature=0, stop=[stop], stream=stream, extra_body=LONG
    )
    choices = [p.choices[0] for p in got] if stream else got.choices
    assert "".join(c.text for c in choices) == want.text and choices[-1].finish_reason == "stop" and stop not in want.text


def test_a_stop_token_ends_the_text(server: Served) -> None:
    (free,) = direct("abc", SamplingParams(max_tokens=20, ignore_eos=True))
    stop = free.token_ids[4]
    (want,) = direct("abc", SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[stop]))
    got = server.client.completions.create(
        model="tiny", prompt="abc", max_tokens=20, temperature=0,
        extra_body=LONG | {"stop_token_ids": [stop], "return_token_ids": True},
    )  # fmt: skip
    assert tuple(got.choices[0].token_ids) == want.token_ids and got.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("cut", [None, slice(6, 7), slice(6, 8), slice(6, 9)])
def test_streamed_logprobs_are_those_of_the_whole_answer(server: Served, cut: slice | None) -> None:
    # a stop string of several tokens is held back while it may still come, and what was told is never taken back
    free = direct("abc", SamplingParams(max_tokens=30, ignore_eos=True))[0].text
    stop = None if cut is None else free[cut]
    ask = dict(model="tiny", prompt="abc", max_tokens=30, temperature=0, logprobs=2, stop=stop)
    extra = LONG | {"return_token_ids": True}
    whole = server.client.completions.create(**ask, extra_body=extra).choices[0]
    parts = [p.choices[0] for p in server.client.completions.create(**ask, stream=True, extra_body=extra)]
    (want,) = direct("abc", SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2, stop=stop or ()))
    assert tuple(whole.token_ids) == want.token_ids == tuple(t for p in parts for t in p.token_ids)
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        told = [x for p in parts if p.logprobs for x in getattr(p.logprobs, field)]
        assert told == getattr(whole.logprobs, field) and len(told) == len(want.token_ids)
    assert whole.logprobs.token_logprobs == [lp[t] for lp, t in zip(want.logprobs, want.token_ids)]
    assert all(len(top) in (1, 2, 3) for top in whole.logprobs.top_logprobs)


def test_logprobs_of_zero_report_the_chosen_tokens_only(server: Served) -> None:
    got = server.client.completions.create(model="tiny", prompt="abc", max_tokens=4, temperature=0, logprobs=0)
    assert got.choices[0].logprobs.top_logprobs is None and len(got.choices[0].logprobs.tokens) == len(
        got.choices[0].logprobs.token_logprobs
    )


def test_a_model_without_a_tokenizer_serves_token_ids() -> None:
    (want,) = tiny(None).generate([[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True))
    with served(None) as server:
        ask = dict(model="tiny", prompt=[5, 6, 7], max_tokens=9, temperature=0, extra_body=LONG | {"return_token_ids": True})
        got = server.client.completions.create(**ask)
        parts = pieces(server.client.completions.create(**ask, stream=True))
    assert tuple(got.choices[0].token_ids) == want.token_ids == tuple(t for p in parts for t in p.choices[0].token_ids)


@settings(max_examples=12)
@given(st.lists(st.tuples(prompts, st.integers(1, 16), st.booleans()), min_size=1, max_size=8))
def test_clients_side_by_side_get_what_each_gets_alone(server: Served, work: list[tuple[list[int], int, bool]]) -> None:
    wants = [direct([p], SamplingParams(max_tokens=n, ignore_eos=True))[0].text for p, n, _ in work]
    got: dict[int, str] = {}

    def ask(i: int) -> None:
        prompt, n, stream = work[i]
        answer = server.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=n, temperature=0, stream=stream, extra_body=LONG
        )
        got[i] = "".join(p.choices[0].text for p in answer) if stream else answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(work))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[i] for i in range(len(work))] == wants
