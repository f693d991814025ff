"""Chat: the template's prompt, the roles, the shape of the pieces."""

from __future__ import annotations

from typing import Any

import pytest

from minillm import SamplingParams

from .conftest import ChatTokenizer, Served, served, tiny

TALK = [{"role": "system", "content": "ab"}, {"role": "user", "content": "xa"}]


def want(messages: list[dict[str, Any]], **params: Any) -> Any:
    return tiny().chat(messages, SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | params)))[0]


def ask(server: Served, messages: Any = TALK, **fields: Any) -> Any:
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}} | fields
    return server.client.chat.completions.create(messages=messages, **fields)


def test_an_answer_is_what_chat_gives(server: Served) -> None:
    got = ask(server)
    assert got.choices[0].message.content == want(TALK).text and got.choices[0].message.role == "assistant"
    assert got.object == "chat.completion" and got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (8, 12)


def test_a_stream_opens_with_the_role_and_its_pieces_make_up_the_text(server: Served) -> None:
    first, *rest = list(ask(server, stream=True))
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert "".join(p.choices[0].delta.content or "" for p in rest) == want(TALK).text
    assert rest[-1].choices[0].finish_reason == "length" and first.object == "chat.completion.chunk"


def test_several_samples_of_a_stream_are_told_apart_by_their_index(server: Served) -> None:
    texts = ["", ""]
    for piece in ask(server, n=2, temperature=1.0, seed=5, stream=True):
        texts[piece.choices[0].index] += piece.choices[0].delta.content or ""
    wants = tiny().chat([TALK], SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True))
    assert texts == [w.text for w in wants]


def test_max_completion_tokens_is_the_newer_name_of_max_tokens(server: Served) -> None:
    got = server.client.chat.completions.create(
        model="tiny", messages=TALK, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert got.usage.completion_tokens == 3


def test_without_a_limit_an_answer_may_fill_the_models_length() -> None:
    for engine, most in (({"max_model_len": 40}, 40 - 8), ({"num_blocks": 6}, 6 * 4 + 1 - 8)):
        with served(engine=engine) as server:
            got = server.client.chat.completions.create(
                model="tiny", messages=TALK, temperature=0, extra_body={"ignore_eos": True}
            )
            assert (got.usage.completion_tokens, got.choices[0].finish_reason) == (most, "length")


@pytest.mark.parametrize("messages", [
    [{"role": "developer", "content": "ab"}, {"role": "user", "content": "xa"}],
    [{"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, TALK[1]],
    [TALK[0], {"role": "user", "content": "xa", "name": None, "tool_calls": []}],
])  # fmt: skip
def test_other_ways_to_write_the_same_conversation(server: Served, messages: Any) -> None:
    assert ask(server, messages).choices[0].message.content == want(TALK).text


def test_an_answer_can_be_sent_back_as_it_came(server: Served) -> None:
    answer = ask(server, max_tokens=2, extra_body={"stop_token_ids": [9]})
    again = [*TALK, answer.choices[0].message.model_dump() | {"content": "ab"}, {"role": "user", "content": "x"}]
    plain = [*TALK, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "x"}]
    assert ask(server, again).choices[0].message.content == want(plain).text


def test_logprobs_name_every_token_and_the_most_likely_ones(server: Served) -> None:
    expected = want(TALK, logprobs=3)
    content = ask(server, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [c.logprob for c in content] == [lp[t] for lp, t in zip(expected.logprobs, expected.token_ids)]
    assert [len(c.top_logprobs) for c in content] == [3] * 12
    assert all(c.top_logprobs == sorted(c.top_logprobs, key=lambda t: -t.logprob) for c in content)
    spell = ChatTokenizer().decode
    assert [c.token for c in content] == [spell([t]) for t in expected.token_ids]
    assert all(bytes(c.bytes).decode() == c.token for c in content if c.bytes is not None)
    streamed = [t for p in ask(server, logprobs=True, top_logprobs=3, stream=True) if p.choices[0].logprobs
                for t in p.choices[0].logprobs.content]
    assert streamed == content


def test_logprobs_without_top_logprobs_name_the_chosen_token_only(server: Served) -> None:
    content = ask(server, logprobs=True).choices[0].logprobs.content
    assert len(content) == 12 and all(c.top_logprobs == [] for c in content)
