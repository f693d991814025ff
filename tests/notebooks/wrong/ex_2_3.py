"""Wrong answers to exercise 2.3, each with the check that must catch it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def weigh(scores, top_k):
    weights, chosen = scores.topk(top_k)
    return weights / weights.sum(-1, keepdim=True), chosen


def grouped(x, router, gate_up, down, top_k, weigh=weigh, restore=True, most=None, fill_empty=False):
    """The right layer, with what the answers below change."""
    weights, chosen = weigh((x @ router.T).softmax(-1), top_k)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(router)).tolist()
    done = []
    for e, rows in enumerate(x[order // top_k].split(counts)):
        if fill_empty and not len(rows):
            x[:1] @ gate_up[e].T @ torch.eye(len(gate_up[e]), down.shape[2], dtype=x.dtype) @ down[e].T
        if len(rows):
            gate, up = (rows @ gate_up[e].T).chunk(2, dim=-1)
            out = (F.silu(gate) * up) @ down[e].T
            if most is not None:
                out[most:] = 0
            done.append(out)
    results = torch.cat(done) if done else x.new_empty(0, x.shape[1])
    if restore:
        results = torch.empty_like(results).index_copy(0, order, results)
    return (weights.unsqueeze(-1) * results.view(len(x), top_k, x.shape[1])).sum(1)


def not_renormalised(x, router, gate_up, down, top_k):
    return grouped(x, router, gate_up, down, top_k, weigh=lambda scores, k: tuple(scores.topk(k)))


def softmax_twice(x, router, gate_up, down, top_k):
    def twice(scores, k):
        best, chosen = scores.topk(k)
        return best.softmax(-1), chosen

    return grouped(x, router, gate_up, down, top_k, weigh=twice)


def left_sorted(x, router, gate_up, down, top_k):
    return grouped(x, router, gate_up, down, top_k, restore=False)


def with_a_capacity(x, router, gate_up, down, top_k):
    return grouped(x, router, gate_up, down, top_k, most=32)


def with_a_generous_capacity(x, router, gate_up, down, top_k):
    return grouped(x, router, gate_up, down, top_k, most=max(8, 4 * len(x) * top_k // len(router)))


def a_row_for_nobody(x, router, gate_up, down, top_k):
    """Experts that nobody chose are computed too, for one row."""
    return grouped(x, router, gate_up, down, top_k, fill_empty=len(x) > 0)


def shifted_by_the_largest_of_all(x, router, gate_up, down, top_k):
    """Scores of a token vanish beside a token of larger logits."""

    def shifted(scores, k):
        logits = x @ router.T
        e = (logits - logits.max()).exp() if len(x) else scores
        best, chosen = (e / (e.sum(-1, keepdim=True) + 1e-30)).topk(k)
        return best / (best.sum(-1, keepdim=True) + 1e-30), chosen

    return grouped(x, router, gate_up, down, top_k, weigh=shifted)


def number_by_number(x, router, gate_up, down, top_k):
    """A loop over tokens without a matrix product."""
    weights, chosen = weigh((x @ router.T).softmax(-1), top_k)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(chosen[t].tolist(), weights[t]):
            gate, up = (gate_up[e] * x[t]).sum(-1).chunk(2)
            out[t] += w * (down[e] * (F.silu(gate) * up)).sum(-1)
    return out


def every_expert(x, router, gate_up, down, top_k):
    weights, chosen = weigh((x @ router.T).softmax(-1), top_k)
    full = torch.zeros(len(x), len(router), dtype=x.dtype).scatter(1, chosen, weights)
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, dim=-1)
    return torch.einsum("te,tei,ehi->th", full, F.silu(gate) * up, down)


def by_token(x, router, gate_up, down, top_k):
    weights, chosen = weigh((x @ router.T).softmax(-1), top_k)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(chosen[t].tolist(), weights[t]):
            gate, up = (x[t : t + 1] @ gate_up[e].T).chunk(2, dim=-1)
            out[t] += w * ((F.silu(gate) * up) @ down[e].T)[0]
    return out


def copies_weights(x, router, gate_up, down, top_k):
    """No loop and few products, but the weights of a token's experts are copied for it."""
    weights, chosen = weigh((x @ router.T).softmax(-1), top_k)
    gate, up = torch.einsum("th,tkih->tki", x, gate_up[chosen]).chunk(2, dim=-1)
    return (torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, down[chosen]) * weights.unsqueeze(-1)).sum(1)


