"""Wrong answers to exercise 4.2, each with the check that must catch it."""

from __future__ import annotations

import math

import torch


def absorbed(q_nope, q_rope, rows, up, scale, visible, *, mask=True, rope=True, after=False, stable=True, hidden=-math.inf):
    """What the core's answers below are variations of."""
    nope, rank = q_nope.shape[-1], up.shape[-1]
    latents, keys = rows[..., :rank], rows[..., rank:]
    q = torch.einsum("rhd,hdc->rhc", q_nope, up[:, :nope])
    scores = q @ latents.transpose(1, 2) * scale
    if rope:
        scores = scores + (q_rope @ keys.transpose(1, 2)) * (1 if after else scale)
    if mask:
        scores = scores.masked_fill(~visible[:, None], hidden)
    if stable:
        weights = scores.softmax(-1)
    else:
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return torch.einsum("rhc,hdc->rhd", weights @ latents, up[:, nope:])


def flat(*given):
    return absorbed(*given).flatten(1)


def no_rotated_part(*given):
    return absorbed(*given, rope=False)


def scales_half_of_it(*given):
    return absorbed(*given, after=True)


def sees_everything(*given):
    return absorbed(*given, mask=False)


def overflows(*given):
    return absorbed(*given, stable=False)


def hides_with_a_number(*given):
    return absorbed(*given, hidden=-1e4)


def sees_the_first_ones(q_nope, q_rope, rows, up, scale, visible):
    first = torch.arange(visible.shape[1]) < visible.sum(1, keepdim=True)
    return absorbed(q_nope, q_rope, rows, up, scale, first)


def hides_after_the_softmax(q_nope, q_rope, rows, up, scale, visible):
    nope, rank = q_nope.shape[-1], up.shape[-1]
    q = torch.einsum("rhd,hdc->rhc", q_nope, up[:, :nope])
    scores = (q @ rows[..., :rank].transpose(1, 2) + q_rope @ rows[..., rank:].transpose(1, 2)) * scale
    weights = scores.softmax(-1) * visible[:, None]
    return torch.einsum("rhc,hdc->rhd", weights / weights.sum(-1, keepdim=True) @ rows[..., :rank], up[:, nope:])


def keys_of_one_head_at_a_time(q_nope, q_rope, rows, up, scale, visible):
    nope, rank = q_nope.shape[-1], up.shape[-1]
    done = []
    for h, of_head in enumerate(up):
        made = rows[..., :rank] @ of_head.T
        scores = made[..., :nope] @ q_nope[:, h, :, None] + rows[..., rank:] @ q_rope[:, h, :, None]
        weights = (scores * scale).masked_fill(~visible[..., None], float("-inf")).softmax(1)
        done.append((weights.transpose(1, 2) @ made[..., nope:]).squeeze(1))
    return torch.stack(done, 1)


def halves_swapped(q_nope, q_rope, rows, up, scale, visible):
    rope = q_rope.shape[-1]
    return absorbed(q_nope, q_rope, torch.cat([rows[..., rope:], rows[..., :rope]], dim=-1), up, scale, visible)


def scales_in_place(q_nope, q_rope, rows, up, scale, visible):
    q_nope.mul_(scale)
    q_rope.mul_(scale)
    return absorbed(q_nope, q_rope, rows, up, 1.0, visible)


def makes_every_key(q_nope, q_rope, rows, up, scale, visible):
    nope, rank = q_nope.shape[-1], up.shape[-1]
    made = torch.einsum("rkc,hdc->rkhd", rows[..., :rank], up)
    scores = torch.einsum("rhd,rkhd->rhk", q_nope, made[..., :nope]) + q_rope @ rows[..., rank:].transpose(1, 2)
    weights = (scores * scale).masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, made[..., nope:])


