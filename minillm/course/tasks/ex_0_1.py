"""Exercise 0.1: the roofline of one linear layer."""

from __future__ import annotations

import random
from typing import Any, Callable

from minillm.course.expect import Mismatch, expect_equal, is_whole
from minillm.course.labs.roofline import linear_work
from minillm.course.task import NamedCheck, Task
from minillm.perf.hardware import CARDS, Hardware
from minillm.perf.roofline import predict

ELEMENT = {4: "float32", 2: "bfloat16"}


def oracle(rows: int, n_in: int, n_out: int, element_bytes: int, peak: float, bandwidth: float) -> tuple[float, str]:
    dtype = ELEMENT[element_bytes]
    found = predict(linear_work(rows, n_in, n_out, dtype), Hardware("any", bandwidth, {dtype: peak}, 1e12, "exercise 0.1"))
    return found.seconds, found.bound


def draws(n: int = 50) -> list[tuple[int, int, int, int, float, float]]:
    rng = random.Random(1)
    return [
        (rng.randint(1, 600), rng.randint(1, 3000), rng.randint(1, 3000), rng.choice((2, 4)),
         rng.uniform(1e10, 1e13), rng.uniform(1e9, 1e11))
        for _ in range(n)
    ]  # fmt: skip


def _compare(answer: Any, args: tuple[Any, ...], seconds: float, bound: str) -> None:
    given = f"linear_time{args}"
    if not isinstance(answer, tuple) or len(answer) != 2:
        expect_equal(answer, (seconds, bound), what=given)
    expect_equal(answer[0], seconds, rtol=1e-9, what=f"{given}, seconds")
    expect_equal(answer[1], bound, what=f"{given}, bound")


def core_shape(f: Callable[..., Any]) -> None:
    answer = f(1, 4, 4, 2, 1e12, 1e11)
    if not isinstance(answer, tuple) or len(answer) != 2 or isinstance(answer[0], (str, bool)) or not isinstance(answer[1], str):
        raise Mismatch(f"got {answer!r}, expected a tuple (seconds, bound) such as (4.8e-10, 'bandwidth')")


def core_exact(f: Callable[..., Any]) -> None:
    # 2·1·2·3 = 12 FLOP; 2·(6 + 2 + 3) = 22 bytes: 1.2 s of arithmetic against 2.2 s of moving
    _compare(f(1, 2, 3, 2, 10.0, 10.0), (1, 2, 3, 2, 10.0, 10.0), 2.2, "bandwidth")
    # 8 rows: 96 FLOP, 2·(6 + 16 + 24) = 92 bytes
    _compare(f(8, 2, 3, 2, 10.0, 10.0), (8, 2, 3, 2, 10.0, 10.0), 9.6, "compute")


def core_random(f: Callable[..., Any]) -> None:
    for args in draws():
        _compare(f(*args), args, *oracle(*args))


def core_one_row(f: Callable[..., Any]) -> None:
    for card in CARDS.values():
        args = (1, 4096, 4096, 2, card.rate("bfloat16"), card.bandwidth)
        _compare(f(*args), args, *oracle(*args))


def core_tie(f: Callable[..., Any]) -> None:
    # 2 FLOP and 3·2 bytes, both in one second: nothing would be gained by more arithmetic, so it counts as bandwidth
    _compare(f(1, 1, 1, 2, 2.0, 6.0), (1, 1, 1, 2, 2.0, 6.0), 1.0, "bandwidth")


def batch_bytes_exact_one(f: Callable[..., Any]) -> None:
    expect_equal(f(1, 2, 3, 2), 22, what="moved(1, 2, 3, 2)")


def batch_bytes_exact_two(f: Callable[..., Any]) -> None:
    expect_equal(f(2, 2, 3, 2), 32, what="moved(2, 2, 3, 2)")


def batch_bytes_random(f: Callable[..., Any]) -> None:
    for rows, n_in, n_out, element, _, _ in draws():
        expect_equal(f(rows, n_in, n_out, element), linear_work(rows, n_in, n_out, ELEMENT[element]).total_bytes,
                     what=f"moved({rows}, {n_in}, {n_out}, {element})")  # fmt: skip


def batch_bytes_edges(f: Callable[..., Any]) -> None:
    expect_equal(f(0, 5, 7, 4), 140, what="moved(0, 5, 7, 4): no rows, the weight is read all the same")


