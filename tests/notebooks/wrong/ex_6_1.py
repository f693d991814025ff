"""Plausible wrong answers to exercise 6.1, each with the check at which it must be red."""

import torch

from minillm.course.labs.speculation import limit


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


def counted(rule, p, q, draws, generator=None, same=False, drafts=None):
    generator = generator or torch.Generator().manual_seed(3)
    numbers = torch.rand(draws, 2, generator=generator, dtype=torch.float64).tolist()
    tokens = torch.multinomial(q if drafts is None else drafts, draws, replacement=True, generator=generator).tolist()
    counts = torch.zeros(len(p), dtype=torch.float64)
    for token, (u, w) in zip(tokens, numbers):
        counts[rule(p, q, token, u, u if same else w)[0]] += 1
    return counts


def keeps_it(counts, p, draws):
    can = p > 0
    if counts[~can].any():
        return False
    expected = draws * p[can]
    return bool(((counts[can] - expected) ** 2 / expected).sum() < limit(max(1, int(can.sum()) - 1)))


def the_statistic(rule, p, q, draws):
    counts = counted(rule, p, q, draws)
    return float(((counts - draws * p) ** 2 / (draws * p)).sum())


def a_percent_is_near_enough(rule, p, q, draws):
    return bool((counted(rule, p, q, draws) / draws - p).abs().max() < 0.05)


def exactly_equal(rule, p, q, draws):
    return bool((counted(rule, p, q, draws) / draws - p).abs().max() < 1e-3)


def the_likeliest_only(rule, p, q, draws):
    best = int(p.argmax())
    share = counted(rule, p, q, draws)[best] / draws
    return bool((share - p[best]).abs() < 4 * (p[best] * (1 - p[best]) / draws) ** 0.5)


def acceptance_instead(rule, p, q, draws):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.multinomial(q, draws, replacement=True, generator=generator).tolist()
    numbers = torch.rand(draws, 2, generator=generator, dtype=torch.float64).tolist()
    stood = sum(rule(p, q, t, u, w)[1] for t, (u, w) in zip(tokens, numbers)) / draws
    return abs(stood - float(torch.minimum(p, q).sum())) < 0.02


def divides_by_zero(rule, p, q, draws):
    counts = counted(rule, p, q, draws)
    return bool(((counts - draws * p) ** 2 / (draws * p)).sum() < limit(len(p) - 1))


def overlooks_the_impossible(rule, p, q, draws):
    counts = counted(rule, p, q, draws)
    can = p > 0
    expected = draws * p[can]
    return bool(((counts[can] - expected) ** 2 / expected).sum() < limit(max(1, int(can.sum()) - 1)))


def drafts_from_the_target(rule, p, q, draws):
    return keeps_it(counted(rule, p, q, draws, drafts=torch.where(q > 0, p + q, q)), p, draws)


def one_random_number(rule, p, q, draws):
    return keeps_it(counted(rule, p, q, draws, same=True), p, draws)


def ten_times_as_many(rule, p, q, draws):
    return keeps_it(counted(rule, p, q, 2 * draws), p, 2 * draws)


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
        (the_statistic, "shape"),
        (exactly_equal, "exact: rules that keep p"),
        (one_random_number, "exact: rules that keep p"),
        (acceptance_instead, "exact: rules that keep p"),
        (a_percent_is_near_enough, "exact: five careless rules"),
        (the_likeliest_only, "exact: five careless rules"),
        (divides_by_zero, "edges: tokens of probability 0"),
        (overlooks_the_impossible, "edges: tokens of probability 0"),
        (drafts_from_the_target, "exact: rules that keep p"),
        (ten_times_as_many, "budget: calls of the rule"),
    ],
}
