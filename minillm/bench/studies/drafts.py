"""Four ways to draft against none on answers that copy little: acceptance, the price of a draft and of its check, and speed."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

from minillm.bench.study import Bar
from minillm.llm import LLM
from minillm.quant.config import QuantConfig
from minillm.sampling_params import SamplingParams
from minillm.spec.choose_layers import KEPT
from minillm.spec.length import tokens_per_pass
from minillm.spec.texts import PROMPTS

TOKENS = 96
ROUNDS = 3
TITLE = "Drafts: prompt lookup, a copy in 4 bits, some layers, a trained head, batch 1; against no drafts"
KINDS = ("chat", "story")
LENGTH = {"ngram": 4, "int4": 3, "layers": 2, "mtp": 2}
"""Tokens of a draft: fixed, so that E = 1 + α + … + α**γ holds. Lookup may find fewer, or none."""

MODELS = ("int4", "layers", "mtp")
COPY = QuantConfig(bits=4, group=64, dense_from=6)
"""In every dtype with a dense copy beside the codes, by which it reads prompts."""


def speed(r: Mapping[str, float], kind: str, who: str) -> float:
    """Output tokens per second of decoding, against none."""
    return r[f"{kind}/{who} tok/s"] / r[f"{kind}/none tok/s"]


def predicted(r: Mapping[str, float], kind: str, who: str) -> float:
    """S = E / (γ c + v) from the parts: acceptance, the price of a drafted token, and that of a pass that checks it."""
    length = LENGTH[who]
    return tokens_per_pass(r[f"{kind}/{who} alpha"], length) / (length * price(r, kind, who) + check(r, kind, who))


def price(r: Mapping[str, float], kind: str, who: str) -> float:
    """c: seconds of a drafted token, in passes of the target without drafts."""
    return r[f"{kind}/{who} draft s"] / r[f"{kind}/none pass s"]


def check(r: Mapping[str, float], kind: str, who: str) -> float:
    """v: seconds of a pass that checks a draft, in passes without one."""
    return r[f"{kind}/{who} pass s"] / r[f"{kind}/none pass s"]


def _bar(kind: str, who: str, what: str, value: Callable[[Mapping[str, float], str, str], float]) -> Bar:
    return Bar(f"{kind}, {who}: {what}", lambda r: value(r, kind, who))


BARS = (
    Bar("chat: the fastest of int4, layers, mtp / none", lambda r: max(speed(r, "chat", who) for who in MODELS), at_least=1.2),
    *(_bar(kind, who, "speed / none", speed) for kind in KINDS for who in LENGTH),
    *(_bar("chat", who, "predicted from α, c, v", predicted) for who in MODELS),
    *(_bar(kind, who, "acceptance α", lambda r, k, w: r[f"{k}/{w} alpha"]) for kind in KINDS for who in LENGTH),
    *(_bar("chat", who, "tokens per pass", lambda r, k, w: r[f"{k}/{w} per pass"]) for who in LENGTH),
    *(_bar("chat", who, "price of a drafted token c", price) for who in LENGTH),
    *(_bar("chat", who, "a checking pass v", check) for who in LENGTH),
)  # fmt: skip


@dataclass
class State:
    """One engine for each way to draft; prompts by kind."""

    engines: dict[str, LLM]
    tokens: int = TOKENS
    prompts: Mapping[str, Any] = field(default_factory=lambda: {kind: PROMPTS[kind] for kind in KINDS})


def drafting(model: Any, tokenizer: Any, **options: Any) -> dict[str, LLM]:
    """Engines over one model: without drafts, and with each way to draft at its fixed length."""
    ways: dict[str, dict[str, Any]] = {
        "ngram": {"speculative": "ngram"},
        "int4": {"speculative": "draft", "draft_model": COPY},
        "layers": {"speculative": "draft", "draft_model": KEPT[25]},
        "mtp": {"speculative": "mtp"},
    }
    shared: dict[str, Any] = {"tokenizer": tokenizer, "max_num_seqs": 1, "max_model_len": 1024, **options}
    engines = {"none": LLM(model, **shared)}
    for who, way in ways.items():
        engines[who] = LLM(model, num_draft_tokens=LENGTH[who], adaptive_drafts=False, **way, **shared)
    return engines


def prepare() -> State:
    first = LLM("smollm2-135m", max_num_seqs=1, max_model_len=1024)
    state = State(drafting(first.model, first.tokenizer))
    for llm in state.engines.values():
        run(llm, llm.encode([{"role": "user", "content": PROMPTS["chat"][0]}]), 8)
    return state


def measure(state: State, turn: int) -> dict[str, float]:
    """Every prompt through every engine, engines in an order that rotates."""
    found: dict[str, float] = {}
    names = list(state.engines)
    order = names[turn % len(names) :] + names[: turn % len(names)]
    for kind, texts in state.prompts.items():
        for who in order:
            llm = state.engines[who]
            runs = [run(llm, llm.encode([{"role": "user", "content": text}]), state.tokens) for text in texts]
            found |= {f"{kind}/{who} {name}": value for name, value in summary(runs).items()}
    return found


@dataclass
class Run:
    """Decoding of one answer after its first token. drafts: (seconds, tokens) of each draft; passes: (seconds, drafted tokens) of
    each pass of the target."""

    seconds: float = 0.0
    token_ids: tuple[int, ...] = ()
    accepted: int = 0
    tried: int = 0
    drafts: list[tuple[float, int]] = field(default_factory=list)
    passes: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of the answer after its first."""
        return max(0, len(self.token_ids) - 1)


