"""Needles in a haystack: words hidden in a long text, each asked for at its end. What is asked is a fact from far back, so that
the answer goes through keys and values that were stored long ago."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Iterator, Sequence

import torch
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention
from minillm.bench.quality import KVKind, make_kv
from minillm.cache.kv_store import KVStore
from minillm.engine.admission import TokenizerLike
from minillm.engine.batch import ForwardBatch, Row
from minillm.llm import LLM
from minillm.model.transformer import Transformer
from minillm.sampling_params import SamplingParams

FACTS = (
    "The password of the old library is",
    "On the blue door somebody wrote",
    "The captain gave his boat the name",
    "At the market the magician whispered",
    "The parrot of the innkeeper only ever says",
    "The last line of the poem ends in",
    "The signal for the attack was",
    "My grandmother called her white horse",
)
WORDS = (" apple", " silver", " window", " river", " candle", " tiger", " orange", " piano")
HAY = (
    "The road to the mill was wet after the rain, and the cart moved slowly.",
    "A grey cat slept on the wall and did not look up.",
    "In the afternoon the children carried water from the well to the garden.",
    "The baker counted the loaves and put the last of them into the window.",
    "Two boats came back with empty nets, and nobody spoke of it.",
    "The clock of the town hall was late again, as it had been all summer.",
    "Somebody had left a ladder against the old pear tree.",
    "The train stopped for a minute, and then went on into the hills.",
    "A letter came for the teacher, who read it twice and smiled.",
    "The wind turned to the north, and the fire was lit early that day.",
    "On the bench by the dam an old man fed the ducks.",
    "The shop sold string, lamps and paper, and sometimes a clock.",
    "It snowed a little before noon, but nothing stayed on the ground.",
    "The carpenter measured the door once more and shook his head.",
    "From the hill one could see the lights of both villages.",
    "The dog followed the postman as far as the bridge.",
)
BLOCK = 16
CHUNK = 256
"""Tokens of one pass over the hay: long enough to be fast, short enough to hold little."""


@dataclass(frozen=True)
class Haystack:
    """tokens: the text. questions[i]: what is asked behind it. answers: the first token of each right answer, all different."""

    tokens: list[int]
    questions: list[list[int]]
    answers: list[int]

    @property
    def chance(self) -> float:
        """The share that guessing among the hidden words finds."""
        return 1 / len(self.answers)

    def found(self, logprobs: Tensor) -> int:
        """How many of the words are the likeliest among all that are hidden. logprobs [questions, vocab]."""
        return int((logprobs[:, self.answers].argmax(-1) == torch.arange(len(self.answers))).sum())

    def recalled(self, llm: LLM) -> int:
        """How many of the words an engine, as it is set up, writes first: the likeliest of the whole vocabulary. With a prefix
        cache the text is computed once."""
        greedy = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        llm.generate(self.tokens, greedy)
        outs = llm.generate([[*self.tokens, *question] for question in self.questions], greedy)
        return sum(list(out.token_ids) == [answer] for out, answer in zip(outs, self.answers, strict=True))


def haystack(tokenizer: TokenizerLike, length: int, seed: int = 0) -> Haystack:
    """About ``length`` tokens of text with a fact in each eighth of it that ends in an arbitrary word; both in a seeded order."""
    order = random.Random(seed)
    facts, words = order.sample(FACTS, len(FACTS)), order.sample(WORDS, len(WORDS))
    hay = _hay(order)
    tokens: list[int] = []
    for i, (fact, word) in enumerate(zip(facts, words, strict=True)):
        middle, end = (length * (2 * i + 1) // (2 * len(facts)), length * (i + 1) // len(facts))
        while len(tokens) < middle:
            tokens += tokenizer.encode(f" {next(hay)}")
        tokens += tokenizer.encode(f" {fact}{word}.")
        while len(tokens) < end:
            tokens += tokenizer.encode(f" {next(hay)}")
    questions = [list(tokenizer.encode(f" {fact}")) for fact in facts]
    return Haystack(tokens, questions, [tokenizer.encode(word)[0] for word in words])


def _hay(order: random.Random) -> Iterator[str]:
    while True:
        yield from order.sample(HAY, len(HAY))


@torch.inference_mode()
def ask(model: Transformer, hay: Haystack, kv: KVKind = "auto") -> Tensor:
    """Log-probabilities float32 [questions, vocab] of each answer's first token. The text is computed once, in pieces, and every
    question then reads it from the store, as a prefix cache would have it."""
    full = len(hay.tokens) // BLOCK
    ends = [[*hay.tokens[full * BLOCK :], *question] for question in hay.questions]
    each = -(-max(map(len, ends)) // BLOCK)
    store = make_kv(kv, model, (1 + full + each * len(ends)) * BLOCK)
    text = list(range(1, full + 1))
    for start in range(0, full * BLOCK, CHUNK):
        piece = hay.tokens[start : min(start + CHUNK, full * BLOCK)]
        _pass(model, store, [Row(piece, start, text[: -(-(start + len(piece)) // BLOCK)], wants_logits=False)])
    tables = [[*text, *range(1 + full + i * each, 1 + full + (i + 1) * each)] for i in range(len(ends))]
    hidden = _pass(model, store, [Row(end, full * BLOCK, table) for end, table in zip(ends, tables, strict=True)])
    return model.head(hidden).float().log_softmax(-1).cpu()


def _pass(model: Transformer, store: KVStore, rows: Sequence[Row]) -> Tensor:
    batch = ForwardBatch.build(list(rows), BLOCK, device=model.device)
    backend = TorchAttention(model.config.sliding_window)
    return model.hidden(batch, store, backend, backend.plan(batch, model.dtype))


def divergence(reference: Tensor, ours: Tensor) -> float:
    """Mean KL in nats from the reference's distributions to ours; both log-probabilities [n, vocab]."""
    return max(0.0, float((reference.exp() * (reference - ours)).sum(-1).mean()))
