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


def one_border(rule, p, q, draws, border=100):
    counts, can = counted(rule, p, q, draws), p > 0
    expected = draws * p[can]
    return not counts[~can].any() and bool(((counts[can] - expected) ** 2 / expected).sum() < border)


def the_border_of_four_tokens(rule, p, q, draws):
    return one_border(rule, p, q, draws, limit(3) + 25)


def once_in_twenty(rule, p, q, draws):
    counts, can = counted(rule, p, q, draws), p > 0
    expected, degrees = draws * p[can], max(1, int(can.sum()) - 1)
    border = degrees * (1 - 2 / (9 * degrees) + 1.645 * (2 / (9 * degrees)) ** 0.5) ** 3
    return not counts[~can].any() and bool(((counts[can] - expected) ** 2 / expected).sum() < border)


def two_and_a_half_percent(rule, p, q, draws):
    counts = counted(rule, p, q, draws)
    return not counts[p == 0].any() and bool((counts / draws - p).abs().max() < 0.025)


def degrees_of_the_vocabulary(rule, p, q, draws):
    counts, can = counted(rule, p, q, draws), p > 0
    expected = draws * p[can]
    return not counts[~can].any() and bool(((counts[can] - expected) ** 2 / expected).sum() < limit(len(p) - 1))


def at_least_one_expected(rule, p, q, draws):
    expected = (draws * p).clamp(min=1)
    return bool(((counted(rule, p, q, draws) - expected * (p > 0)) ** 2 / expected).sum() < limit(max(1, int((p > 0).sum()) - 1)))


def no_degrees_of_freedom(rule, p, q, draws):
    counts, can = counted(rule, p, q, draws), p > 0
    expected = draws * p[can]
    return not counts[~can].any() and bool(((counts[can] - expected) ** 2 / expected).sum() < limit(int(can.sum()) - 1))


def numpys_bool(rule, p, q, draws):
    return keeps_it(counted(rule, p, q, draws), p, draws) and (counted(rule, p, q, 10).numpy() >= 0).all()


def tokens_as_tensors(rule, p, q, draws):
    def asked(p, q, token, u, w):
        return rule(p, q, torch.tensor(token), u, w)

    return keeps_it(counted(asked, p, q, draws), p, draws)


HAND, LEFT = "exact: when a drafted token stands", "exact: what replaces a refused token"
BORDER = "exact: counts on both sides of the border"
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
        (the_likeliest_only, BORDER),
        (one_border, BORDER),
        (the_border_of_four_tokens, BORDER),
        (once_in_twenty, BORDER),
        (two_and_a_half_percent, BORDER),
        (degrees_of_the_vocabulary, BORDER),
        (at_least_one_expected, "edges: tokens of probability 0"),
        (no_degrees_of_freedom, "edges: tokens of probability 0"),
        (numpys_bool, "shape"),
        (tokens_as_tensors, BORDER),
        (divides_by_zero, "edges: tokens of probability 0"),
        (overlooks_the_impossible, "edges: tokens of probability 0"),
        (drafts_from_the_target, "exact: rules that keep p"),
        (ten_times_as_many, "budget: calls of the rule"),
    ],
}
