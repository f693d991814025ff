"""Wrong answers to exercise 2.2, each with the check that must catch it."""

from __future__ import annotations

import math

import torch


class Right:
    """Extremes of each dimension, and the larger of the two products; what the wrong answers vary."""

    def summarise(self, keys):
        return torch.cat((keys.amin(1), keys.amax(1)), -1)

    def spread(self, x, group):
        return x.repeat_interleave(group, 2)

    def score(self, q, summaries):
        group = q.shape[2] // summaries.shape[2]
        low, high = (self.spread(x, group).unsqueeze(1) for x in summaries.chunk(2, -1))
        x = q.unsqueeze(2)
        bound = torch.maximum(x * low, x * high).sum(-1)  # [rows, queries, blocks, heads]
        return bound.transpose(2, 3) / math.sqrt(q.shape[3])


class OneRowOfNumbers(Right):
    def summarise(self, keys):
        return super().summarise(keys).flatten(1)

    def score(self, q, summaries):
        return super().score(q, summaries.unflatten(-1, (2, -1)))


class BlocksBeforeHeads(Right):
    def score(self, q, summaries):
        return super().score(q, summaries).transpose(2, 3)


class MeanKey(Right):
    def summarise(self, keys):
        return torch.cat((keys.mean(1), keys.mean(1)), -1)


class LargestOnly(Right):
    def summarise(self, keys):
        return torch.cat((keys.amax(1), keys.amax(1)), -1)


class LargerSum(Right):
    """The larger of two sums, where the sum of the larger products is wanted."""

    def score(self, q, summaries):
        group = q.shape[2] // summaries.shape[2]
        low, high = (self.spread(x, group).unsqueeze(1) for x in summaries.chunk(2, -1))
        x = q.unsqueeze(2)
        return torch.maximum((x * low).sum(-1), (x * high).sum(-1)).transpose(2, 3) / math.sqrt(q.shape[3])


class Unscaled(Right):
    def score(self, q, summaries):
        return super().score(q, summaries) * math.sqrt(q.shape[3])


class HeadsInTheWrongGroups(Right):
    def spread(self, x, group):
        return x.repeat(1, 1, group, 1)


class FromZero(Right):
    """Extremes that begin with zero."""

    def summarise(self, keys):
        return torch.cat((keys.amin(1).clamp(max=0), keys.amax(1).clamp(min=0)), -1)


class SortsTheKeys(Right):
    def summarise(self, keys):
        keys.copy_(keys.sort(1).values)
        return torch.cat((keys[:, 0], keys[:, -1]), -1)


class Everything(Right):
    """Keeps the keys themselves beside the extremes."""

    def summarise(self, keys):
        return torch.cat((super().summarise(keys), keys.transpose(1, 2).flatten(2)), -1)

    def score(self, q, summaries):
        return super().score(q, summaries[..., : 2 * q.shape[3]])


class FirstRowForAll(Right):
    """The blocks of one request scored for all of them."""

    def score(self, q, summaries):
        return super().score(q, summaries[:1].expand_as(summaries))


CORE = (
    (OneRowOfNumbers, "shape"), (BlocksBeforeHeads, "shape"), (MeanKey, "exact: two keys by hand"),
    (LargestOnly, "exact: two keys by hand"), (LargerSum, "exact: two keys by hand"), (Unscaled, "exact: two keys by hand"),
    (HeadsInTheWrongGroups, "random: against the definition"), (FromZero, "exact: two keys by hand"),
    (SortsTheKeys, "state: inputs unchanged"), (Everything, "budget: two numbers per dimension"),
    (FirstRowForAll, "random: against the definition"),
)  # fmt: skip


def keys_of(query, chosen, window, size, last=None, first=None):
    first = max(0, query - window + 1) // size if first is None else first
    last = query // size + 1 if last is None else last
    blocks = sorted({*chosen, *range(first, last)})
    return [key for b in blocks for key in range(b * size, min((b + 1) * size, query + 1))]


def full_blocks_only(query, chosen, window, size):
    return keys_of(query, chosen, window, size, last=(query + 1) // size)


def always_one_more(query, chosen, window, size):
    first = max(0, query - window + 1) // size
    blocks = sorted({*chosen, *range(first, query // size + 1)})
    return [key for b in blocks for key in range(b * size, (b + 1) * size)]


def own_block_only(query, chosen, window, size):
    return keys_of(query, chosen, window, size, first=query // size)


def window_one_short(query, chosen, window, size):
    return keys_of(query, chosen, window, size, first=max(0, query - window + 2) // size)


def window_before_the_beginning(query, chosen, window, size):
    blocks = sorted({*chosen, *range((query - window + 1) // size, query // size + 1)})
    return [key for b in blocks for key in range(b * size, min((b + 1) * size, query + 1))]


def a_block_twice(query, chosen, window, size):
    blocks = [*sorted(chosen), *range(max(0, query - window + 1) // size, query // size + 1)]
    return [key for b in blocks for key in range(b * size, min((b + 1) * size, query + 1))]


def as_a_set(query, chosen, window, size):
    return set(keys_of(query, chosen, window, size))


def sorts_the_callers_list(query, chosen, window, size):
    chosen.sort()
    return keys_of(query, chosen, window, size)


MIDDLE = "exact: a query within its block"
BREAK = (
    (full_blocks_only, MIDDLE), (always_one_more, MIDDLE), (own_block_only, MIDDLE), (window_one_short, "random: key by key"),
    (window_before_the_beginning, "random: key by key"), (as_a_set, "shape"), (sorts_the_callers_list, "state: inputs unchanged"),
    (a_block_twice, "random: key by key"),
)  # fmt: skip


def share(choices, least, with_neighbour=False, strict=False, ordered=False, of_leader=False):
    leaders = []
    for layer, own in enumerate(choices):
        if layer:
            other = choices[layer - 1 if with_neighbour else leaders[-1]]
            same = sum(a == b for a, b in zip(own, other)) if ordered else len(set(own) & set(other))
            wanted = least * len(other if of_leader else own)
            agrees = same > wanted if strict else same >= wanted
        leaders.append(leaders[-1] if layer and agrees else layer)
    return leaders


def agrees_with_its_neighbour(choices, least):
    return share(choices, least, with_neighbour=True)


def more_than_asked(choices, least):
    return share(choices, least, strict=True)


def in_the_same_place(choices, least):
    return share(choices, least, ordered=True)


def share_of_the_leaders_blocks(choices, least):
    return share(choices, least, of_leader=True)


def leaders_only(choices, least):
    return sorted(set(share(choices, least)))


def first_layer_taken_for_granted(choices, least):
    return share(choices, least) if choices[0] else []


def sorts_the_choices(choices, least):
    for own in choices:
        own.sort()
    return share(choices, least)


STRETCH = (
    (leaders_only, "shape"), (more_than_asked, "exact: five layers by hand"), (in_the_same_place, "exact: a choice that drifts"),
    (agrees_with_its_neighbour, "exact: five layers by hand"), (first_layer_taken_for_granted, "edges: nothing and everything"),
    (sorts_the_choices, "state: inputs unchanged"), (share_of_the_leaders_blocks, "random: against the rule"),
)  # fmt: skip

WRONG = {"2.2 core": CORE, "2.2 break": BREAK, "2.2 stretch": STRETCH}
