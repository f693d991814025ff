"""A draft: tokens that somebody guesses for a request."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

SLACK = 1e-3
"""How far from 1 the sum of a draft's probabilities may be: what rounding to 16 bits costs, and no more."""


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for one request, in order.

    probs: [len(token_ids), vocab] float64, the distribution that each token was drawn from; None where the proposer does not
    draw but names one token with certainty (a lookup, an argmax): such a draft is accepted by the one-hot rule.
    """

    token_ids: tuple[int, ...] = ()
    probs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


NO_DRAFT = Draft()


def checked(draft: Draft, length: int, vocab_size: int) -> Draft:
    """The same draft, its tokens as whole numbers and its probabilities in float64. ValueError where it is no draft of at most
    ``length`` tokens, or its probabilities are not those that its tokens can have been drawn with: then the accept rule, which
    divides by them, would say what the target does not."""
    if not isinstance(draft, Draft):
        raise ValueError(f"must return Drafts, got {draft!r:.60}")
    try:
        ids = tuple(operator.index(t) for t in draft.token_ids)
    except TypeError:
        raise ValueError(f"drafted {draft.token_ids!r:.60}, which are no token ids") from None
    if len(ids) > length:
        raise ValueError(f"drafted {len(ids)} tokens where at most {length} were asked for")
    bad = next((t for t in ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise ValueError(f"drafted token {bad}, outside the vocabulary of {vocab_size}")
    return Draft(ids) if draft.probs is None else Draft(ids, _distributions(draft.probs, ids, vocab_size))


def _distributions(probs: Tensor, ids: tuple[int, ...], vocab_size: int) -> Tensor:
    shape = (len(ids), vocab_size)
    if not isinstance(probs, Tensor) or tuple(probs.shape) != shape:
        what = tuple(probs.shape) if isinstance(probs, Tensor) else probs
        raise ValueError(f"gave probs of shape {what!r:.60}; those of a draft of {shape[0]} are a tensor of shape {shape}")
    if not probs.is_floating_point() or probs.layout != torch.strided:
        raise ValueError(f"gave probs of {probs.dtype}, {probs.layout}; probabilities are floating-point numbers, dense ones")
    probs = probs.detach().double()
    wrong = ~((probs >= 0) & (probs <= 1 + SLACK))  # also what is not a number
    if wrong.any():
        row, token = wrong.nonzero()[0].tolist()
        value = float(probs[row, token])
        raise ValueError(f"gave the probability {value} to token {token} at place {row}; it must be from 0 to 1")
    for place, (row, token) in enumerate(zip(probs, ids, strict=True)):
        if abs(float(row.sum()) - 1) > SLACK:
            raise ValueError(f"gave probs at place {place} that sum to {float(row.sum()):.6g}, not to 1")
        if not row[token] > 0:
            raise ValueError(f"drafted token {token} at place {place}, to which its own probs give {float(row[token])}")
    return probs
