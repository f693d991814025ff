"""Decoding with drafts against decoding without them, on answers that copy and on answers that do not, and with many requests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

from minillm.bench.study import Bar
from minillm.engine.request import RequestOutput
from minillm.llm import LLM
from minillm.sampling_params import SamplingParams
from minillm.spec.texts import COPYING, PROMPTS

TOKENS, MANY = 96, 32
TITLE = f"Speculation: prompt lookup against none, batch 1 and {MANY} requests; output tokens per second"
ROUNDS = 3
LOOKUP: dict[str, Any] = {"speculative": "ngram", "num_draft_tokens": 15}


def _rate(kind: str, who: str) -> Callable[[Mapping[str, float]], float]:
    return lambda r: r[f"{kind}/{who} tok/s"] / r[f"{kind}/plain tok/s"]


def _count(name: str) -> Callable[[Mapping[str, float]], float]:
    return lambda r: r[name]


FLOORS = {"edit code": 2.0, "fix text": 3.0, "summarise": 3.0}
BARS = (
    *(Bar(f"{kind}: prompt lookup / none", _rate(kind, "ngram"), at_least=FLOORS.get(kind, 0.97)) for kind in PROMPTS),
    Bar(f"{MANY} chats at once: prompt lookup / none", _rate("many", "ngram"), at_least=0.97),
    *(Bar(f"{kind}: tokens per pass with lookup", _count(f"{kind}/ngram per pass")) for kind in PROMPTS),
    *(Bar(f"{kind}: tokens before 16-bit rounding makes the texts differ", _count(f"{kind}/ngram same")) for kind in PROMPTS),
    Bar("chat: every second layer drafts / none", _rate("chat", "layers")),
    Bar("chat: tokens per pass with these layers", _count("chat/layers per pass")),
)


@dataclass
class State:
    """One engine each; prompts by kind, those of COPYING all in every round, of the others one."""

    engines: dict[str, LLM]
    tokens: int
    prompts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PROMPTS)
    many: int = MANY


def prepare() -> State:
    plain = LLM("smollm2-135m", max_num_seqs=MANY)
    layers = list(range(0, plain.model.config.num_layers, 2))
    shared: dict[str, Any] = {"tokenizer": plain.tokenizer, "max_num_seqs": MANY}
    engines = {
        "plain": plain,
        "ngram": LLM(plain.model, **LOOKUP, **shared),
        "layers": LLM(plain.model, speculative="draft", draft_model=layers, num_draft_tokens=3, **shared),
    }
    for llm in engines.values():
        answer(llm, PROMPTS["fix text"][:1], 8)
    return State(engines, TOKENS)


def measure(state: State, turn: int) -> dict[str, float]:
    """Each kind of prompt through each engine, engines in an order that rotates; then many chats at once."""
    found: dict[str, float] = {}
    names = list(state.engines)
    order = names[turn % len(names) :] + names[: turn % len(names)]
    for kind, texts in state.prompts.items():
        chosen = texts if kind in COPYING else (texts[turn % len(texts)],)
        answers: dict[str, list[RequestOutput]] = {}
        for name in order if kind == "chat" else [n for n in order if n != "layers"]:
            runs = [answer(state.engines[name], (text,), state.tokens) for text in chosen]
            answers[name] = [o for _, outputs in runs for o in outputs]
            found[f"{kind}/{name} tok/s"] = made(answers[name]) / sum(seconds for seconds, _ in runs)
        for name, outputs in answers.items():
            found[f"{kind}/{name} per pass"] = made(outputs) / sum(o.drafts.passes for o in outputs)
            found[f"{kind}/{name} same"] = sum(map(agreed, answers["plain"], outputs)) / len(outputs)
    every = [text for texts in state.prompts.values() for text in texts]
    crowd = tuple(every[i % len(every)] for i in range(state.many))
    for name in order:
        if name != "layers":
            seconds, outputs = answer(state.engines[name], crowd, state.tokens // 3)
            found[f"many/{name} tok/s"] = made(outputs) / seconds
    return found


def answer(llm: LLM, texts: tuple[str, ...], tokens: int) -> tuple[float, list[RequestOutput]]:
    """Answer these questions at once, greedily: (seconds, prompts included; the outputs). Many of them all to the last token."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=len(texts) > 1)
    start = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    return time.perf_counter() - start, outputs


def made(outputs: list[RequestOutput]) -> int:
    """Output tokens."""
    return sum(len(o.token_ids) for o in outputs)


def agreed(a: RequestOutput, b: RequestOutput) -> int:
    """Leading tokens that two answers share. A pass over several tokens rounds otherwise than one over a single token: where two
    tokens are nearly as likely, 16 bits may choose the other one, and the texts go on differently."""
    return next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y), min(len(a.token_ids), len(b.token_ids)))
