"""The engine's thread: faults, overload, clients that leave or stop reading, and the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Iterator

import openai
import pytest

from minillm import SamplingParams
from minillm.server.serve import Server, serving

from ..model.conftest import save_model
from ..strategies import EOS
from .conftest import ChatTokenizer, Served, direct, eventually, served, tiny

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def asking(server: Served, **changes: Any) -> Iterator[http.client.HTTPConnection]:
    """A connection on which a request was sent and nothing was read."""
    connection = server.connect()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(BODY | changes).encode(), headers)
    try:
        yield connection
    finally:
        connection.close()


def live(server: Served) -> int:
    return len(server.running.server.service.loop._readers)


# --- faults


def test_a_step_that_raises_fails_its_requests_and_health_says_so_until_one_succeeds() -> None:
    with served() as server:
        server.gate.open.clear()
        with asking(server) as whole, asking(server, stream=True) as stream:
            eventually(lambda: live(server) == 2)
            server.gate.error, server.gate.fails_at = RuntimeError("a kernel broke"), 2  # both have begun by then
            server.gate.open.set()
            answer = whole.getresponse()
            error = json.loads(answer.read())["error"]
            assert answer.status == 500 and "a kernel broke" in error["message"] and error["type"] == "server_error"
            events = stream.getresponse().read()
            assert b"a kernel broke" in events and b"[DONE]" not in events
        status, _, content = server.call("GET", "/health")
        assert status == 503 and "a kernel broke" in content["error"]
        eventually(lambda: server.empty)
        (want,) = direct("abc", SamplingParams(max_tokens=5))
        got = server.client.completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0)
        assert got.choices[0].text == want.text
        assert server.call("GET", "/health")[0] == 200
        assert server.metric("minillm_requests_total", finish_reason="error") == 2


class Stumbling(ChatTokenizer):
    """Cannot decode one token."""

    def __init__(self, stone: int):
        super().__init__(EOS)
        self.stone = stone

    def decode(self, ids: Any) -> str:
        if self.stone in ids:
            raise KeyError(f"token {self.stone}")
        return super().decode(ids)


def test_a_tokenizer_that_fails_on_one_request_ends_that_one_only() -> None:
    greedy = {p: direct([[p]], SamplingParams(max_tokens=15, ignore_eos=True))[0].token_ids for p in range(2, 14)}
    pairs = [(p, q) for p in greedy for q in greedy]
    stone, bad, good = next((t, p, q) for p, q in pairs for t in greedy[p][3:] if t not in greedy[q])
    with served(Stumbling(stone)) as server:
        server.gate.open.clear()
        fields = {"max_tokens": 15}
        with asking(server, prompt=[bad], **fields) as one, asking(server, prompt=[good], **fields) as other:
            eventually(lambda: live(server) == 2)
            server.gate.open.set()
            assert one.getresponse().status == 500
            answer = other.getresponse()
            text = json.loads(answer.read())["choices"][0]["text"]
            assert answer.status == 200 and text == ChatTokenizer().decode(greedy[good])


def test_when_the_thread_dies_everybody_is_told_and_new_requests_are_503() -> None:
    with served() as server:
        server.gate.open.clear()
        with asking(server) as waiting:
            eventually(lambda: live(server) == 1)
            server.gate.error = SystemExit("out of the loop")
            server.gate.open.set()
            assert waiting.getresponse().status == 500
        status, _, content = server.call("GET", "/health")
        assert status == 503 and content["status"] == "the engine has stopped"
        status, headers, _ = server.call("POST", "/v1/completions", BODY)
        assert status == 503 and headers["retry-after"]


# --- overload


def test_more_than_runs_and_waits_is_a_429_with_retry_after() -> None:
    with served(engine={"max_num_seqs": 2}, max_waiting=1) as server:
        server.gate.open.clear()
        with asking(server), asking(server, n=2):
            eventually(lambda: live(server) == 3)
            status, headers, content = server.call("POST", "/v1/completions", BODY)
            assert status == 429 and headers["retry-after"] == "1" and "3 samples run or wait" in content["error"]["message"]
            with pytest.raises(openai.RateLimitError):
                server.client.completions.create(model="tiny", prompt="abc", stream=True)
            status, _, content = server.call("POST", "/v1/completions", BODY | {"n": 4})
            assert status == 400 and "4 samples, the limit is 3" in content["error"]["message"]
        server.gate.open.set()
        eventually(lambda: server.empty)
        assert server.call("POST", "/v1/completions", BODY | {"max_tokens": 3})[0] == 200


def test_the_metrics_show_who_runs_and_who_waits_and_what_came_out() -> None:
    with served(engine={"max_num_seqs": 1, "num_blocks": 256}) as server:
        server.gate.open.clear()
        with asking(server, max_tokens=9) as first, asking(server, max_tokens=9) as second:
            eventually(lambda: live(server) == 2)
            server.gate.open.set()
            first.getresponse().read(), second.getresponse().read()
        page = server.call("GET", "/metrics")[2].decode()
        assert "minillm_generation_tokens_total 18.0" in page and "minillm_prompt_tokens_total 6.0" in page
        assert 'minillm_requests_total{finish_reason="length"} 2.0' in page
        assert "minillm_time_to_first_token_seconds_count 2.0" in page
        assert "minillm_time_per_output_token_seconds_count 2.0" in page
        assert "minillm_requests_running 0.0" in page and "minillm_kv_cache_usage_ratio 0.0" in page


def test_preemptions_are_counted() -> None:
    with served(engine={"num_blocks": 8}) as server:
        server.gate.open.clear()
        with asking(server, max_tokens=20) as a, asking(server, max_tokens=20) as b:
            eventually(lambda: live(server) == 2)
            server.gate.open.set()
            wants = direct("abc", SamplingParams(max_tokens=20, ignore_eos=True))[0].text
            assert [json.loads(c.getresponse().read())["choices"][0]["text"] for c in (a, b)] == [wants] * 2
        assert server.metric("minillm_preemptions_total") >= 1


# --- clients that leave or stop reading


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    with served() as server:
        server.gate.open.clear()
        with asking(server, stream=stream, n=2):
            eventually(lambda: server.gate.steps == 1)
        eventually(lambda: live(server) == 0)  # noticed with the engine in the middle of a step
        server.gate.open.set()
        eventually(lambda: server.empty)
        assert server.gate.steps <= 3 and server.metric("minillm_requests_total", finish_reason="abort") == 2


def test_a_reader_that_leaves_in_the_middle_of_its_stream_ends_its_request() -> None:
    with served() as server:
        stream = server.client.completions.create(**{k: v for k, v in BODY.items() if k != "ignore_eos"}, stream=True,
                                                  extra_body={"ignore_eos": True})  # fmt: skip
        next(iter(stream))
        server.gate.open.clear()
        stream.close()
        eventually(lambda: live(server) == 0)
        server.gate.open.set()
        eventually(lambda: server.empty)
        assert server.gate.steps < 400


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps little of what a reader has not read; connections inherit it from the socket that listens."""
    listen = Server.listen

    def narrow(self: Server) -> socket.socket:
        sock = listen(self)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return sock

    monkeypatch.setattr(Server, "listen", narrow)


