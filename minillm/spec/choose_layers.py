"""Which layers of a model draft best for it: ``python -m minillm.spec.choose_layers``.

Greedy: from all layers, leave out the one whose loss costs the least acceptance, again and again. Acceptance is counted on text
that the model itself wrote: how often the layers that are left name the token that the whole model went on with (Zhang et al.
2023, Draft & Verify, arXiv 2309.08168, search such a set with Bayesian optimisation).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Sequence

import torch

from minillm.attention.choice import torch_attention
from minillm.cache.choice import plain_store
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.sampler import most_likely
from minillm.llm import LLM
from minillm.model.transformer import Transformer
from minillm.sampling_params import SamplingParams
from minillm.spec.train_mtp import HELD_OUT, prompts

BLOCK = 16
KEPT = {
    25: (0, 1, 2, 3, 5, 6, 8, 9, 10, 11, 13, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 27, 28, 29),
    20: (0, 1, 2, 3, 8, 9, 10, 11, 15, 16, 17, 18, 19, 20, 21, 23, 24, 27, 28, 29),
    16: (0, 1, 2, 8, 10, 11, 15, 16, 17, 18, 19, 20, 23, 24, 28, 29),
}
"""Layers of smollm2-135m that this script kept: right on 388, 287 and 208 of 534 tokens. None of fewer than 30 was right on a
larger share of tokens than it costs of a pass: acceptance falls faster than the price."""


@dataclass(frozen=True)
class Agreement:
    """right: of so many judged tokens of the text, those that the drafter names when all before them are given."""

    layers: tuple[int, ...]
    right: int
    judged: int

    @property
    def alpha(self) -> float:
        return self.right / self.judged


@torch.inference_mode()
def agreement(draft: Transformer, texts: Sequence[tuple[Sequence[int], int]]) -> tuple[int, int]:
    """(right, judged) of a drafter on texts, each (all token ids, length of the prompt): all texts in one pass."""
    rows: list[Row] = []
    at: list[int] = []  # the tokens whose logits are wanted
    wanted: list[int] = []
    blocks, tokens = 1, 0
    for ids, prompt_len in texts:
        num_blocks = -(-len(ids) // BLOCK)
        rows.append(Row(ids, 0, range(blocks, blocks + num_blocks)))
        at += range(tokens + prompt_len - 1, tokens + len(ids) - 1)
        wanted += ids[prompt_len:]
        blocks, tokens = blocks + num_blocks, tokens + len(ids)
    batch = dataclasses.replace(ForwardBatch.build(rows, BLOCK, device=draft.device), logit_indices=torch.tensor(at))
    store = plain_store(draft.config, blocks * BLOCK, draft.dtype, draft.device, shared=True)
    backend = torch_attention(draft.config, draft.config.sliding_window)
    best = most_likely(draft(batch, store, backend, backend.plan(batch, draft.dtype)))
    return sum(a == b for a, b in zip(best, wanted, strict=True)), len(wanted)


def leave_out(model: Transformer, texts: Sequence[tuple[Sequence[int], int]], fewest: int, width: int) -> Iterator[Agreement]:
    """The best set found of each size, from all layers down to ``fewest``.

    The first round tries to leave out each layer, a later one the ``width`` layers whose loss last cost least. Equal acceptance:
    the earliest goes."""
    kept = tuple(range(model.config.num_layers))
    yield Agreement(kept, *agreement(model, texts))
    last = dict.fromkeys(kept, 0)  # layer: tokens that were still right without it, when that was tried last
    tried = kept
    while len(kept) > fewest:
        found = {gone: _without(model, texts, kept, gone) for gone in tried}
        last.update({gone: a.right for gone, a in found.items()})
        gone = max(sorted(found), key=lambda layer: found[layer].right)
        kept = found[gone].layers
        yield found[gone]
        tried = tuple(sorted(kept, key=lambda layer: -last[layer])[:width])


def _without(model: Transformer, texts: Sequence[tuple[Sequence[int], int]], kept: Sequence[int], gone: int) -> Agreement:
    layers = tuple(i for i in kept if i != gone)
    return Agreement(layers, *agreement(model.skipping(layers), texts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose the layers of a model that draft best for it.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts whose answers judge")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--fewest", type=int, default=12, help="layers to stop at")
    parser.add_argument("--width", type=int, default=8, help="layers to try in each round but the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the sets and their counts there as JSON")
    args = parser.parse_args()
    llm = LLM(args.model)
    chosen = prompts(args.seed)[-HELD_OUT:][: args.prompts]
    outputs = llm.chat([[{"role": "user", "content": text}] for text in chosen], SamplingParams(max_tokens=args.tokens))
    texts = [([*o.prompt_token_ids, *o.token_ids], len(o.prompt_token_ids)) for o in outputs]
    found = []
    for best in leave_out(llm.model, texts, args.fewest, args.width):
        found.append(dataclasses.asdict(best))
        print(f"{len(best.layers):2} layers: {best.right} of {best.judged} = {best.alpha:.3f}  {list(best.layers)}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
