"""A toy exercise: the prefix sums of a row, with a seam, used by several tests. The wrong answers are plausible ones."""

from __future__ import annotations

from typing import Any, Callable

import torch

from minillm.course.expect import expect_at_most, expect_equal, expect_raises, expect_shape, unchanged
from minillm.course.task import NamedCheck, Seam, Task


def reference(row: torch.Tensor) -> torch.Tensor:
    return row.cumsum(0)


def _shape(f: Callable[..., Any]) -> None:
    expect_shape(f(torch.zeros(3)), [3], torch.float32)


def _exact(f: Callable[..., Any]) -> None:
    expect_equal(f(torch.tensor([1.0, 2.0, 4.0])), torch.tensor([1.0, 3.0, 7.0]))


def _random(f: Callable[..., Any]) -> None:
    for n in (2, 5, 17):
        row = torch.randn(n)
        expected = reference(row)  # before the answer can change its input
        expect_equal(f(row), expected, atol=1e-5)


def _empty(f: Callable[..., Any]) -> None:
    expect_equal(f(torch.zeros(0)), torch.zeros(0))


def _two_dims(f: Callable[..., Any]) -> None:
    expect_raises(ValueError, lambda: f(torch.zeros(2, 2)), "a matrix")


def _state(f: Callable[..., Any]) -> None:
    row = torch.tensor([1.0, 2.0])
    with unchanged(row=row):
        f(row)


def _engine(f: Callable[..., Any]) -> None:
    assert TOY.seam is not None
    options = TOY.seam.build(f)
    expect_equal(options["prefix_sum"](torch.ones(2)), torch.tensor([1.0, 2.0]))


def _budget(f: Callable[..., Any]) -> None:
    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Counted() as counted:
        f(torch.ones(40))
    expect_at_most(counted.calls, 20, "operators for 40 elements")


TOY = Task(
    "1.1 core",
    "Prefix sums",
    (
        NamedCheck("shape", _shape, hint=2),
        NamedCheck("exact: three by hand", _exact, hint=1),
        NamedCheck("random: against cumsum", _random, hint=3),
        NamedCheck("edges: an empty row", _empty),
        NamedCheck("edges: a matrix is refused", _two_dims),
        NamedCheck("state: the input is unchanged", _state, hint=1),
        NamedCheck("engine", _engine),
        NamedCheck("budget", _budget, hint=3),
    ),
    ("Each sum is the one before plus an element.", "[n] in, [n] out.", "def prefix(row): ..."),
    Seam("prefix_sum", "adder", lambda f: {"prefix_sum": f}),
    (reference,),
)


def solution(row: torch.Tensor) -> torch.Tensor:
    if row.dim() != 1:
        raise ValueError(f"need one row, got {row.dim()} dimensions")
    return torch.tril(torch.ones(len(row), len(row))) @ row


def starter(row: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("exercise 1.1 core")


def returns_nothing(row: torch.Tensor) -> None:
    solution(row)


def returns_a_list(row: torch.Tensor) -> list[float]:
    return solution(row).tolist()


def wrong_dtype(row: torch.Tensor) -> torch.Tensor:
    return solution(row).double()


def exclusive(row: torch.Tensor) -> torch.Tensor:
    return solution(row) - row


def good_for_three(row: torch.Tensor) -> torch.Tensor:
    return solution(row) if len(row) <= 3 else row


def fails_on_empty(row: torch.Tensor) -> torch.Tensor:
    row[0]
    return solution(row)


def accepts_a_matrix(row: torch.Tensor) -> torch.Tensor:
    return torch.tril(torch.ones(len(row), len(row))) @ row


def in_place(row: torch.Tensor) -> torch.Tensor:
    if row.dim() != 1:
        raise ValueError("one row")
    for i in range(1, len(row)):
        row[i] += row[i - 1]
    return row.clone()


def wrong_for_ones(row: torch.Tensor) -> torch.Tensor:
    return solution(row) + bool(len(row) == 2 and (row == 1).all())


def one_by_one(row: torch.Tensor) -> torch.Tensor:
    if row.dim() != 1:
        raise ValueError("one row")
    return torch.stack([row[: i + 1].sum() for i in range(len(row))]) if len(row) else row.clone()


def calls_the_reference(row: torch.Tensor) -> torch.Tensor:
    if row.dim() != 1:
        raise ValueError("one row")
    return reference(row)


WRONG = (
    (returns_nothing, "shape"),
    (returns_a_list, "shape"),
    (wrong_dtype, "shape"),
    (exclusive, "exact: three by hand"),
    (good_for_three, "random: against cumsum"),
    (fails_on_empty, "edges: an empty row"),
    (accepts_a_matrix, "edges: a matrix is refused"),
    (in_place, "state: the input is unchanged"),
    (wrong_for_ones, "engine"),
    (one_by_one, "budget"),
    (calls_the_reference, "shape"),
)