def test_a_reader_that_does_not_read_holds_up_neither_the_engine_nor_the_others(small_buffers: None) -> None:
    with served(stall_seconds=60) as server:
        where = server.connect()
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            lazy.connect((where.host, where.port))
            # many choices with many logprobs: far more bytes than the buffers of the connection hold
            body = json.dumps(BODY | {"stream": True, "n": 4, "max_tokens": 200, "logprobs": 20}).encode()
            lazy.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
            eventually(lambda: live(server) == 4)
            (want,) = direct("abc", SamplingParams(max_tokens=40, ignore_eos=True))
            got = server.client.completions.create(
                model="tiny", prompt="abc", max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
            )
            assert got.choices[0].text == want.text
            eventually(lambda: live(server) == 0)  # the engine has finished what nobody read
            assert len(server.running.server.server_state.tasks) >= 1
            eventually(lambda: server.empty)
            answer = http.client.HTTPResponse(lazy)  # and all of it is still there for a reader who comes back
            answer.begin()
            events = [json.loads(e[6:]) for e in answer.read().split(b"\n\n") if e.startswith(b"data: {")]
            texts = [""] * 4
            for e in events:
                texts[e["choices"][0]["index"]] += e["choices"][0]["text"]
            assert texts == [direct("abc", SamplingParams(max_tokens=200, ignore_eos=True))[0].text] * 4


def test_a_reader_that_stalls_too_long_is_given_up(small_buffers: None) -> None:
    with served(stall_seconds=0.05) as server:
        where = server.connect()
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            lazy.connect((where.host, where.port))
            body = json.dumps(BODY | {"stream": True, "n": 4, "logprobs": 20}).encode()
            lazy.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
            eventually(lambda: live(server) == 4)
            eventually(lambda: not server.running.server.server_state.tasks)
            eventually(lambda: server.empty)


