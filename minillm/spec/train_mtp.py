"""Train an MTP head on text that the model itself wrote: ``python -m minillm.spec.train_mtp``.

The head learns what the target will say, so the target's own answers are all the data it needs: the prompts below, answered
greedily and at a temperature. Everything is seeded; on two CPU cores it takes about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.engine.batch import ForwardBatch, Row
from minillm.llm import LLM
from minillm.model.transformer import Transformer
from minillm.sampling_params import SamplingParams
from minillm.spec.mtp import HEADS, MTPHead

TOPICS = (
    "rain", "bees", "bread", "volcanoes", "bridges", "the moon", "sleep", "money", "trains", "the heart", "rivers", "clouds",
    "paper", "glass", "music", "chess", "cats", "whales", "deserts", "vaccines", "the internet", "compilers", "databases",
    "batteries", "solar panels", "photosynthesis", "gravity", "earthquakes", "libraries", "democracy", "gardens", "honey",
    "cameras", "bicycles", "tea", "salt", "maps", "clocks", "mathematics", "history",
)  # fmt: skip
QUESTIONS = (
    "What is {}?", "Explain {} to a child in five sentences.", "Give me three facts about {}.", "Why does {} matter?",
    "Write a short story about {}.", "List five questions one could ask about {}.", "How has {} changed over time?",
    "Write a short poem about {}.", "What are the advantages and disadvantages of {}?", "Describe {} in one paragraph.",
)  # fmt: skip
TASKS = (
    "Write a Python function that {}.", "Explain step by step how to {}.", "Write a JSON object that describes how to {}.",
)  # fmt: skip
DOINGS = (
    "sorts a list of numbers", "counts the words of a text", "reverses a string", "finds the largest of three numbers",
    "adds two fractions", "checks whether a number is prime", "removes duplicates from a list", "converts Celsius to Fahrenheit",
    "plans a week of meals", "packs a suitcase", "plants a tree", "learns a language", "repairs a flat tyre", "writes a letter",
)  # fmt: skip
HELD_OUT = 24
"""Prompts that are answered but not learned from: acceptance is measured on them."""
ANSWER_TOKENS = 160


def prompts(seed: int) -> list[str]:
    """All questions about all topics, shuffled."""
    texts = [q.format(t) for q, t in itertools.product(QUESTIONS, TOPICS)]
    texts += [t.format(d) for t, d in itertools.product(TASKS, DOINGS)]
    random.Random(seed).shuffle(texts)
    return texts


def answers(llm: LLM, texts: Sequence[str], seed: int) -> list[tuple[list[int], int]]:
    """What the model answers: (all token ids, length of the prompt). Every second answer is drawn at temperature 0.8."""
    params = [
        SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0 if i % 2 else 0.8, seed=seed + i) for i in range(len(texts))
    ]
    outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    return [([*o.prompt_token_ids, *o.token_ids], len(o.prompt_token_ids)) for o in outputs]


@torch.inference_mode()
def states_of(model: Transformer, token_ids: Sequence[int]) -> Tensor:
    """The normed state of every position of one text, [tokens, hidden] float32."""
    backend, n = TorchAttention(model.config.sliding_window), len(token_ids)
    store = PlainKVStore.allocate(model.config, 2 * n, model.dtype, model.device)
    batch = ForwardBatch.build([Row(token_ids, 0, (1,))], n, device=model.device)
    batch = dataclasses.replace(batch, logit_indices=torch.arange(n, device=model.device))
    return model.hidden(batch, store, backend, backend.plan(batch, model.dtype)).float()


def frequent_tokens(texts: Sequence[Sequence[int]], size: int) -> Tensor:
    """The ``size`` tokens that these texts use most, filled up with the lowest ids: a tokenizer learned frequent ones first."""
    counted = [t for t, _ in Counter(itertools.chain.from_iterable(texts)).most_common(size)]
    seen = set(counted)
    rest = (t for t in itertools.count() if t not in seen)
    return torch.tensor(sorted([*counted, *itertools.islice(rest, size - len(counted))]))


@dataclasses.dataclass(frozen=True)
class Examples:
    """Positions to learn from, places in all states of all texts one after the other.

    states [tokens, hidden]; ids [tokens]; at [n]: places with ``depth`` more states behind them in their text.
    """

    states: Tensor
    ids: Tensor
    at: Tensor
    depth: int

    @classmethod
    def of(cls, model: Transformer, texts: Sequence[tuple[list[int], int]], depth: int) -> "Examples":
        states, at, start = [], [], 0
        for ids, prompt_len in texts:
            states.append(states_of(model, ids))
            first, end = start + prompt_len - 1, start + len(ids) - depth - 1
            at.append(torch.arange(first, max(first, end)))
            start += len(ids)
        return cls(torch.cat(states), torch.tensor([t for ids, _ in texts for t in ids]), torch.cat(at), depth)

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """state [b, hidden]; tokens [b, depth + 1]: the one that the state gave and those after it; later [b, depth, hidden]:
        the states that gave the guessed ones. In the order of a generator, or as they stand."""
        order = torch.randperm(len(self.at), generator=generator) if generator else torch.arange(len(self.at))
        for part in self.at[order].split(size):
            behind = part[:, None] + torch.arange(1, self.depth + 2)
            yield self.states[part], self.ids[behind], self.states[behind[:, :-1]]


def rollout(head: MTPHead, embedding: Tensor, state: Tensor, tokens: Tensor, output: Tensor) -> list[Tensor]:
    """Logits [n, vocab] over the cut vocabulary for each depth; the true tokens are fed, as they are when a draft is accepted."""
    logits = []
    for k in range(tokens.shape[1] - 1):
        state = head(state, embedding[tokens[:, k]])
        logits.append(F.linear(state, output))
    return logits


def train(head: MTPHead, model: Transformer, examples: Examples, epochs: int, batch: int, rate: float, seed: int) -> MTPHead:
    """AdamW with a cosine schedule; cross-entropy to what the target thought likely at each guessed place (Hinton et al. 2015,
    arXiv 1503.02531: it says more than the one token that came), later depths count less."""
    embedding, output = model.embedding.float(), model.head.dense()[0].float()[head.get_buffer("vocab")]
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.05)
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * math.ceil(len(examples.at) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps, pct_start=0.1)
    for epoch in range(epochs):
        losses = []
        for state, tokens, later in examples.batches(batch, generator):
            logits = rollout(head, embedding, state, tokens, output)
            with torch.no_grad():
                likely = F.linear(later, output).softmax(-1)  # [b, depth, vocab]
            terms = [0.8**k * F.cross_entropy(guess, likely[:, k]) for k, guess in enumerate(logits)]
            loss = torch.stack(terms).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(terms[0].item())
        print(f"epoch {epoch + 1} of {epochs}: cross-entropy of the first guess {sum(losses) / len(losses):.3f}", flush=True)
    return head


@torch.no_grad()
def acceptance(head: MTPHead, model: Transformer, examples: Examples) -> list[float]:
    """Share of positions where the first 1, 2, … guesses are all what the model went on to say."""
    embedding, output = model.embedding.float(), model.head.dense()[0].float()[head.get_buffer("vocab")]
    right = torch.zeros(examples.depth)
    for state, tokens, _ in examples.batches(256):
        so_far = torch.ones(len(state), dtype=torch.bool)
        for k, logits in enumerate(rollout(head, embedding, state, tokens, output)):
            so_far &= head.get_buffer("vocab")[logits.argmax(-1)] == tokens[:, k + 1]
            right[k] += so_far.sum()
    return (right / len(examples.at)).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an MTP head on text that the model wrote.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=HEADS / "smollm2-135m.safetensors")
    parser.add_argument("--prompts", type=int, default=440, help="prompts to answer; the last ones are held out")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--depth", type=int, default=3, help="guesses that are trained")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens that can be guessed")
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=Path, help="keep the answers here, and take them from here if they are there")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    llm = LLM(args.model, max_num_seqs=32)
    if args.texts and args.texts.exists():
        texts = [(ids, n) for ids, n in json.loads(args.texts.read_text())]
    else:
        texts = answers(llm, prompts(args.seed)[: args.prompts], args.seed)
        if args.texts:
            args.texts.write_text(json.dumps(texts))
    learned, held_out = texts[:-HELD_OUT], texts[-HELD_OUT:]
    examples, unseen = (Examples.of(llm.model, part, args.depth) for part in (learned, held_out))
    print(f"{len(examples.at)} positions of {len(learned)} answers; {len(unseen.at)} held out", flush=True)
    vocab = frequent_tokens([ids for ids, _ in learned], args.vocab)
    head = train(
        MTPHead(llm.model.config.hidden_size, args.intermediate, vocab), llm.model, examples, args.epochs, args.batch, args.rate,
        args.seed,
    )  # fmt: skip
    shares = acceptance(head, llm.model, unseen)
    print("held out, first 1, 2, … guesses right: " + ", ".join(f"{s:.3f}" for s in shares))
    recipe = {name: str(value) for name, value in vars(args).items() if name not in ("out", "texts")}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    head.save(args.out, {**recipe, "acceptance": json.dumps(shares), "dtype": str(llm.model.dtype)})


if __name__ == "__main__":
    main()