def first_compute_bound(n_in: int, n_out: int, element_bytes: int, peak: float, bandwidth: float) -> int | None:
    """Smallest row count that is compute-bound: 2·r·in·out / peak > e·(in·out + r·(in + out)) / bandwidth, solved for r."""
    gain = 2 * n_in * n_out / peak - element_bytes * (n_in + n_out) / bandwidth
    if gain <= 0:
        return None
    rows = max(1, int(element_bytes * n_in * n_out / bandwidth / gain))

    def compute(r: int) -> bool:
        return oracle(r, n_in, n_out, element_bytes, peak, bandwidth)[1] == "compute"

    while rows > 1 and compute(rows - 1):
        rows -= 1
    while not compute(rows):
        rows += 1
    return rows


def rows_shape(f: Callable[..., Any]) -> None:
    answer = f(64, 64, 2, 100.0, 10.0)
    if not is_whole(answer):
        raise Mismatch(f"rows_to_ridge(64, 64, 2, 100.0, 10.0): got {answer!r}, expected a whole number of rows")


def rows_exact(f: Callable[..., Any]) -> None:
    # 2·2·4 = 16 FLOP a row at 16/s: r seconds. 2·(8 + 6r) bytes at 16/s: 1 + 0.75 r seconds. Equal at r = 4
    expect_equal(f(2, 4, 2, 16.0, 16.0), 5, what="rows_to_ridge(2, 4, 2, 16.0, 16.0)")


def rows_random(f: Callable[..., Any]) -> None:
    for _, n_in, n_out, element, peak, bandwidth in draws():
        args = (n_in, n_out, element, peak, bandwidth)
        expect_equal(f(*args), first_compute_bound(*args), what=f"rows_to_ridge{args}")


def rows_never(f: Callable[..., Any]) -> None:
    args = (16, 16, 2, 1e15, 1e12)
    expect_equal(f(*args), None, what=f"rows_to_ridge{args}: x and the result grow too, so the intensity has a limit")


def rows_at_once(f: Callable[..., Any]) -> None:
    expect_equal(f(4096, 4096, 2, 1.0, 1e12), 1, what="rows_to_ridge(4096, 4096, 2, 1.0, 1e12): compute-bound from the first row")


TASKS = (
    Task(
        "0.1 core", "Predict the time of a linear layer",
        (
            NamedCheck("shape", core_shape, 2),
            NamedCheck("exact: a layer of 2 × 3", core_exact, 1),
            NamedCheck("random: against the engine's roofline", core_random, 2),
            NamedCheck("edges: one row on data-centre cards", core_one_row, 1),
            NamedCheck("edges: both limits equal", core_tie, 3),
        ),
        (
            "Two clocks run side by side: one for arithmetic, one for moving bytes. The slower one is the answer, and "
            "it names the bound.",
            "FLOPs: 2 · rows · in · out. Elements moved: in · out for the weight, rows · in for x, rows · out for the "
            "result; times element_bytes.",
            "flops = …; moved = …; compute, move = flops / peak, moved / bandwidth; return max(compute, move), "
            "'compute' if compute > move else …",
        ),
        references=(oracle, predict, linear_work),
    ),
    Task(
        "0.1 break", "A batch that seems to gain nothing",
        (
            NamedCheck("exact: one row", batch_bytes_exact_one, 2),
            NamedCheck("exact: two rows", batch_bytes_exact_two, 1),
            NamedCheck("random: against the engine's count", batch_bytes_random, 2),
            NamedCheck("edges: no rows", batch_bytes_edges, 3),
        ),
        (
            "If this function were right, a batch of sixteen would move sixteen times the bytes. Which of the three "
            "tensors is shared?",
            "weight [out, in] once; x [rows, in] and the result [rows, out] once per row.",
            "return element_bytes * (n_in * n_out + rows * (… + …))",
        ),
        references=(linear_work,),
    ),
    Task(
        "0.1 stretch", "Where the corner is",
        (
            NamedCheck("shape", rows_shape, 2),
            NamedCheck("exact: a layer of 2 × 4", rows_exact, 1),
            NamedCheck("random: against a search", rows_random, 2),
            NamedCheck("edges: a layer too small to get there", rows_never, 3),
            NamedCheck("edges: compute-bound from the first row", rows_at_once, 3),
        ),
        (
            "Write both times as functions of the rows: one is proportional to them, the other starts at the weight "
            "and grows. Where do they cross?",
            "rows · 2·in·out / peak on one side, element · (in·out + rows · (in + out)) / bandwidth on the other; "
            "solve for rows, round up past a tie.",
            "slope = 2·in·out/peak − e·(in + out)/bandwidth; if slope <= 0: return None; otherwise "
            "floor(e·in·out/bandwidth / slope) + 1",
        ),
        references=(first_compute_bound, oracle, predict),
    ),
)  # fmt: skip