@pytest.mark.slow
def test_sixty_four_clients_that_read_dawdle_or_leave_all_end_and_leave_nothing() -> None:
    with served(engine={"num_blocks": 160, "max_num_seqs": 16}, max_waiting=1000) as server:
        wants: dict[tuple[int, int], str] = {}
        for p in range(2, 10):
            for n in (5, 30, 100):
                wants[p, n] = direct([[p]], SamplingParams(max_tokens=n, ignore_eos=True))[0].text
        faults: list[str] = []

        def client(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(3):
                key = (draw.randrange(2, 10), draw.choice([5, 30, 100]))
                kind = draw.choice(["whole", "stream", "slow", "leave", "leave at once"])
                changes = {"prompt": [key[0]], "max_tokens": key[1], "stream": kind != "whole"}
                with asking(server, **changes) as connection:
                    if kind == "leave at once":
                        continue
                    answer = connection.getresponse()
                    if kind == "leave":
                        answer.read(draw.randrange(1, 600))
                        continue
                    if kind == "whole":
                        text = json.loads(answer.read())["choices"][0]["text"]
                    else:
                        data = b""
                        while part := answer.read(200 if kind == "slow" else 65_536):
                            data += part
                            if kind == "slow":
                                time.sleep(0.001)
                        events = [json.loads(e[6:]) for e in data.split(b"\n\n") if e.startswith(b"data: {")]
                        text = "".join(e["choices"][0]["text"] for e in events)
                    if text != wants[key]:
                        faults.append(f"client {seed}, {kind}, {key}: {text!r}")

        threads = [threading.Thread(target=client, args=(i,)) for i in range(64)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert not any(t.is_alive() for t in threads) and not faults
        eventually(lambda: server.empty)
        eventually(lambda: not server.running.server.server_state.tasks)
        ended = sum(server.metric("minillm_requests_total", finish_reason=r) for r in ("length", "abort", "error"))
        assert 0 < ended <= 64 * 3  # who left while its request was being read never became one
        assert server.metric("minillm_requests_total", finish_reason="error") == 0


# --- the end


def test_a_server_that_closes_lets_running_streams_end_and_refuses_new_ones() -> None:
    llm = tiny()
    results: dict[str, Any] = {}
    with serving(llm) as running:
        loop = running.server.service.loop
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        name = client.models.list().data[0].id
        stream = client.completions.create(
            model=name, prompt="abc", max_tokens=300, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        parts = iter(stream)
        first = next(parts)
        running.server.should_exit = True
        eventually(lambda: loop.closing)
        results["text"] = first.choices[0].text + "".join(p.choices[0].text for p in parts)
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            client.completions.create(model=name, prompt="abc")
    assert results["text"] == direct("abc", SamplingParams(max_tokens=300, ignore_eos=True))[0].text
    assert not loop._thread.is_alive() and llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks


def test_what_outlasts_the_grace_is_ended_with_an_error_and_holds_nothing() -> None:
    with served(grace_seconds=0.0) as server:
        server.gate.open.clear()
        with asking(server, stream=True) as stream, asking(server) as whole:
            eventually(lambda: live(server) == 2)
            server.running.server.should_exit = True
            answer = stream.getresponse().read()
            assert b"shutting down" in answer and b"[DONE]" not in answer
            response = whole.getresponse()
            assert response.status == 503 and response.getheader("Retry-After") == "1"
            server.gate.open.set()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal_and_ends_well(tmp_path: Path, number: signal.Signals) -> None:
    save_model("llama", tmp_path)
    command = [sys.executable, "-m", "minillm.cli", "serve", "--model", str(tmp_path), "--port", "0", "--name", "tiny"]
    command += ["--option", "block_size=8", "--option", "num_blocks=99", "--max-num-seqs", "3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "http://" in line)
            assert "http://127.0.0.1:" in line and line.startswith("minillm: tiny")
            client = openai.OpenAI(base_url=line.split()[-1], api_key="none", max_retries=0)
            extra = {"return_token_ids": True, "ignore_eos": True}
            stream = client.completions.create(model="tiny", prompt=[5, 6], max_tokens=100, stream=True, extra_body=extra)
            count = len(next(iter(stream)).choices[0].token_ids)
            process.send_signal(number)
            count += sum(len(p.choices[0].token_ids) for p in stream)
            assert count == 100 and process.wait(60) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
