"""The seam for drafts: who guesses the next tokens of a request, and with what probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence

from torch import Tensor

from minillm.engine.request import Request


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

    def first(self, n: int) -> "Draft":
        """The draft cut to its first n tokens."""
        return self if n >= len(self) else Draft(self.token_ids[:n], None if self.probs is None else self.probs[:n])


class Proposer(Protocol):
    """Guesses tokens. Of the requests that it sees, all tokens but the last are computed; it changes none of them."""

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> Sequence[Draft]:
        """One draft for each request, of at most lengths[i] tokens; fewer, or none, where it has no good guess.

        The requests hold KV slots for that many tokens more than they have."""
        ...
