"""A draft: tokens that somebody guesses for a request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
