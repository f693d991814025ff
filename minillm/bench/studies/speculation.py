"""Decoding with drafts against decoding without them, on answers that copy and on answers that do not, and with many requests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

from minillm.bench.study import Bar
from minillm.llm import LLM
from minillm.sampling_params import SamplingParams
from minillm.spec.texts import COPYING, PROMPTS

TOKENS, MANY = 128, 32
TITLE = f"Speculation: prompt lookup against none, batch 1 and {MANY} requests; output tokens per second"
ROUNDS = 3


def _rate(kind: str, who: str) -> Callable[[Mapping[str, float]], float]:
    return lambda r: r[f"{kind}/{who} tok/s"] / r[f"{kind}/plain tok/s"]


def _per_pass(kind: str) -> Callable[[Mapping[str, float]], float]:
    return lambda r: r[f"{kind}/ngram per pass"]


FLOORS = {"edit code": 2.0, "fix text": 3.0, "summarise": 3.0}
BARS = (
    *(Bar(f"{kind}: prompt lookup / none", _rate(kind, "ngram"), at_least=FLOORS.get(kind, 0.97)) for kind in PROMPTS),
    Bar(f"{MANY} chats at once: prompt lookup / none", _rate("many", "ngram"), at_least=0.97),
    *(Bar(f"{kind}: tokens per pass with lookup", _per_pass(kind)) for kind in PROMPTS),
    Bar("chat: every second layer drafts / none", _rate("chat", "layers")),
)


@dataclass
class State:
    """One engine each; prompts as messages, by kind."""

    engines: dict[str, LLM]
    tokens: int
    prompts: Mapping[str, Any] = field(default_factory=lambda: PROMPTS)
    many: int = MANY


def prepare() -> State:
    plain = LLM("smollm2-135m", max_num_seqs=MANY)
    layers = list(range(0, plain.model.config.num_layers, 2))
    shared: dict[str, Any] = {"tokenizer": plain.tokenizer, "max_num_seqs": MANY}
    engines = {
        "plain": plain,
        "ngram": LLM(plain.model, speculative="ngram", **shared),
        "layers": LLM(plain.model, speculative="draft", draft_model=layers, num_draft_tokens=3, **shared),
    }
    state = State(engines, TOKENS)
    for llm in engines.values():
        answer(llm, PROMPTS["chat"][:1], 8)
    return state


def measure(state: State, turn: int) -> dict[str, float]:
    """Each kind of prompt through each engine, engines in an order that rotates; then many chats at once."""
    found: dict[str, float] = {}
    names = list(state.engines)
    order = names[turn % len(names) :] + names[: turn % len(names)]
    for kind, texts in state.prompts.items():
        for name in order:
            if name == "layers" and kind in COPYING:
                continue
            rates, passes = zip(*(answer(state.engines[name], (text,), state.tokens) for text in texts))
            found[f"{kind}/{name} tok/s"] = len(rates) / sum(1 / r for r in rates)
            found[f"{kind}/{name} per pass"] = sum(passes) / len(passes)
    texts = [text for texts in state.prompts.values() for text in texts]
    crowd = tuple(texts[i % len(texts)] for i in range(state.many))
    for name in order:
        if name != "layers":
            found[f"many/{name} tok/s"], _ = answer(state.engines[name], crowd, state.tokens // 2)
    return found


def answer(llm: LLM, texts: tuple[str, ...], tokens: int) -> tuple[float, float]:
    """Answer these questions at once, greedily: (output tokens per second, prompts included; tokens per pass of the target)."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=len(texts) > 1)
    start = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    seconds = time.perf_counter() - start
    made = sum(len(o.token_ids) for o in outputs)
    return made / seconds, made / max(1, sum(o.drafts.passes for o in outputs))
