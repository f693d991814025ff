"""The seam for drafts: who guesses the next tokens of a request, and with what probability."""

from __future__ import annotations

from typing import Protocol, Sequence

from minillm.engine.request import Request
from minillm.spec.draft import Draft


class Proposer(Protocol):
    """Guesses tokens. Of the requests that it sees, all tokens but the last are computed; it changes none of them.

    More is optional. ``price``: what one drafted token costs to make, in steps of the target. ``weight_bytes``: held beside the
    target. ``forget(request_id)``: a request has ended. ``take_work() -> Work``: what was computed since the last call. With
    ``wants_hidden = True`` the engine calls ``observe(requests, states)`` after each pass, states [requests, hidden] being those
    that gave each request's last token.
    """

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> Sequence[Draft]:
        """One draft for each request, of at most lengths[i] tokens; fewer, or none, where it has no good guess.

        The requests hold KV slots for that many tokens more than they have."""
        ...