def run(llm: LLM, ids: list[int], tokens: int, clock: Callable[[], float] = time.perf_counter) -> Run:
    """Answer one prompt greedily, with a clock around each draft and each pass of the target."""
    found, engine = Run(), llm.engine
    engine.add_request(ids, SamplingParams(max_tokens=tokens))
    outputs = engine.step()
    while engine.has_work and not outputs:
        outputs = engine.step()
    with timed(engine, found, clock):
        start = clock()
        while engine.has_work:
            outputs = engine.step() or outputs
        found.seconds = clock() - start
    found.token_ids = outputs[-1].token_ids
    found.accepted, found.tried = outputs[-1].drafts.accepted, outputs[-1].drafts.tried
    return found


class timed:
    """A clock around the proposer and the runner of an engine, for as long as the block lasts."""

    def __init__(self, engine: Any, found: Run, clock: Callable[[], float]):
        self.engine, self.found, self.clock = engine, found, clock

    def __enter__(self) -> None:
        proposer, runner = getattr(self.engine.speculation, "proposer", None), self.engine.runner
        plain_run, propose = runner.run, getattr(proposer, "propose", None)

        def timed_run(step: Any, before: Any = None) -> Any:
            start = self.clock()
            result = plain_run(step, before)
            self.found.passes.append((self.clock() - start, sum(len(seat.draft) for seat in step.seats)))
            return result

        def timed_propose(requests: Any, lengths: Any) -> Any:
            start = self.clock()
            drafts = propose(requests, lengths)  # type: ignore[misc]
            self.found.drafts.append((self.clock() - start, sum(len(d) for d in drafts)))
            return drafts

        self.wrapped = [(runner, "run", timed_run)] + ([(proposer, "propose", timed_propose)] if propose else [])
        for owner, name, function in self.wrapped:
            setattr(owner, name, function)

    def __exit__(self, *_: Any) -> None:
        for owner, name, _function in self.wrapped:
            delattr(owner, name)


def summary(runs: list[Run]) -> dict[str, float]:
    """Rates, acceptance, and the median seconds of a drafted token and of a pass: one with a draft where there are any."""
    drafted = [s / n for r in runs for s, n in r.drafts if n]
    checked = [s for r in runs for s, n in r.passes if n] or [s for r in runs for s, _ in r.passes]
    tried = sum(r.tried for r in runs)
    return {
        "tok/s": sum(r.tokens for r in runs) / sum(r.seconds for r in runs),
        "per pass": sum(r.tokens for r in runs) / sum(len(r.passes) for r in runs),
        "alpha": sum(r.accepted for r in runs) / tried if tried else 0.0,
        "draft s": statistics.median(drafted) if drafted else 0.0,
        "pass s": statistics.median(checked),
    }
