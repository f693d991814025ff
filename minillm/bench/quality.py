"""What quantisation costs, per task: a small evaluation of prose, code, arithmetic, JSON and retrieval, scored against 16 bits.

Two questions. On plain text: how far do the next-token distributions move (KL divergence), and how often does the most likely
token stay the same? On questions with one right answer: how often is that answer the likeliest of a few? A task counts only where
the unquantised model is well above chance; elsewhere nothing can be lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention
from minillm.bench.quality_text import CHOICES, TEXTS
from minillm.cache.kv_store import KVStore, PlainKVStore
from minillm.cache.quantised_kv import QuantisedKVStore
from minillm.engine.admission import TokenizerLike
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.transformer import Transformer

KVKind = str | Callable[..., KVStore]
"""A kv_dtype, or what makes a store of one's own: called as EngineConfig's kv_store is."""
ABOVE_CHANCE = 1.5
"""A task is informative where 16 bits answer at least so many times as often as guessing would."""


@dataclass(frozen=True)
class Question:
    """A prompt and its continuations; the first is right."""

    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class TextScore:
    """Next-token predictions on one task's text. kl: nats per token, from the reference to the model. agreement: share of tokens
    whose likeliest successor is the reference's. loss: mean negative log-likelihood of the text, nats per token."""

    tokens: int
    kl: float
    agreement: float
    loss: float


@dataclass(frozen=True)
class ChoiceScore:
    """right of questions; chance: what guessing would give."""

    right: int
    questions: int
    chance: float

    @property
    def accuracy(self) -> float:
        return self.right / self.questions

    @property
    def informative(self) -> bool:
        return self.accuracy >= min(ABOVE_CHANCE * self.chance, (1 + self.chance) / 2)


OWN_QUESTIONS: dict[str, list[Question]] = {
    task: [Question(prompt, answers) for prompt, answers in asked] for task, asked in CHOICES.items()
}


class Evaluation:
    """Texts and questions, tokenised once, with the reference model's answers.

    One pass per task and model. texts: {task: text}. choices: {task: questions}. kv of ``text_scores`` and ``choice_scores``:
    the store which the pass goes through.
    """

    def __init__(
        self, reference: Transformer, tokenizer: TokenizerLike, texts: Mapping[str, str] | None = None,
        choices: Mapping[str, Sequence[Question]] | None = None, most: int = 192,
    ):  # fmt: skip
        texts = TEXTS if texts is None else texts
        given = OWN_QUESTIONS if choices is None else choices
        self.rows = {task: list(tokenizer.encode(text))[:most] for task, text in texts.items()}
        self.questions = {
            task: [(list(tokenizer.encode(q.prompt)), [_tail(tokenizer, q.prompt, a) for a in q.answers]) for q in asked]
            for task, asked in given.items()
        }
        self.reference = {task: logprobs(reference, [row])[0] for task, row in self.rows.items()}
        self.reference_choices = self.choice_scores(reference)

    def text_scores(self, model: Transformer, kv: KVKind = "auto") -> dict[str, TextScore]:
        """Per task, against the reference."""
        scores = {}
        for task, row in self.rows.items():
            ours, theirs = logprobs(model, [row], kv)[0][:-1], self.reference[task][:-1]
            kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
            agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
            loss = -ours.gather(1, torch.tensor(row[1:])[:, None]).mean()
            scores[task] = TextScore(len(ours), max(0.0, float(kl)), float(agreement), float(loss))
        return scores

    def choice_scores(self, model: Transformer, kv: KVKind = "auto") -> dict[str, ChoiceScore]:
        """Per task: an answer's score is the mean log-probability of its tokens after the prompt."""
        scores = {}
        for task, asked in self.questions.items():
            rows = [prompt + answer for prompt, answers in asked for answer in answers]
            found = iter(logprobs(model, rows, kv))
            right = 0
            for prompt, answers in asked:
                values = [_mean_logprob(next(found), len(prompt), answer) for answer in answers]
                right += values[0] == max(values) and values.count(values[0]) == 1
            scores[task] = ChoiceScore(right, len(asked), sum(1 / len(a) for _, a in asked) / len(asked))
        return scores


@torch.inference_mode()
def logprobs(model: Transformer, rows: Sequence[Sequence[int]], kv: KVKind = "auto") -> list[Tensor]:
    """Log-probabilities float32 [length, vocab] of each row's next tokens, in one pass of the model over all rows."""
    size = max(map(len, rows))
    batch = ForwardBatch.build([Row(ids, 0, [i + 1]) for i, ids in enumerate(rows)], size, device=model.device)
    batch = ForwardBatch(**{**vars(batch), "logit_indices": torch.arange(batch.num_tokens, device=model.device)})
    store = make_kv(kv, model, (len(rows) + 1) * size, shared=True)
    backend = TorchAttention(model.config.sliding_window)
    logits = model(batch, store, backend, backend.plan(batch, model.dtype))
    return [part.float().log_softmax(-1).cpu() for part in logits.split([len(row) for row in rows])]


def make_kv(kv: KVKind, model: Transformer, num_slots: int, shared: bool = False) -> KVStore:
    """A store for a model. shared: one layer's room for all, where nothing is read after its layer's turn; one of somebody's own
    has every layer's."""
    parts = model.config, num_slots, model.dtype, model.device
    if not isinstance(kv, str):
        return kv(*parts)
    return PlainKVStore.allocate(*parts, shared) if kv == "auto" else QuantisedKVStore.allocate(kv, *parts, shared)


def _tail(tokenizer: TokenizerLike, prompt: str, answer: str) -> list[int]:
    """The answer's tokens as they stand after the prompt."""
    return list(tokenizer.encode(prompt + answer))[len(list(tokenizer.encode(prompt))) :]


def _mean_logprob(found: Tensor, start: int, answer: Sequence[int]) -> float:
    steps = found[start - 1 : start - 1 + len(answer)].gather(1, torch.tensor(answer)[:, None])
    return float(steps.mean()) if len(answer) else -math.inf


def quality_table(
    evaluation: Evaluation, models: Mapping[str, Transformer], note: str, kv_dtypes: Mapping[str, str] | None = None
) -> str:
    """KL and agreement by task of some models, and answers right of those asked, under a note about the weights."""
    lines = [note, f"{'':24}" + "".join(f"{task:>16}" for task in evaluation.rows), "  KL in nats, agreement"]
    kv = kv_dtypes or {}
    for name, model in models.items():
        scores = evaluation.text_scores(model, kv.get(name, "auto"))
        lines.append(f"{name:24}" + "".join(f"{s.kl:9.4f} {s.agreement:5.0%} " for s in scores.values()))
    lines.append(f"{'':24}" + "".join(f"{task:>16}" for task in evaluation.questions))
    lines.append(f"{'reference':24}" + _answers(evaluation.reference_choices))
    for name, model in models.items():
        lines.append(f"{name:24}" + _answers(evaluation.choice_scores(model, kv.get(name, "auto"))))
    return "\n".join(line.rstrip() for line in lines)


def _answers(scores: Mapping[str, ChoiceScore]) -> str:
    return "".join(f"{s.right:>9} of {s.questions:2} " for s in scores.values())
