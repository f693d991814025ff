"""What is refused, how it is worded, and that refusing changes nothing."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.server.options import ServerOptions

from .conftest import Served, eventually, served

BASE = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}


def says(content: Any) -> dict[str, Any]:
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    return content["error"]


@pytest.mark.parametrize("changes, param, words", [
    ({"presence_penalty": 0.5}, "presence_penalty", ["0.5", "only 0"]),
    ({"frequency_penalty": -1}, "frequency_penalty", ["-1", "only 0"]),
    ({"logit_bias": {"5": 10}}, "logit_bias", ["{}"]),
    ({"best_of": 3}, "best_of", ["3", "only 1"]),
    ({"echo": True}, "echo", ["True", "only False"]),
    ({"echo": 1}, "echo", ["1"]),
    ({"suffix": "x"}, "suffix", ["'x'"]),
    ({"temprature": 1}, "temprature", ["did you mean 'temperature'"]),
    ({"whatever": 1}, "whatever", ["unknown field"]),
    ({"temperature": -0.5}, "temperature", ["-0.5", "at least 0"]),
    ({"temperature": "hot"}, "temperature", ["'hot'", "number"]),
    ({"top_p": 0}, "top_p", ["0.0", "above 0"]),
    ({"top_p": 1.5}, "top_p", ["1.5", "at most 1"]),
    ({"max_tokens": 0}, "max_tokens", ["0", "at least 1"]),
    ({"max_tokens": 2.5}, "max_tokens", ["2.5", "integer"]),
    ({"max_tokens": True}, "max_tokens", ["True", "integer"]),
    ({"n": 0}, "n", ["0", "from 1"]),
    ({"n": 129}, "n", ["129", "limit is 128"]),
    ({"prompt": ["a"] * 65, "n": 2}, "n", ["65 prompts", "130 samples", "128"]),
    ({"seed": -1}, "seed", ["-1", "from 0"]),
    ({"seed": 2**63}, "seed", [str(2**63), str(2**63 - 1)]),
    ({"logprobs": 21}, "logprobs", ["21", "20"]),
    ({"logprobs": True}, "logprobs", ["True"]),
    ({"stop": ["a"] * 17}, "stop", ["17", "16"]),
    ({"stop": "a" * 257}, "stop", ["257", "256"]),
    ({"stop": [1]}, "stop", ["[1]"]),
    ({"stop": ""}, "stop", ["non-empty"]),
    ({"stop_token_ids": [99]}, "stop_token_ids", ["99", "32"]),
    ({"stream_options": {"include_usage": True}}, "stream_options", ["stream=true"]),
    ({"prompt": ""}, "prompt", ["empty"]),
    ({"prompt": []}, "prompt", ["[]"]),
    ({"prompt": [[]]}, "prompt", ["[[]]"]),
    ({"prompt": [1, "a"]}, "prompt", ["[1, 'a']"]),
    ({"prompt": [[1], 2]}, "prompt", ["[[1], 2]"]),
    ({"prompt": [True]}, "prompt", ["[True]"]),
    ({"prompt": {"a": 1}}, "prompt", ["{'a': 1}"]),
    ({"prompt": [1, 32]}, "prompt", ["32", "vocabulary"]),
    ({"prompt": [-1]}, "prompt", ["-1"]),
    ({"prompt": [5] * 512}, "prompt", ["512", "511"]),
    ({"prompt": None}, "prompt", ["missing"]),
    ({"model": None}, "model", ["missing"]),
    ({"model": 5}, "model", ["5", "string"]),
])  # fmt: skip
def test_a_completion_that_cannot_be_is_a_400_that_names_field_value_and_limit(
    server: Served, changes: dict[str, Any], param: str, words: list[str]
) -> None:
    status, _, content = server.call("POST", "/v1/completions", BASE | changes)
    error = says(content)
    assert status == 400 and error["type"] == "invalid_request_error" and error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]
    assert server.empty and server.gate.steps == 0


@pytest.mark.parametrize("changes, param, words", [
    ({"messages": []}, "messages", ["at least 1"]),
    ({"messages": [{"role": "user"}]}, "messages.0.content", ["missing"]),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", ["'tool'", "assistant"]),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages",
     ["'image_url'", "'text'"]),
    ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages", ["name", "'Ann'"]),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages", ["tool_calls"]),
    ({"tools": [{"type": "function"}]}, "tools", ["only []"]),
    ({"tool_choice": "required"}, "tool_choice", ["'required'", "'none'"]),
    ({"response_format": {"type": "json_object"}}, "response_format", ["json_object", "text"]),
    ({"modalities": ["audio"]}, "modalities", ["audio"]),
    ({"reasoning_effort": "high"}, "reasoning_effort", ["'high'"]),
    ({"top_logprobs": 2}, "top_logprobs", ["2", "logprobs=true"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "20"]),
    ({"logprobs": 2}, "logprobs", ["2", "boolean"]),
    ({"max_completion_tokens": 3}, "max_tokens", ["2", "3", "disagree"]),
    ({"prompt": "x"}, "prompt", ["unknown field"]),
])  # fmt: skip
def test_a_chat_that_cannot_be_is_a_400_too(
    server: Served, changes: dict[str, Any], param: str, words: list[str]
) -> None:
    status, _, content = server.call("POST", "/v1/chat/completions", CHAT | changes)
    error = says(content)
    assert status == 400 and (error["param"] or "").startswith(param), error
    assert all(word in error["message"] for word in words), error["message"]


@pytest.mark.parametrize("changes", [
    {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "best_of": 1, "echo": False, "suffix": None},
    {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "logprobs": None, "stop": None, "seed": None},
    {"n": 2, "best_of": 2},
])  # fmt: skip
def test_values_that_ask_for_nothing_are_accepted(server: Served, changes: dict[str, Any]) -> None:
    status, _, content = server.call("POST", "/v1/completions", BASE | changes)
    assert status == 200, content


@pytest.mark.parametrize("body, words", [
    (b"", "JSON object"), (b"{", "not JSON"), (b"[]", "JSON object"), (b"5", "JSON object"), (b'"x"', "JSON object"),
    (b"\xff\xfe", "body"), (b'{"model": "tiny", "prompt": "\\ud800"}', "surrogate"),
    (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "finite"),
    (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "body"),
    (b"[" * 100_000, "body"),
])  # fmt: skip
def test_a_body_that_is_no_request_is_a_400(server: Served, body: bytes, words: str) -> None:
    status, _, content = server.call("POST", "/v1/completions", body)
    assert status == 400 and words in says(content)["message"], content


def test_a_form_is_not_json(server: Served) -> None:
    headers = {"Content-Type": "text/plain"}
    status, _, content = server.call("POST", "/v1/completions", BASE, headers)
    assert status == 400 and "Content-Type" in says(content)["message"]


def test_another_model_is_a_404_and_so_is_another_path(server: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="'other'.*'tiny'") as caught:
        server.client.completions.create(model="other", prompt="abc")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")
    status, _, content = server.call("GET", "/v1/nothing")
    assert status == 404 and "/v1/nothing" in says(content)["message"]
    status, headers, content = server.call("GET", "/v1/completions")
    assert status == 405 and "GET" in says(content)["message"]


def test_the_models_are_one(server: Served) -> None:
    (model,) = server.client.models.list().data
    assert model.id == "tiny" and model == server.client.models.retrieve("tiny") and model.max_model_len == 512


def test_an_api_key_is_asked_for_under_v1_only() -> None:
    with served(api_key="s3cret") as server:
        assert server.client.models.list().data[0].id == "tiny"
        for header in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"},
                       {"Authorization": "Bearer s3cret2"}, {"Authorization": "s3cret"}, {"Authorization": "Bearer s3cre\xe9"}):
            for method, path, body in (("GET", "/v1/models", None), ("POST", "/v1/completions", BASE), ("GET", "/v1/no", None)):
                status, _, content = server.call(method, path, body, header)
                assert status == 401 and says(content)["code"] == "invalid_api_key" and "s3cret" not in str(content)
        assert server.call("GET", "/health")[0] == 200 and server.call("GET", "/metrics")[0] == 200
        assert server.metric("minillm_requests_refused_total", status="401") == 21


def test_a_body_above_the_limit_is_a_413_whether_its_length_is_stated_or_not() -> None:
    with served(max_body_bytes=1000) as server:
        fits = json.dumps(BASE).encode()
        fits += b" " * (1000 - len(fits))
        assert server.call("POST", "/v1/completions", fits)[0] == 200
        status, _, content = server.call("POST", "/v1/completions", fits + b" ")
        assert status == 413 and "1001" in says(content)["message"] and "1000" in says(content)["message"]
        connection = server.connect()
        connection.request("POST", "/v1/completions", iter([b" " * 600] * 3), encode_chunked=True,
                           headers={"Transfer-Encoding": "chunked", "Content-Type": "application/json"})  # fmt: skip
        assert connection.getresponse().status == 413
        connection.close()


def test_a_body_that_does_not_come_is_given_up() -> None:
    with served(body_seconds=0.05) as server:
        where = server.connect()
        with socket.create_connection((where.host, where.port), timeout=60) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            answer = http.client.HTTPResponse(raw)
            answer.begin()
            assert answer.status == 408 and "0.05 s" in json.loads(answer.read())["error"]["message"]


def test_a_client_that_leaves_while_it_sends_leaves_nothing(server: Served) -> None:
    where = server.connect()
    with socket.create_connection((where.host, where.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    eventually(lambda: not server.running.server.server_state.tasks)
    assert server.empty


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6,
)  # fmt: skip
FIELDS = ["model", "prompt", "n", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop", "top_k",
          "stop_token_ids", "logprobs", "echo", "best_of", "logit_bias", "tools", "messages", "return_token_ids"]  # fmt: skip


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3), st.sampled_from(["completions", "chat/completions"]))
def test_no_body_brings_the_server_down(server: Served, changes: dict[str, Any], route: str) -> None:
    base = BASE if route == "completions" else CHAT
    status, _, content = server.call("POST", f"/v1/{route}", base | changes)
    assert status in (200, 400, 404), content
    if status != 200:
        assert says(content)["message"]


@pytest.mark.parametrize("options, words", [
    ({"port": 70_000}, ["port", "65535", "70000"]), ({"port": True}, ["port"]), ({"max_waiting": -1}, ["max_waiting", "-1"]),
    ({"max_choices": 0}, ["max_choices", "0"]), ({"api_key": ""}, ["api_key"]),
    ({"api_key": "secret\n"}, ["api_key", "spaces"]), ({"api_key": "clé"}, ["api_key", "ASCII"]),
    ({"api_key": "a\0b"}, ["api_key"]), ({"host": ""}, ["host"]),
    ({"max_body_bytes": 0}, ["max_body_bytes"]), ({"grace_seconds": -1}, ["grace_seconds", "-1"]),
    ({"stall_seconds": 0}, ["stall_seconds", "0.001"]), ({"body_seconds": float("nan")}, ["body_seconds", "nan"]),
])  # fmt: skip
def test_options_outside_their_limits_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        ServerOptions(**options)
    assert all(word in str(caught.value) for word in words)
