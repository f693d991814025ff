"""1.2 break: mend the names of blocks, which forget what came before, so that two guests get each other's answers."""

from __future__ import annotations

import random
from typing import Any

from minillm.cache.prefix import HashPrefixCache
from minillm.cache.radix import RadixPrefixCache
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_1_2.common import B, Named, Prefixes, Token, answers, random_prompt


def _compare_names(f: Any, a: list[int], b: list[int], size: int = B) -> None:
    """Names agree exactly as far as whole blocks from the beginning do."""
    common = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b))) // size
    left, right = list(f(list(a), size)), list(f(list(b), size))
    for i, (x, y) in enumerate(zip(left, right)):
        if (x == y) != (i < common):
            said = "has the same name in both" if x == y else "has two names"
            raise Mismatch(f"block {i} of {a} and {b}, blocks of {size}: it {said}, and {common} blocks begin alike")


def _names_shape(f: Any) -> None:
    for n in (0, 1, B - 1, B, B + 1, 3 * B):
        expect_equal(len(f(list(range(n)), B)), n // B, what=f"names of {n} tokens, blocks of {B}")
    hash(tuple(f(list(range(9)), B)))


def _names_exact(f: Any) -> None:
    _compare_names(f, [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], 2)
    _compare_names(f, [1, 2, 3, 4], [1, 2, 3, 9], 2)


def _names_random(f: Any) -> None:
    for _ in range(30):
        shared = random_prompt(random.randrange(14), 1000)
        _compare_names(f, shared + random_prompt(9, 1000), shared + random_prompt(9, 1000), random.randint(1, 4))


def _names_beginning(f: Any) -> None:
    _compare_names(f, [1, 1, 5, 6], [2, 1, 5, 6], 2)


def _names_far(f: Any) -> None:
    same = [5, 6, 7, 8, 9, 10, 11, 12]
    _compare_names(f, [1, 1, *same], [2, 1, *same], 2)
    _compare_names(f, [3, 3, 1, 1, *same], [3, 3, 2, 1, *same], 2)


def _names_order(f: Any) -> None:
    _compare_names(f, [1, 2, 3, 4, 9, 9], [3, 4, 1, 2, 9, 9], 2)
    _compare_names(f, [5, 5, 5, 5, 7, 7], [6, 6, 6, 6, 7, 7], 2)


def _names_cut(f: Any) -> None:
    _compare_names(f, [1, 12, 3, 4], [11, 2, 3, 4], 2)
    _compare_names(f, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], 3)


def _names_state(f: Any) -> None:
    ids = list(range(9))
    with unchanged(token_ids=ids):
        first = list(f(ids, B))
    expect_equal(list(f(ids, B)), first, what="names of the same prompt, a second time")


def _names_engine(f: Any) -> None:
    middle = [8, 2, 8, 1, 8, 2, 8, 4]
    prompts = [[first, 1, 1, 1, *middle, 7] for first in (5, 6, 5, 9)]
    cold, _, _ = answers("none", 64, prompts)
    got, hits, _ = answers(Named(f), 64, prompts)
    expect_equal(got, cold, what="tokens of four prompts with the same middle, on your names")
    expect_equal(hits, [0, 0, 12, 0], what="cached tokens of the four prompts")


def _names_budget(f: Any) -> None:
    ids = [Token(t) for t in random_prompt(2048, 50_000)]
    Token.hashed = 0
    hash(tuple(f(ids, 16)))
    expect_at_most(Token.hashed, 4 * len(ids), f"tokens hashed to name and look up the blocks of {len(ids)} tokens")


BREAK = Task(
    "1.2 break",
    "Find out why two guests get each other's answers",
    (
        NamedCheck("shape: one name a full block", _names_shape, hint=2),
        NamedCheck("exact: two pairs by hand", _names_exact, hint=1),
        NamedCheck("random: prompts that begin alike and go on differently", _names_random, hint=2),
        NamedCheck("edges: the same block behind another beginning", _names_beginning, hint=1),
        NamedCheck("edges: the difference is several blocks back", _names_far, hint=3),
        NamedCheck("edges: the same blocks in another order", _names_order, hint=3),
        NamedCheck("edges: tokens that look alike when written side by side", _names_cut, hint=2),
        NamedCheck("state: inputs unchanged, the same names again", _names_state),
        NamedCheck("engine: four prompts with the same middle", _names_engine, hint=1),
        NamedCheck("budget: tokens hashed for a long prompt", _names_budget, hint=3),
    ),
    (
        "A block's keys and values depend on every token before it. What does the shipped name of a block depend on?\n"
        "Write two prompts that differ in their first token and agree in the second block, and look at the second names.",
        "One hashable name for each full block. name[i] must differ whenever any token of blocks 0 … i differs, wherever it is,\n"
        "and be equal when all of them are equal.",
        "Carry the name of the block before: name = hash((name, tuple(tokens of this block))), starting from None.\n"
        "Naming each block by all tokens so far is right too, and costs the square of the prompt's length.",
    ),
    references=(HashPrefixCache, RadixPrefixCache, Prefixes),
)