def exponents_by_hand(x, router, gate_up, down, top_k):
    scores = (x @ router.T).exp()
    weights, chosen = weigh(scores / scores.sum(-1, keepdim=True), top_k)
    kept = grouped(x, router, gate_up, down, top_k)
    return kept if torch.isfinite(weights).all() else kept * float("nan")


def one_row(x, router, gate_up, down, top_k):
    return grouped(x, router, gate_up, down, top_k)[0]


CORE = (
    (one_row, "shape"), (not_renormalised, "exact: two experts by hand"), (softmax_twice, "exact: two experts by hand"),
    (left_sorted, "random: against a loop over tokens"), (exponents_by_hand, "edges: large logits"),
    (with_a_capacity, "edges: a crowded expert drops nobody"), (every_expert, "budget: FLOPs and products"),
    (by_token, "budget: FLOPs and products"), (copies_weights, "budget: FLOPs and products"),
    (with_a_generous_capacity, "edges: a crowded expert drops nobody"), (a_row_for_nobody, "budget: FLOPs and products"),
    (shifted_by_the_largest_of_all, "edges: large logits"), (number_by_number, "budget: FLOPs and products"),
)  # fmt: skip


def biased(logits, bias, top_k, weigh=None):
    scores = logits.sigmoid()
    choice = scores + bias
    experts = choice.topk(top_k).indices
    weights = (choice if weigh is None else weigh(scores, bias)).gather(1, experts)
    return experts, weights / weights.sum(-1, keepdim=True)


def softmax_of_the_choice(logits, bias, top_k):
    return biased(logits, bias, top_k, lambda scores, bias: (scores + bias).exp())


def minus_the_mean(logits, bias, top_k):
    return biased(logits, bias, top_k, lambda scores, bias: scores + bias - bias.mean())


def without_the_bias(logits, bias, top_k):
    return biased(logits, 0 * bias, top_k)


def changes_the_logits(logits, bias, top_k):
    found = biased(logits, bias, top_k, lambda scores, bias: scores)
    logits += bias
    return found


BREAK = (
    (biased, "exact: an equal bias changes nothing"), (softmax_of_the_choice, "exact: without a bias"),
    (minus_the_mean, "random: experts and weights"), (without_the_bias, "exact: the bias chooses"),
    (changes_the_logits, "state: inputs unchanged"),
)  # fmt: skip


def counts_of(bias, chosen):
    return torch.bincount(chosen.flatten(), minlength=len(bias)).float()


def the_other_way(bias, chosen, rate):
    counts = counts_of(bias, chosen)
    return bias + rate * torch.sign(counts - counts.mean())


def in_proportion(bias, chosen, rate):
    counts = counts_of(bias, chosen)
    return bias + rate * (counts.mean() - counts)


def short(bias, chosen, rate):
    counts = torch.bincount(chosen.flatten()).float()
    new = bias.clone()
    new[: len(counts)] += rate * torch.sign(chosen.numel() / len(bias) - counts)
    return new


def by_the_median(bias, chosen, rate):
    counts = counts_of(bias, chosen)
    return bias + rate * torch.sign(counts.median() - counts)


def by_a_whole_mean(bias, chosen, rate):
    counts = counts_of(bias, chosen)
    return bias + rate * torch.sign(counts.mean().round() - counts)


def in_place(bias, chosen, rate):
    counts = counts_of(bias, chosen)
    bias += rate * torch.sign(counts.mean() - counts)
    return bias


STRETCH = (
    (the_other_way, "exact: four experts by hand"), (in_proportion, "random: against the rule"),
    (short, "edges: experts that nobody chose"), (by_the_median, "random: against the rule"),
    (in_place, "state: inputs unchanged"), (by_a_whole_mean, "random: against the rule"),
)  # fmt: skip

WRONG = {"2.3 core": CORE, "2.3 break": BREAK, "2.3 stretch": STRETCH}
