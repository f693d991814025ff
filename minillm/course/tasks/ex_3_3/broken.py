"""3.3 break: find the fault in a scale that depends on who else is in the step."""

from __future__ import annotations

from typing import Any

import torch

from minillm.cache.quantised_kv import QuantisedKVStore
from minillm.course.expect import expect_equal
from minillm.course.labs.kv_quantisation import RoundedKV, lopsided, symmetric
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_3_3.common import (
    check_any_step,
    check_heads_apart,
    check_kinds_apart,
    check_shapes,
    check_written_again,
    compare,
    random_rows,
    round_trip,
)


def _break_one(cls: Any) -> None:
    for _ in range(3):
        compare(cls, random_rows(1), random_rows(1), "one token alone")


def _break_alike(cls: Any) -> None:
    compare(cls, random_rows(8), random_rows(8), "eight tokens of one size")


def _break_sizes(cls: Any) -> None:
    size = 2.0 ** torch.arange(8.0)[:, None, None]
    compare(cls, random_rows(8) * size, random_rows(8) * size, "eight tokens, each twice as large as the one before")


def _break_mates(cls: Any) -> None:
    """Token 0 must be the same whoever is written beside it."""
    k, v = random_rows(5), random_rows(5)
    k[3] *= 40
    alone, _ = round_trip(cls, k[:1], v[:1])
    together, _ = round_trip(cls, k, v)
    expect_equal(together[:1], alone, what="K of token 0, written beside four others, against written alone")


BREAK = Task(
    "3.3 break",
    "Find the fault in a scale",
    (
        NamedCheck("shape: what read gives", check_shapes, hint=2),
        NamedCheck("exact: one token", _break_one, hint=2),
        NamedCheck("random: tokens of one size", _break_alike, hint=2),
        NamedCheck("random: tokens of different sizes", _break_sizes, hint=1),
        NamedCheck("edges: who else is written in the same step", _break_mates, hint=1),
        NamedCheck("edges: a small head beside a large one", check_heads_apart, hint=3),
        NamedCheck("edges: large K, small V", check_kinds_apart, hint=3),
        NamedCheck("state: a slot is written again", check_written_again, hint=2),
        NamedCheck("engine: the same tokens in any step", check_any_step, hint=1),
    ),
    (
        "Write one token alone, then the same token beside a much larger one, and compare what comes back. Which numbers\n"
        "does the scale of a token look at?",
        "kv [tokens, 2, kv_heads, head_dim] → reach [tokens, 2, kv_heads]: one number per token, per K or V, and per head.",
        "The largest magnitude is taken along head_dim alone: dim=-1.",
    ),
    references=(QuantisedKVStore, RoundedKV, symmetric, lopsided),
)
