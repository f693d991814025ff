"""4.1 stretch: say what a life in blocks holds, without living it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole
from minillm.course.task import NamedCheck, Task
from minillm.traffic.occupancy import occupancy


def _life(prompt: int, output: int, block_size: int) -> tuple[int, int]:
    lengths = range(prompt, prompt + output)
    return sum(-(-n // block_size) * block_size for n in lengths), sum(lengths)


def _lived(f: Any, prompt: int, output: int, block_size: int, expected: tuple[int, int], what: str = "") -> None:
    expect_equal(tuple(f(prompt, output, block_size)), expected, what=f"{what}held_over_life({prompt}, {output}, {block_size})")


def _stretch_shape(f: Any) -> None:
    got = f(3, 4, 4)
    if not isinstance(got, tuple) or len(got) != 2 or not all(is_whole(n) for n in got):
        raise Mismatch(f"it gives (allocated, live), two whole numbers, got {got!r:.60}")


def _stretch_by_hand(f: Any) -> None:
    _lived(f, 3, 4, 4, (4 + 4 + 8 + 8, 3 + 4 + 5 + 6))
    _lived(f, 5, 1, 4, (8, 5))


def _stretch_random(f: Any) -> None:
    for _ in range(60):
        prompt, output, block = (int(torch.randint(1, high, ())) for high in (60, 60, 20))
        _lived(f, prompt, output, block, _life(prompt, output, block))


def _stretch_edges(f: Any) -> None:
    for prompt, output, block, what in (
        (1, 1, 16, "one token"), (7, 9, 1, "blocks of one token"), (16, 1, 16, "a full block"), (16, 17, 16, "from full to full"),
        (3, 5, 1000, "a block that never fills"), (10**9, 10, 16, "a very long prompt"),
    ):  # fmt: skip
        _lived(f, prompt, output, block, _life(prompt, output, block), f"{what}: ")


def _stretch_engine(f: Any) -> None:
    for block in (1, 4, 16):
        for prompt, output in ((3, 40), (64, 33)):
            steps = occupancy([(prompt, output)], 512, 256, block_size=block)
            held = sum(s.allocated for s in steps), sum(s.live for s in steps)
            _lived(f, prompt, output, block, held, "what the engine's scheduler held: ")


def _lines_run(f: Any, *args: int) -> int:
    """Lines of Python that a call runs."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        f(*args)
    finally:
        sys.settrace(before)
    return count


def _stretch_budget(f: Any) -> None:
    short = _lines_run(f, 37, 60, 16)
    what = f"lines of Python run for an answer of 6,000 tokens; one of 60 tokens took {short}"
    expect_at_most(_lines_run(f, 37, 6000, 16), short + 8, what)


STRETCH = Task(
    "4.1 stretch",
    "What a life in blocks holds, without living it",
    (
        NamedCheck("shape", _stretch_shape, hint=2),
        NamedCheck("exact: four tokens by hand", _stretch_by_hand, hint=2),
        NamedCheck("random: against one step after the other", _stretch_random, hint=3),
        NamedCheck("edges: one token, blocks of one, full blocks", _stretch_edges, hint=3),
        NamedCheck("engine: what the engine's scheduler holds", _stretch_engine, hint=2),
        NamedCheck("budget: work that does not grow with the answer", _stretch_budget, hint=3),
    ),
    (
        "Live tokens are an arithmetic series. Blocks are one too, in groups: the lengths 1 to B hold one block, the next B\n"
        "hold two, and so on. Sum from the first token on, and take off what was before the prompt.",
        "Steps: output of them, with prompt, prompt + 1 … prompt + output - 1 tokens. (allocated, live), both in tokens, summed\n"
        "over these steps.",
        "blocks(n) = sum of -(-k // B) for k = 1 … n: with q, r = divmod(n, B) it is B * q * (q + 1) // 2 + r * (q + 1).\n"
        "allocated = B * (blocks(prompt + output - 1) - blocks(prompt - 1)); live = output * (2 * prompt + output - 1) // 2.",
    ),
    references=(_life, occupancy),
)