CORE = (
    (flat, "shape"), (no_rotated_part, "exact: two keys by hand"), (halves_swapped, "exact: two keys by hand"),
    (scales_half_of_it, "random: against keys and values of all heads"), (sees_everything, "edges: rows that see fewer keys"),
    (overflows, "exact: two keys by hand"), (scales_in_place, "state: inputs unchanged"),
    (makes_every_key, "budget: no key of a head is ever made"), (hides_with_a_number, "edges: large scores"),
    (sees_the_first_ones, "edges: rows that see fewer keys"), (hides_after_the_softmax, "edges: large scores"),
    (keys_of_one_head_at_a_time, "budget: no key of a head is ever made"),
)  # fmt: skip


def scale(config, width, power=2, anyway=False):
    rope, value = config.rope, width**-0.5
    if rope.kind == "yarn" and (rope.mscale_all_dim or anyway):
        value *= (0.1 * (rope.mscale_all_dim or 1.0) * math.log(rope.factor) + 1) ** power
    return value


def shipped(config):
    return scale(config, config.mla.kv_rank + config.mla.rope_dim)


def of_the_latent(config):
    return scale(config, config.mla.kv_rank)


def of_the_nope_part(config):
    return scale(config, config.mla.nope_dim)


def of_a_value(config):
    return scale(config, config.mla.nope_dim + config.mla.v_dim // 2)


def once(config):
    return scale(config, config.head_dim, power=1)


def a_tensor(config):
    return torch.tensor(scale(config, config.head_dim))


def stretched_anyway(config):
    return scale(config, config.head_dim, anyway=True)


def stretched_whatever_the_kind(config):
    rope, value = config.rope, config.head_dim**-0.5
    return value * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2 if rope.mscale_all_dim else value


BREAK = (
    (a_tensor, "shape"), (shipped, "exact: a published model"), (of_the_latent, "exact: a published model"),
    (of_the_nope_part, "exact: a published model"), (of_a_value, "random: 20 shapes"), (once, "exact: a published model"),
    (stretched_anyway, "edges: stretched positions"), (stretched_whatever_the_kind, "edges: stretched positions"),
)  # fmt: skip


def ranked(config, ranks, *, check=True, copied=True, split_latents=False, latents_too=True, groups_too=True):
    if check and (ranks < 1 or config.num_heads % ranks) and (latents_too or not config.mla):
        raise ValueError(f"{config.num_heads} heads cannot be split over {ranks} ranks")
    if config.mla:
        return config.num_layers * config.mla.cache_width * 2 / (ranks if split_latents else 1)
    kv = config.num_kv_heads
    if check and groups_too and kv % ranks and ranks % kv:
        raise ValueError(f"{kv} KV heads cannot be split over {ranks} ranks")
    kept = max(1, kv // ranks) if copied else kv / ranks
    return 2 * config.num_layers * kept * config.head_dim * 2


def as_text(config, ranks):
    return f"{ranked(config, ranks)} bytes"


def splits_latents(config, ranks):
    return ranked(config, ranks, split_latents=True)


def splits_heads_in_pieces(config, ranks):
    return ranked(config, ranks, copied=False)


def accepts_anything(config, ranks):
    return ranked(config, max(ranks, 1), check=False)


def splits_latents_over_anything(config, ranks):
    return ranked(config, ranks, latents_too=False)


def forgets_kv_heads_that_do_not_split(config, ranks):
    return ranked(config, ranks, groups_too=False)


def forgets_values(config, ranks):
    return ranked(config, ranks) / 2


STRETCH = (
    (as_text, "shape"), (splits_latents, "exact: two published models"), (forgets_values, "exact: two published models"),
    (splits_heads_in_pieces, "random: KV heads and ranks"), (accepts_anything, "edges: one head, and what cannot be split"),
    (splits_latents_over_anything, "edges: one head, and what cannot be split"),
    (forgets_kv_heads_that_do_not_split, "edges: one head, and what cannot be split"),
)  # fmt: skip

WRONG = {"4.2 core": CORE, "4.2 break": BREAK, "4.2 stretch": STRETCH}
