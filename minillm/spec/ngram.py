"""Prompt lookup: what followed the last time these tokens stood here? It costs no model, and shines where an answer copies."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from minillm.engine.request import Request
from minillm.spec.draft import Draft


class NgramProposer:
    """Proposes what followed the latest earlier occurrence of the request's last tokens, in its prompt or its own answer
    (Saxena 2023, prompt lookup decoding; Yang et al. 2023, arXiv 2304.04487).

    The longest suffix of at most ``longest`` tokens that occurs earlier is used; one shorter than ``shortest`` is no evidence.
    """

    def __init__(self, longest: int = 4, shortest: int = 1):
        if not 1 <= shortest <= longest:
            raise ValueError(f"an n-gram of shortest={shortest} to longest={longest} tokens: 1 <= shortest <= longest is needed")
        self.longest, self.shortest = longest, shortest

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        return [Draft(self.continuation(r.token_ids, n)) for r, n in zip(requests, lengths, strict=True)]

    def continuation(self, token_ids: Sequence[int], length: int) -> tuple[int, ...]:
        """``length`` tokens that followed the latest earlier occurrence of the longest suffix that has one, () where none has.

        An occurrence that reaches the end of what is known goes on with its own copy: a repetition is expected to repeat."""
        ids = np.asarray(token_ids, dtype=np.int64)
        ends = np.flatnonzero(ids[:-1] == ids[-1]) if length > 0 else np.empty(0, dtype=np.int64)  # where such a suffix may end
        matched, found = 1, ends
        while matched < self.longest and len(ends):
            ends = ends[ends >= matched]
            ends = ends[ids[ends - matched] == ids[-1 - matched]]
            if len(ends):
                matched, found = matched + 1, ends
        if matched < self.shortest or not len(found):
            return ()
        start = int(found[-1]) + 1
        period = len(ids) - start
        return tuple(int(ids[start + i % period]) for i in range(length))
