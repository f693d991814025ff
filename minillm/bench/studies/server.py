"""Sixteen clients that stream over HTTP, in a process of their own, against the engine called directly with the same requests."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Sequence
from urllib.parse import urlsplit

from minillm.bench import stream_client
from minillm.bench.study import Bar
from minillm.llm import LLM
from minillm.sampling_params import SamplingParams
from minillm.server.serve import serving

CLIENTS, PROMPT, TOKENS = 16, 32, 64

TITLE = f"Server: {CLIENTS} streaming clients, prompts of {PROMPT} and answers of {TOKENS} tokens"
ROUNDS = 5
BARS = (
    Bar("output tok/s, streamed / engine called directly", lambda r: r["direct_s"] / r["served_s"], at_least=0.92),
    Bar("output tok/s, streamed", lambda r: r["tokens"] / r["served_s"]),
    Bar("TTFT, streamed / engine called directly", lambda r: r["served_first_s"] / r["direct_first_s"]),
    Bar("processor time of the clients, share of a core", lambda r: r["client_cpu_s"] / r["served_s"]),
    Bar("answers that are equal both ways", lambda r: r["equal_texts"]),
)


@dataclass
class State:
    """The model, the prompts, and the process that plays the clients."""

    llm: LLM
    prompts: Sequence[list[int]]
    tokens: int
    clients: "subprocess.Popen[str]"


def prepare() -> State:
    blocks = CLIENTS * -(-(PROMPT + TOKENS) // 16)
    return make_state(LLM("smollm2-135m", max_num_seqs=CLIENTS, num_blocks=blocks), CLIENTS, PROMPT, TOKENS)


def make_state(llm: LLM, clients: int, prompt: int, tokens: int) -> State:
    """Warm: everything has run once."""
    draw = random.Random(0)
    prompts = [draw.choices(range(3, llm.model.config.vocab_size), k=prompt) for _ in range(clients)]
    process = subprocess.Popen(
        [sys.executable, "-I", stream_client.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    state = State(llm, prompts, tokens, process)
    assert process.stdout is not None
    process.stdout.readline()  # "ready"
    direct(state, 2)
    served(state, 2)
    return state


def measure(state: State, turn: int) -> dict[str, float]:
    found: dict[str, tuple[float, float, float, list[str]]] = {}
    ways = [("direct", direct), ("served", served)]
    for name, way in ways[:: -1 if turn % 2 else 1]:
        found[name] = way(state, state.tokens)
    pairs = list(zip(found["direct"][3], found["served"][3], strict=True))
    return {
        # in 16 bits a near-tie falls either way when other requests share the step; that texts are equal is tested in float64
        "equal_texts": sum(a == b for a, b in pairs) / len(pairs),
        "tokens": len(state.prompts) * state.tokens, "direct_s": found["direct"][0], "served_s": found["served"][0],
        "direct_first_s": found["direct"][1], "served_first_s": found["served"][1], "client_cpu_s": found["served"][2],
    }  # fmt: skip


def direct(state: State, tokens: int) -> tuple[float, float, float, list[str]]:
    """Seconds for all, mean seconds to a first token, nothing, and the texts."""
    engine = state.llm.engine
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    before = time.perf_counter()
    names = [engine.add_request(prompt, params) for prompt in state.prompts]
    first: dict[str, float] = {}
    texts: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - before)
            texts[output.request_id] = output.text
    seconds = time.perf_counter() - before
    return seconds, sum(first.values()) / len(first), 0.0, [texts[name] for name in names]


def served(state: State, tokens: int) -> tuple[float, float, float, list[str]]:
    """The same through a server, as the clients saw it; the third number is their processor time."""
    base = {
        "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with serving(state.llm) as running:
        where = urlsplit(running.url)
        bodies: list[dict[str, Any]] = [base | {"model": running.server.service.name, "prompt": p} for p in state.prompts]
        stdin, stdout = state.clients.stdin, state.clients.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps({"host": where.hostname, "port": where.port, "bodies": bodies}) + "\n")
        stdin.flush()
        line = stdout.readline()
    if not line:
        raise RuntimeError("the process that plays the clients has ended")
    told = json.loads(line)
    if told["tokens"] != len(bodies) * tokens:
        raise RuntimeError(f"{told['tokens']} tokens came back, {len(bodies) * tokens} were asked for")
    return told["seconds"], sum(told["first"]) / len(told["first"]), told["cpu"], told["texts"]
