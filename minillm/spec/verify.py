"""The accept rule: which drafted tokens the model would have said itself. It never changes the distribution of the answer."""

from __future__ import annotations

import operator
from typing import Protocol, Sequence

import torch
from torch import Tensor

from minillm.engine.sampler import Sampled, Sampling, distribution, draw, logprobs_of, most_likely, pick, sample, uniform
from minillm.spec.draft import Draft

ACCEPT, RESIDUAL = 1, 2
"""Streams of random numbers beside the sampler's stream 0: one decides acceptance, one draws what replaces a refused token."""


class AcceptRule(Protocol):
    """What stands where ``token`` was drawn from q and the target's distribution is p, both [vocab] float64 (temperature and
    filters applied), decided by two numbers u and w in [0, 1): (the token, whether it is the drafted one)."""

    def __call__(self, p: Tensor, q: Tensor, token: int, u: float, w: float, /) -> tuple[int, bool]: ...


class Seat(Sampling, Protocol):
    """What a row of a step is verified with."""

    @property
    def draft(self) -> Draft: ...


def accept_or_replace(p: Tensor, q: Tensor, token: int, u: float, w: float) -> tuple[int, bool]:
    """The AcceptRule that keeps p exactly: accept with min(1, p / q), else draw from max(0, p - q).

    Always a token of positive p, also where q has mass and p has none."""
    if u * float(q[token]) < float(p[token]):
        return token, True
    residual = (p - q).clamp(min=0)
    if not float(residual.sum()) > 0:  # p and q are equal up to rounding: then any draw from p is right
        residual = p
    return pick(None, residual, w), False


def verify_all(logits: Tensor, seats: Sequence[Seat], rule: AcceptRule = accept_or_replace) -> list[list[Sampled]]:
    """The next tokens of every seat. logits: [samples, vocab], for each seat in turn one row more than it has drafted tokens."""
    if not any(seat.draft for seat in seats):
        return [[token] for token in sample(logits[: len(seats)], seats)]
    best, tokens, first = most_likely(logits), [], 0
    for seat in seats:
        stop = first + len(seat.draft) + 1
        tokens.append(verify(logits[first:stop], seat, seat.draft, best[first:stop], rule))
        first = stop
    return tokens


def verify(
    logits: Tensor, request: Sampling, draft: Draft, best: Sequence[int] | None = None, rule: AcceptRule = accept_or_replace
) -> list[Sampled]:
    """The request's next tokens: the accepted part of the draft, and one more that the model gives for free.

    logits: [len(draft) + 1, vocab]; row i is the model's answer after i drafted tokens. best: each row's most likely token, where
    that is known. Returns between 1 and len(draft) + 1 tokens.

    A certain draft (no probs) is accepted where it equals the token that the model samples there anyway: it is accepted with the
    model's probability of it, and every token is the one that decoding without drafts gives. A drawn draft x ~ q is accepted with
    probability min(1, p(x) / q(x)), else the token is drawn from max(0, p - q), normalised (Leviathan et al. 2022,
    arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): the distribution is the model's, the single tokens may differ.
    """
    if logits.shape[0] != len(draft) + 1:
        raise ValueError(f"a draft of {len(draft)} tokens is verified by {len(draft) + 1} rows of logits, got {logits.shape[0]}")
    params, out = request.params, []
    greedy = most_likely(logits) if best is None and params.temperature == 0 else best or []
    for i in range(len(draft) + 1):
        position = request.num_tokens + i
        if i == len(draft) or params.temperature == 0 or draft.probs is None:
            token = greedy[i] if params.temperature == 0 else draw(logits[i], request, position)
            accepted = i < len(draft) and token == draft.token_ids[i]
        else:
            u, w = (uniform(request.seed, position, stream) for stream in (ACCEPT, RESIDUAL))
            p, drafted = dense_distribution(logits[i], request), draft.token_ids[i]
            token, accepted = _answer(rule(p, draft.probs[i], drafted, u, w), p, drafted)
        out.append(Sampled(token, logprobs_of(logits[i], token, params.logprobs)))
        if not accepted:
            break
    return out


def _answer(answer: tuple[int, bool], p: Tensor, drafted: int) -> tuple[int, bool]:
    """What an accept rule of somebody's own gave, if it is an answer."""
    try:
        token, accepted = operator.index(answer[0]), bool(answer[1])
    except (TypeError, LookupError, ValueError, RuntimeError):  # the last: a tensor of several numbers
        raise ValueError(f"an accept_rule gives (token id, whether the drafted token stands), got {answer!r:.60}") from None
    if not 0 <= token < len(p) or not p[token] > 0:
        raise ValueError(f"the accept_rule chose token {token}, which the target cannot say there")
    if accepted and token != drafted:
        raise ValueError(f"the accept_rule accepts token {token} where token {drafted} was drafted")
    return token, accepted


def dense_distribution(row: Tensor, request: Sampling) -> Tensor:
    """What the request's parameters make of row [vocab]: float64 probabilities over the whole vocabulary."""
    params = request.params
    ids, probs = distribution(row, params.temperature, params.top_k, params.top_p)
    return probs if ids is None else torch.zeros(len(row), dtype=probs.dtype, device=row.device).scatter_(0, ids, probs)
