from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Callable, Iterator, Sequence
from urllib.parse import urlsplit

import openai
import pytest
import torch

from minillm import LLM, SamplingParams, Transformer
from minillm.attention.torch_backend import TorchAttention
from minillm.server.options import ServerOptions
from minillm.server.serve import Running, serving

from ..strategies import EOS, FakeTokenizer, one_thread, tiny_config

__all__ = ["one_thread"]
MAX_LEN = 512


@cache
def model() -> Transformer:
    return Transformer.random(tiny_config(max_position=MAX_LEN), seed=3, dtype=torch.float64)


class ChatTokenizer(FakeTokenizer):
    """A conversation is the texts of its messages, each behind the first letter of its role and "c"."""

    def apply_chat_template(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        letters = {"system": "y", "user": "x", "assistant": "a"}
        return self.encode("".join(letters[m["role"]] + "c" + m["content"] for m in messages))


class Gate(TorchAttention):
    """Attention that waits at a gate before every step: a test decides when the engine goes on. ``steps`` counts those begun;
    from step ``fails_at`` on, ``error`` is raised once."""

    def __init__(self) -> None:
        super().__init__(None)
        self.open = threading.Event()
        self.open.set()
        self.error: BaseException | None = None
        self.fails_at = self.steps = 0

    def plan(self, batch: Any, dtype: torch.dtype) -> Any:
        self.steps += 1
        assert self.open.wait(60), "nobody opened the gate"
        if self.error is not None and self.steps >= self.fails_at:
            error, self.error = self.error, None
            raise error
        return super().plan(batch, dtype)


def tiny(tokenizer: Any = "chat", **options: Any) -> LLM:
    tokenizer = ChatTokenizer(EOS) if tokenizer == "chat" else tokenizer
    return LLM(model(), tokenizer=tokenizer, **({"num_blocks": 512, "block_size": 4} | options))


@dataclass
class Served:
    """A server in this process with its model, its gate and clients for it."""

    running: Running
    llm: LLM
    gate: Gate
    key: str | None = None

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.running.url}/v1", api_key=self.key or "none", max_retries=0, timeout=60)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and content (JSON where it is) of one plain HTTP request; bytes are sent as they are."""
        connection = self.connect()
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        content = response.read()
        connection.close()
        is_json = (response.getheader("content-type") or "").startswith("application/json")
        return response.status, {k.lower(): v for k, v in response.getheaders()}, json.loads(content) if is_json else content

    def connect(self) -> http.client.HTTPConnection:
        where = urlsplit(self.running.url)
        return http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        return self.running.server.service.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def empty(self) -> bool:
        """Nobody runs, waits or holds a block, and no reader is remembered."""
        pool = self.llm.engine.cache.pool
        loop = self.running.server.service.loop
        return not self.llm.engine.has_work and pool.num_free == pool.num_blocks and not loop._readers and not loop._mine


@contextlib.contextmanager
def served(tokenizer: Any = "chat", engine: dict[str, Any] | None = None, **options: Any) -> Iterator[Served]:
    """A tiny model behind a server on a free port. At the end everything must be free."""
    gate = Gate()
    llm = tiny(tokenizer, attention_backend=gate, **(engine or {}))
    with serving(llm, ServerOptions(**({"port": 0, "name": "tiny"} | options))) as running:
        server = Served(running, llm, gate, options.get("api_key"))
        yield server
        gate.open.set()
        eventually(lambda: server.empty)
    assert server.empty


def eventually(happens: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that other threads bring about. The limit is there for a hang only."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One server for the tests of a file that leave it as they found it."""
    with served() as server:
        yield server


def direct(prompts: Any, params: SamplingParams | None = None, **options: Any) -> list[Any]:
    """What the same model answers without a server."""
    return tiny(**options).generate(prompts, params)
