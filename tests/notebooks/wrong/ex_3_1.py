"""Wrong answers to exercise 3.1, each with the check that must catch it."""

from __future__ import annotations

import math

import numpy as np
import torch


def tiles(
    q, k, v, tile, *, rescale_acc=True, rescale_total=True, offset=True, sentinel=-math.inf, scale=None, group=True,
    subtract=True,
):  # fmt: skip
    """The right answer, and what its variations leave out."""
    new, heads, dim = q.shape
    total = len(k)
    repeat = heads // k.shape[1]
    if group:
        k, v = (x.repeat_interleave(repeat, 1).transpose(0, 1) for x in (k, v))
    else:
        k, v = (x.repeat(1, repeat, 1).transpose(0, 1) for x in (k, v))
    q = q.transpose(0, 1) * (dim**-0.5 if scale is None else scale)
    position = torch.arange(new)[:, None] + (total - new if offset else 0)
    summed = torch.zeros(heads, new, 1, dtype=q.dtype)
    acc = torch.zeros(heads, new, v.shape[2], dtype=q.dtype)
    top = torch.full((heads, new, 1), sentinel, dtype=q.dtype)
    for start in range(0, total, tile):
        keys = torch.arange(start, min(start + tile, total))
        scores = (q @ k[:, keys].transpose(1, 2)).masked_fill(keys > position, sentinel)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True)) if subtract else torch.zeros_like(top)
        shift = torch.where(new_top == -math.inf, torch.zeros_like(new_top), new_top)
        p, shrink = torch.exp(scores - shift), torch.exp(top - shift) if subtract else torch.ones_like(top)
        acc = (acc * shrink if rescale_acc else acc) + p @ v[:, keys]
        summed = (summed * shrink if rescale_total else summed) + p.sum(-1, keepdim=True)
        top = new_top
    return (acc / summed).transpose(0, 1)


def heads_first(q, k, v, tile):
    return tiles(q, k, v, tile).transpose(0, 1)


def forgets_to_rescale_the_values(q, k, v, tile):
    return tiles(q, k, v, tile, rescale_acc=False)


def forgets_to_rescale_the_sum(q, k, v, tile):
    return tiles(q, k, v, tile, rescale_total=False)


def mask_from_the_top_left(q, k, v, tile):
    return tiles(q, k, v, tile, offset=False)


def finite_sentinel(q, k, v, tile):
    return tiles(q, k, v, tile, sentinel=-1e4)


def no_scale(q, k, v, tile):
    return tiles(q, k, v, tile, scale=1.0)


def heads_in_the_wrong_groups(q, k, v, tile):
    return tiles(q, k, v, tile, group=False)


def exponentials_as_they_are(q, k, v, tile):
    return tiles(q, k, v, tile, subtract=False)


def the_matrix_after_all(q, k, v, tile):
    return tiles(q, k, v, len(k))


def scales_the_queries_in_place(q, k, v, tile):
    q *= q.shape[2] ** -0.5
    return tiles(q, k, v, tile, scale=1.0)


def one_query_at_a_time(q, k, v, tile):
    total = len(k) - len(q)
    return torch.cat([tiles(q[i : i + 1], k[: total + i + 1], v[: total + i + 1], tile) for i in range(len(q))])


