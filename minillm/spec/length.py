"""How many tokens to draft: the number whose expected speed-up is the largest, which may be none."""

from __future__ import annotations

from dataclasses import dataclass

CHECK_PRICE = 0.05
"""What one more drafted token adds to a step, in steps: nine tokens in one pass took 1.1 to 1.6 times one, on two CPU cores,
which makes 0.01 to 0.07 for each of the eight."""
MEMORY = 0.9
"""Weight of the past after each draft: text changes its nature, and an old acceptance says little."""


def tokens_per_pass(alpha: float, length: int) -> float:
    """Expected tokens of a pass that checks ``length`` drafted tokens, each accepted with probability alpha if those before it
    were: 1 + alpha + … + alpha**length (Leviathan et al. 2022, arXiv 2211.17192)."""
    return sum(alpha**k for k in range(length + 1))


def speedup(alpha: float, length: int, price: float) -> float:
    """Tokens per time against decoding without drafts, where a drafted token costs ``price`` of a step to make and to check."""
    return tokens_per_pass(alpha, length) / (1 + length * price)


def best_length(alpha: float, longest: int, price: float) -> int:
    """The draft length of the largest expected speed-up; 0 where drafting does not pay."""
    return max(range(longest + 1), key=lambda n: (speedup(alpha, n, price), -n))


@dataclass
class DraftLength:
    """The draft length of one request, from its own acceptance.

    longest: tokens at most. price: of a drafted token, in steps. When drafting does not pay, one token is drafted every
    ``patience``-th time all the same, to notice that the text has become predictable.
    """

    longest: int
    price: float = CHECK_PRICE
    patience: int = 8
    accepted: float = 1.0  # before anything is known, a draft is worth a try
    refused: float = 0.5
    silent: int = 0

    @property
    def alpha(self) -> float:
        """Estimated probability that a drafted token is accepted when all before it were."""
        return self.accepted / (self.accepted + self.refused)

    def next(self) -> int:
        """Tokens to draft now."""
        n = best_length(self.alpha, self.longest, self.price)
        self.silent = 0 if n else self.silent + 1
        if self.silent == self.patience:
            self.silent = 0
            return min(1, self.longest)
        return n

    def tell(self, drafted: int, accepted: int) -> None:
        """What came of the last draft. A refused token ends the trial: those after it say nothing."""
        if drafted:
            self.accepted = MEMORY * self.accepted + accepted
            self.refused = MEMORY * self.refused + (accepted < drafted)
