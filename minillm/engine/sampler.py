"""From logits to tokens: temperature, then top-k, then top-p, then one random number per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.sampling_params import SamplingParams

CANDIDATES = 1024
"""Filters look at this many most likely tokens first; a full sort follows only where their mass does not suffice."""


class Sampling(Protocol):
    """What a token depends on besides its logits: a request, or what is known of one when its step is launched."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprobs: dict[int, float] | None


def sample(logits: Tensor, requests: Sequence[Sampling]) -> list[Sampled]:
    """logits [rows, vocab], one row per request. A row's token depends on that row, its parameters, its seed and the number
    of tokens before it, never on the rows beside it."""
    tokens = most_likely(logits)
    for i, request in enumerate(requests):
        if request.params.temperature > 0:
            tokens[i] = draw(logits[i], request, request.num_tokens)
    return [Sampled(t, logprobs_of(row, t, r.params.logprobs)) for row, t, r in zip(logits, tokens, requests, strict=True)]


def most_likely(logits: Tensor) -> list[int]:
    """The id of each row's highest logit, the lowest id among equals. logits [rows, vocab]."""
    if logits.device.type == "cpu":
        # numpy's argmax, conversion included, takes a tenth of what torch's takes on 16-bit rows
        wide = (logits if logits.dtype == torch.float64 else logits.float()).numpy()
        tokens = wide.argmax(axis=-1).tolist()
        values = [row[t] for row, t in zip(wide, tokens, strict=True)]
    else:
        best = logits.max(dim=-1)
        tokens, values = best.indices.tolist(), best.values.tolist()
    if any(v != v for v in values):  # a NaN is the maximum of any row that holds one
        raise RuntimeError("the model returned NaN logits; no token can be chosen from them")
    return tokens


def draw(row: Tensor, request: Sampling, position: int) -> int:
    """The token at this position of the request, from row [vocab] under its parameters."""
    params = request.params
    ids, probs = distribution(row, params.temperature, params.top_k, params.top_p)
    return pick(ids, probs, uniform(request.seed, position))


def distribution(row: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor | None, Tensor]:
    """The filtered distribution of row [vocab]: token ids (None for all, in order) and float64 probabilities that sum to 1.

    With filters, tokens stand in order of falling probability, equal ones by rising id.
    """
    row = row.double()
    scaled = (row - row.max()) / temperature  # the maximum goes first, so that a tiny temperature cannot overflow
    probs = torch.softmax(scaled, dim=-1)
    if top_k == 0 and top_p >= 1.0:
        return None, probs
    vocab = len(row)
    k = min(top_k or vocab, vocab)
    ids, kept = _most_likely(probs, min(CANDIDATES, vocab))
    if k > len(ids) and (k < vocab or kept.sum() < top_p):
        ids, kept = _most_likely(probs, vocab)
    ids, kept = ids[:k], kept[:k]
    if top_p < 1.0:
        mass = kept.sum() if k < vocab else 1.0  # what top_p is a share of: all that top-k left, not only the candidates
        before = kept.cumsum(0) - kept
        keep = int((before < top_p * mass).sum().clamp(min=1))
        ids, kept = ids[:keep], kept[:keep]
    return ids, kept / kept.sum()


def _most_likely(probs: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n most likely ids, by falling probability and, among equals, rising id."""
    if n >= len(probs):
        kept, ids = probs.sort(descending=True, stable=True)
        return ids, kept
    least = probs.topk(n, sorted=False).values.min()
    above = (probs > least).nonzero().flatten()
    level = (probs == least).nonzero().flatten()[: n - len(above)]  # topk takes any of the equal ones at its border
    ids = torch.cat([above, level]).sort().values
    kept, order = probs[ids].sort(descending=True, stable=True)
    return ids[order], kept


def pick(ids: Tensor | None, probs: Tensor, u: float) -> int:
    """Invert the distribution function at u in [0, 1). Always a token of positive probability."""
    cdf = probs.cumsum(0)
    index = int(torch.searchsorted(cdf, u * float(cdf[-1]), right=True))
    if index >= len(probs) or probs[index] == 0:  # rounding at the very end
        index = int(probs.nonzero()[-1])
    return index if ids is None else int(ids[index])


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) that belongs to seed, position, stream: a counter-based generator (Salmon et al. 2011) has no state."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position + (stream << 64))).random())


def logprobs_of(row: Tensor, token: int, n: int | None) -> dict[int, float] | None:
    """Log-probabilities under the model itself, before temperature and filters; the chosen token first."""
    if n is None:
        return None
    logprobs = torch.log_softmax(row.double(), dim=-1)
    top = logprobs.topk(min(n, len(row)))
    return {token: float(logprobs[token])} | dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