def the_matrix_outside_torch(q, k, v, tile):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = np.einsum("nhd,thd->hnt", q.numpy(), k.numpy()) / math.sqrt(q.shape[2])
    scores[:, np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return torch.from_numpy(np.einsum("hnt,thd->nhd", weights, v.numpy()))


def masked_keys_may_be_the_largest(q, k, v, tile):
    repeat, position = q.shape[1] // k.shape[1], torch.arange(len(k) - len(q), len(k))[:, None]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
    top, summed, acc = torch.full((*q.shape[:2], 1), -math.inf, dtype=q.dtype), 0.0, 0.0
    for start in range(0, k.shape[1], tile):
        keys = torch.arange(start, min(start + tile, k.shape[1]))
        scores = q @ k[:, keys].mT / math.sqrt(q.shape[2])
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        p, shrink, top = torch.exp(scores - new_top) * (keys <= position), torch.exp(top - new_top), new_top
        summed, acc = summed * shrink + p.sum(-1, keepdim=True), acc * shrink + p @ v[:, keys]
    return (acc / summed).transpose(0, 1)


HAND, RANDOM = "exact: a mean by hand", "random: against one query at a time"
CORE = (
    (heads_first, "shape"),
    (forgets_to_rescale_the_values, "exact: scores that grow from tile to tile"),
    (forgets_to_rescale_the_sum, "exact: scores that grow from tile to tile"),
    (mask_from_the_top_left, HAND), (finite_sentinel, "edges: scores near -100,000"), (no_scale, RANDOM),
    (heads_in_the_wrong_groups, RANDOM), (exponentials_as_they_are, "edges: large scores"),
    (the_matrix_after_all, "budget: no matrix of all scores"), (scales_the_queries_in_place, RANDOM),
    (the_matrix_outside_torch, "budget: no matrix of all scores"), (one_query_at_a_time, "budget: no loop over queries"),
    (masked_keys_may_be_the_largest, "edges: large scores"),
)  # fmt: skip


def running(q, k, v, tile, *, start=-math.inf, acc_too=True, total_too=True, subtract=True):
    top, total, acc = torch.tensor(start, dtype=q.dtype), torch.zeros((), dtype=q.dtype), torch.zeros(v.shape[1], dtype=q.dtype)
    for at in range(0, len(k), tile):
        scores = k[at : at + tile] @ q * len(q) ** -0.5
        new_top = torch.maximum(top, scores.max()) if subtract else torch.zeros_like(top)
        weights = torch.exp(scores - new_top)
        shrink = torch.exp(top - new_top) if subtract else torch.ones_like(top)
        total = (total * shrink if total_too else total) + weights.sum()
        acc = (acc * shrink if acc_too else acc) + weights @ v[at : at + tile]
        top = new_top
    return acc / total


def only_the_sum_is_rescaled(q, k, v, tile):
    return running(q, k, v, tile, acc_too=False)


def only_the_values_are_rescaled(q, k, v, tile):
    return running(q, k, v, tile, total_too=False)


def begins_at_minus_ten_thousand(q, k, v, tile):
    return running(q, k, v, tile, start=-1e4)


def subtracts_nothing(q, k, v, tile):
    return running(q, k, v, tile, subtract=False)


def all_keys_at_once(q, k, v, tile):
    return (k @ q / math.sqrt(len(q))).softmax(0) @ v


def a_mean_of_the_tiles(q, k, v, tile):
    parts = []
    for at in range(0, len(k), tile):
        scores = k[at : at + tile] @ q * len(q) ** -0.5
        parts.append(scores.softmax(0) @ v[at : at + tile])
    return torch.stack(parts).mean(0)


BREAK = (
    (only_the_sum_is_rescaled, "exact: scores that grow"), (only_the_values_are_rescaled, "exact: scores that grow"),
    (begins_at_minus_ten_thousand, "edges: scores near -100,000"), (subtracts_nothing, "edges: large scores"),
    (a_mean_of_the_tiles, "exact: scores that fall"), (all_keys_at_once, "budget: a tile of keys at a time"),
)  # fmt: skip


def mean_of_the_parts(outs, logsums):
    return outs.mean(0)


def keeps_the_parts(outs, logsums):
    return outs * logsums.softmax(0)[..., None]


def softmax_and_hope(outs, logsums):
    return (outs * logsums.softmax(0)[..., None]).sum(0)


def weighs_by_the_logsum(outs, logsums):
    return (outs * logsums[..., None]).sum(0) / logsums.sum(0)[..., None]


def no_subtraction(outs, logsums):
    weights = logsums.exp()[..., None]
    outs = torch.where(weights > 0, outs, torch.zeros_like(outs))
    return (outs * weights).sum(0) / torch.where(weights.sum(0) > 0, weights.sum(0), torch.ones(()))


def forgets_the_row_without_keys(outs, logsums):
    weights = logsums.softmax(0)[..., None]
    return (torch.where(weights > 0, outs, torch.zeros_like(outs)) * weights).sum(0)


def cleans_the_callers_tensor(outs, logsums):
    logsums -= torch.where(logsums.amax(0).isinf(), torch.zeros(()), logsums.amax(0))
    weights = logsums.exp()[..., None]
    outs = torch.where(weights > 0, outs, torch.zeros_like(outs))
    return (outs * weights).sum(0) / weights.sum(0).clamp_min(1e-30)


def one_largest_for_all_rows(outs, logsums):
    weights = torch.exp(logsums - logsums.max().clamp_min(-1e30))[..., None]
    outs, total = torch.where(weights > 0, outs, torch.zeros(())), weights.sum(0)
    return (outs * weights).sum(0) / torch.where(total > 0, total, torch.ones(()))


def cleans_the_callers_parts(outs, logsums):
    outs[logsums == -math.inf] = 0.0
    return (outs * logsums.softmax(0).nan_to_num()[..., None]).sum(0)


STRETCH = (
    (keeps_the_parts, "shape"), (mean_of_the_parts, "exact: parts that weigh 1 and 3"),
    (softmax_and_hope, "edges: parts without keys"), (weighs_by_the_logsum, "exact: parts that weigh 1 and 3"),
    (no_subtraction, "edges: logsums of 100,000 and -100,000"), (forgets_the_row_without_keys, "edges: a row without keys"),
    (cleans_the_callers_tensor, "state: inputs unchanged"), (cleans_the_callers_parts, "state: inputs unchanged"),
    (one_largest_for_all_rows, "edges: logsums of 100,000 and -100,000"),
)  # fmt: skip

WRONG = {"3.1 core": CORE, "3.1 break": BREAK, "3.1 stretch": STRETCH}
