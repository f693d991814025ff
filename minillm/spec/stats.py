"""What speculation brought one request, in counts."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DraftStats:
    """passes: of the target that gave this request tokens. drafted, accepted: tokens. tried: drafted tokens that were judged: the
    accepted ones and the first refused one of each draft, not those behind it."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    tried: int = 0

    @property
    def alpha(self) -> float:
        """How likely a drafted token is accepted when those before it were: accepted of tried. 0 where nothing was drafted."""
        return self.accepted / self.tried if self.tried else 0.0

    @property
    def accepted_share(self) -> float:
        """Accepted of drafted, the rate that serving engines print: smaller than alpha, since what follows a refusal counts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Mean length of a pass's answer: its accepted tokens and the one that the target adds."""
        return (self.passes + self.accepted) / self.passes if self.passes else 0.0

    def plus(self, drafted: int, accepted: int) -> "DraftStats":
        """After one more pass."""
        tried = accepted + (accepted < drafted)
        return replace(
            self, passes=self.passes + 1, drafted=self.drafted + drafted, accepted=self.accepted + accepted,
            tried=self.tried + tried,
        )  # fmt: skip
