"""2.2 stretch: find the layers that can share a leader's choice of blocks."""

from __future__ import annotations

import random
from typing import Any, Sequence

from minillm.course.expect import Mismatch, expect_equal, unchanged
from minillm.course.task import NamedCheck, Task


def share_oracle(choices: Sequence[Sequence[int]], least: float) -> list[int]:
    leaders: list[int] = []
    for layer, own in enumerate(choices):
        if layer and len(set(own) & set(choices[leaders[-1]])) >= least * len(set(own)):
            leaders.append(leaders[-1])
        else:
            leaders.append(layer)
    return leaders


def _share_shape(fn: Any) -> None:
    got = fn([[0, 1], [0, 1], [5, 6]], 0.5)
    if len(got) != 3:
        raise Mismatch(f"one number per layer is wanted, 3, got {got!r:.80}")


def _share_by_hand(fn: Any) -> None:
    choices = [[0, 3, 7, 9], [0, 3, 7, 8], [0, 3, 8, 6], [1, 2, 4, 5], [1, 2, 4, 9]]
    expect_equal(list(fn(choices, 0.75)), [0, 0, 2, 3, 3], what="agreement of at least three in four")
    expect_equal(list(fn(choices, 0.5)), [0, 0, 0, 3, 3], what="agreement of at least one half")


def _share_drift(fn: Any) -> None:
    """Each layer agrees with the one before, and the last one not at all with the first."""
    choices = [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7]]
    expect_equal(list(fn(choices, 0.75)), [0, 0, 2, 2, 4], what="choices that drift by one block a layer")


def _share_random(fn: Any) -> None:
    rng = random.Random(1)
    for size in [4] * 20 + [0] * 40:  # 0: near the beginning a layer has fewer blocks to choose
        choices = [rng.sample(range(9), size or rng.randint(1, 6)) for _ in range(rng.randint(1, 12))]
        least = rng.choice([0.25, 0.5, 0.75, 1.0])
        expect_equal(list(fn(choices, least)), share_oracle(choices, least), what=f"{len(choices)} layers, at least {least}")


def _share_edges(fn: Any) -> None:
    choices = [[1, 2], [2, 1], [3, 4]]
    expect_equal(list(fn(choices, 0.0)), [0, 0, 0], what="no agreement asked for")
    expect_equal(list(fn(choices, 1.0)), [0, 0, 2], what="the same blocks in another order")
    expect_equal(list(fn([[5]], 1.0)), [0], what="one layer")
    expect_equal(list(fn([], 1.0)), [], what="no layers")


def _share_inputs(fn: Any) -> None:
    choices = [[3, 1], [1, 3], [0, 2]]
    with unchanged(choices=choices):
        fn(choices, 0.5)


STRETCH = Task(
    "2.2 stretch",
    "Layers that share a choice",
    (
        NamedCheck("shape", _share_shape, hint=2),
        NamedCheck("exact: five layers by hand", _share_by_hand, hint=1),
        NamedCheck("exact: a choice that drifts", _share_drift, hint=1),
        NamedCheck("random: against the rule", _share_random, hint=2),
        NamedCheck("edges: nothing and everything", _share_edges, hint=3),
        NamedCheck("state: inputs unchanged", _share_inputs, hint=3),
    ),
    (
        "A layer reads what its leader chose, so it is the leader's choice that its own must agree with, not its neighbour's.",
        "Keep the number of the current leader. agreement = blocks in both / blocks of the layer's own choice.",
        "for layer, own in enumerate(choices): shared = len(set(own) & set(choices[leader])); if shared < least * len(own) (or "
        "layer is 0): leader = layer; append leader.",
    ),
    references=(share_oracle,),
)
