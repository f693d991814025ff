"""Plausible wrong answers to exercise 6.1, each with the check at which it must be red."""

import torch

from minillm.spec.draft import Draft


def pick(weights, w):
    shares = weights.cumsum(0)
    return int((shares <= w * shares[-1]).sum().clamp(max=len(weights) - 1))


def only_a_token(p, q, token, u, w):
    return token if u * q[token] < p[token] else pick((p - q).clamp(min=0), w)


def the_other_way_round(p, q, token, u, w):
    if u * p[token] < q[token]:
        return token, True
    return pick((p - q).clamp(min=0), w), False


def with_the_models_probability(p, q, token, u, w):
    if u < p[token]:
        return token, True
    return pick((p - q).clamp(min=0), w), False


def from_the_target(p, q, token, u, w):
    return (token, True) if u * q[token] < p[token] else (pick(p, w), False)


def best_of_the_rest(p, q, token, u, w):
    return (token, True) if u * q[token] < p[token] else (int((p - q).argmax()), False)


def one_number_for_both(p, q, token, u, w):
    return (token, True) if u * q[token] < p[token] else (pick((p - q).clamp(min=0), u), False)


def takes_what_cannot_be(p, q, token, u, w):
    return (token, True) if u * q[token] <= p[token] else (pick((p - q).clamp(min=0), w), False)


def left_with_nothing(p, q, token, u, w):
    if u * q[token] < p[token]:
        return token, True
    left = (p - q).clamp(min=0)
    return (pick(left / left.sum(), w), False) if left.sum() > 0 else (len(p) - 1, False)


def the_lessons(p, q, token, u, w):
    if u * q[token] < p[token]:
        return token, True
    shares = (p - q).clamp(min=0).cumsum(0)
    return int(torch.searchsorted(shares, w * shares[-1], right=True)), False


def in_place(p, q, token, u, w):
    if u * q[token] < p[token]:
        return token, True
    left = p.sub_(q).clamp_(min=0)
    return pick(left if left.sum() > 0 else torch.ones_like(left) * (q > 0), w), False


def two_tokens_at_most(draft, rule, sample):
    return [rule(i, t)[0] for i, t in enumerate(draft)][:2]


def replacement_forgotten(draft, rule, sample):
    out = []
    for i, token in enumerate(draft):
        token, stands = rule(i, token)
        if not stands:
            return out
        out.append(token)
    return [*out, sample(len(draft))]


def one_more_in_any_case(draft, rule, sample):
    out = []
    for i, token in enumerate(draft):
        token, stands = rule(i, token)
        out.append(token)
        if not stands:
            break
    return [*out, sample(len(out))]


def drafted_token_kept(draft, rule, sample):
    out = []
    for i, token in enumerate(draft):
        out.append(token)
        if not rule(i, token)[1]:
            return out
    return [*out, sample(len(draft))]


def asks_first(draft, rule, sample):
    verdicts = [rule(i, t) for i, t in enumerate(draft)]
    out = []
    for token, stands in verdicts:
        out.append(token)
        if not stands:
            return out
    return [*out, sample(len(draft))]


def nothing_without_a_draft(draft, rule, sample):
    if not draft:
        return []
    return asks_first(draft, rule, sample) if len(draft) == 1 else one_by_one(draft, rule, sample)


def one_by_one(draft, rule, sample):
    out = []
    for i, token in enumerate(draft):
        token, stands = rule(i, token)
        out.append(token)
        if not stands:
            return out
    return [*out, sample(len(draft))]


def look(ids, n, sizes=(3, 2, 1), latest=True):
    for size in sizes:
        places = [at for at in range(len(ids) - size) if ids[at : at + size] == ids[-size:]] if len(ids) > size else []
        if places:
            at = places[-1 if latest else 0]
            return tuple(ids[at + size : at + size + n])
    return ()


class GivesTuples:
    def propose(self, requests, lengths):
        return [look(r.token_ids, n) for r, n in zip(requests, lengths)]


class FirstPlace:
    def propose(self, requests, lengths):
        return [Draft(look(r.token_ids, n, latest=False)) for r, n in zip(requests, lengths)]


class ShortestFirst:
    def propose(self, requests, lengths):
        return [Draft(look(r.token_ids, n, (1, 2, 3))) for r, n in zip(requests, lengths)]


class OnlyThree:
    def propose(self, requests, lengths):
        return [Draft(look(r.token_ids, n, (3,))) for r, n in zip(requests, lengths)]


class FourTokens:
    def propose(self, requests, lengths):
        return [Draft(look(r.token_ids, n, (4, 3, 2, 1))) for r, n in zip(requests, lengths)]


class FindsItself:
    def propose(self, requests, lengths):
        return [Draft(look([*r.token_ids, r.token_ids[-1]][: len(r.token_ids)], n) or tuple(r.token_ids[-1:] * n)) for r, n in
                zip(requests, lengths)]  # fmt: skip


class OneLengthForAll:
    def propose(self, requests, lengths):
        return [Draft(look(r.token_ids, max(lengths))) for r in requests]


HAND, LEFT = "exact: when a drafted token stands", "exact: what replaces a refused token"
WRONG = {
    "6.1 core": [
        (only_a_token, "shape"),
        (the_other_way_round, HAND),
        (with_the_models_probability, HAND),
        (from_the_target, HAND),
        (best_of_the_rest, LEFT),
        (one_number_for_both, LEFT),
        (takes_what_cannot_be, "edges: probabilities of 0 and 1"),
        (left_with_nothing, "edges: nothing is left over but rounding"),
        (the_lessons, "edges: nothing is left over but rounding"),
        (in_place, "state: inputs unchanged"),
    ],
    "6.1 break": [
        (two_tokens_at_most, "shape"),
        (replacement_forgotten, "exact: nothing refused; refused in the middle"),
        (one_more_in_any_case, "exact: nothing refused; refused in the middle"),
        (drafted_token_kept, "exact: nothing refused; refused in the middle"),
        (nothing_without_a_draft, "edges: no draft, one token, the first or the last refused"),
        (asks_first, "state: nothing is asked behind a refusal"),
    ],
    "6.1 stretch": [
        (GivesTuples, "shape"),
        (FirstPlace, "exact: the longest match, the latest place"),
        (ShortestFirst, "exact: the longest match, the latest place"),
        (OnlyThree, "exact: the longest match, the latest place"),
        (FourTokens, "exact: the longest match, the latest place"),
        (FindsItself, "random: against every place and size"),
        (OneLengthForAll, "edges: several requests of different lengths"),
    ],
}
