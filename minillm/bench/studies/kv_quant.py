"""KV in int8 and fp8 against 16 bits: the time of a decode step and the bytes it reads, by context, and what the answers lose.

On a CPU without a kernel of its own the codes are turned back into 16 bits at every read, so that fewer bytes need not be faster.
Quality is counted once, not per round. The packaged weights lie on a 4-bit grid; keys and values do not, so that theirs is no
artefact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Mapping, Sequence

from minillm import LLM
from minillm.bench.decode import DecodeBench
from minillm.bench.needles import ask, divergence, haystack
from minillm.bench.quality import Evaluation
from minillm.bench.study import Bar
from minillm.engine.admission import TokenizerLike
from minillm.model.transformer import Transformer

TITLE = "KV in int8 and fp8 against 16 bits: step time, bytes, and what is lost"
ROUNDS = 3
CONTEXTS = (256, 2048)
HAYSTACKS = (256, 1024)
ROWS = 4
KINDS = ("auto", "int8", "fp8")
Found = Mapping[str, float]


def ratio(what: str, kind: str, r: Found) -> float:
    """A measurement of this kind of KV over that of 16 bits."""
    return r[f"{kind}_{what}"] / r[f"auto_{what}"]


def found(kind: str, length: int, r: Found) -> float:
    """Needles found of those that 16 bits find."""
    return r[f"{kind}_needles_{length}"] / max(r[f"auto_needles_{length}"], 1)


def counted(what: str, kind: str, r: Found) -> float:
    return r[f"{kind}_{what}"]


BARS = (
    *(Bar(f"step, {k} / 16-bit, context {n}", partial(ratio, f"step_{n}", k)) for k in KINDS[1:] for n in CONTEXTS),
    *(Bar(f"KV bytes per token, {k} / 16-bit", partial(ratio, "bytes", k), at_most=0.52) for k in KINDS[1:]),
    *(Bar(f"KL to 16-bit, {k}, worst task, nats", partial(counted, "kl", k), at_most=0.05) for k in KINDS[1:]),
    *(Bar(f"same likeliest token, {k}, worst task", partial(counted, "same", k), at_least=0.9) for k in KINDS[1:]),
    *(Bar(f"needles found, {k} / 16-bit, context {n}", partial(found, k, n)) for k in KINDS[1:] for n in HAYSTACKS),
    *(Bar(f"needles found of 8, 16-bit, context {n}", partial(counted, f"needles_{n}", "auto")) for n in HAYSTACKS),
)


@dataclass(frozen=True)
class State:
    """A bench per kind over one model; what is the same in every round."""

    benches: Mapping[str, DecodeBench]
    once: Found


def prepare() -> State:
    llm = LLM("smollm2-135m", num_blocks=8)
    assert llm.tokenizer is not None
    return state_of(llm.model, llm.tokenizer)


def state_of(
    model: Transformer, tokenizer: TokenizerLike, contexts: Sequence[int] = CONTEXTS, haystacks: Sequence[int] = HAYSTACKS
) -> State:
    """The benches' pools are filled with noise; bytes and quality are counted here."""
    benches = {kind: DecodeBench(model, contexts[-1], ROWS, kv_dtype=kind) for kind in KINDS}
    once = {f"{kind}_bytes": float(bench.store.bytes_per_token) for kind, bench in benches.items()}
    evaluation = Evaluation(model, tokenizer, choices={})
    for kind in KINDS:
        scores = evaluation.text_scores(model, kind).values()
        once[f"{kind}_kl"], once[f"{kind}_same"] = max(s.kl for s in scores), min(s.agreement for s in scores)
    for length in haystacks:
        hay = haystack(tokenizer, length)
        answers = {kind: ask(model, hay, kind) for kind in KINDS}
        for kind, answer in answers.items():
            once[f"{kind}_needles_{length}"] = float(hay.found(answer))
            once[f"{kind}_needles_kl_{length}"] = divergence(answers["auto"], answer)
    return State(benches, once)


def measure(state: State, turn: int) -> dict[str, float]:
    results = dict(state.once)
    kinds = list(state.benches)
    for context in CONTEXTS:
        for i in range(len(kinds)):
            kind = kinds[(i + turn) % len(kinds)]
            results[f"{kind}_step_{context}"] = state.benches[kind].measure(context, ROWS, True).timing.median
    return results
