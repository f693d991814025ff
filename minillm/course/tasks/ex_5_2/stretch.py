"""5.2 stretch: choose the largest chunk that keeps a promise."""

from __future__ import annotations

import random
from typing import Any, Callable

import torch

from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole, show
from minillm.course.task import NamedCheck, Task
from minillm.model.presets import preset
from minillm.perf.hardware import card
from minillm.perf.roofline import predict, step_work


class Priced:
    """A price of steps that counts how often it is asked."""

    def __init__(self, price: Callable[[int, int, int], float]):
        self.price, self.asked = price, 0

    def __call__(self, decodes: int, chunk: int, past: int) -> float:
        if not (is_whole(chunk) and chunk >= 0 and is_whole(past) and past >= 0):
            raise Mismatch(f"seconds(decodes, chunk, past) was called with chunk={show(chunk)}, past={show(past)}")
        self.asked += 1
        return self.price(decodes, chunk, past)


def _linear(decodes: int, chunk: int, past: int) -> float:
    return 10 + decodes + chunk


def _with_context(decodes: int, chunk: int, past: int) -> float:
    return 5 + decodes + max(0, chunk - 30) + chunk * (past + chunk / 2) / 100


def _roofline(decodes: int, chunk: int, past: int) -> float:
    chunks = [(1000, 1)] * decodes + ([(past, chunk)] if chunk else [])
    return predict(step_work(preset("qwen3-32b"), chunks, logits=decodes), card("h100")).seconds


def _largest(price: Callable[[int, int, int], float], decodes: int, prompt: int, itl: float) -> int:
    return next((c for c in range(prompt, 0, -1) if price(decodes, c, prompt - c) <= itl), 0)


def _choose(f: Any, price: Callable[[int, int, int], float], decodes: int, prompt: int, itl: float, what: str) -> None:
    got = f(Priced(price), decodes, prompt, itl)
    if not is_whole(got):
        raise Mismatch(f"choose_chunk gives a whole number, got {show(got)}")
    what = f"{what}: {decodes} decode, prompt {prompt}, limit {itl:g}"
    expect_equal(int(got), _largest(price, decodes, prompt, itl), what=what)


def _stretch_shape(f: Any) -> None:
    got = f(Priced(_linear), 2, 100, 50.0)
    if not is_whole(got) or not 0 <= got <= 100:
        raise Mismatch(f"choose_chunk gives a whole number from 0 to the prompt's length, got {show(got)}")


def _stretch_by_hand(f: Any) -> None:
    _choose(f, _linear, 2, 100, 50.0, "a step of 10 + decodes + chunk seconds")


def _stretch_random(f: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(60):
        price = draw.choice([_linear, _with_context])
        _choose(f, price, draw.randint(0, 8), draw.randint(1, 300), draw.uniform(0, 400), "a random limit")


def _stretch_edges(f: Any) -> None:
    _choose(f, _linear, 2, 30, 1000.0, "the whole prompt fits")
    _choose(f, _linear, 2, 30, 42.0, "the whole prompt fits exactly")
    _choose(f, _linear, 2, 30, 12.5, "not one token fits")
    _choose(f, _linear, 2, 30, 13.0, "one token fits exactly")
    _choose(f, _linear, 0, 1, 11.0, "a prompt of one token")


def _stretch_context(f: Any) -> None:
    _choose(f, _with_context, 4, 200, 60.0, "the last piece is the dearest")


def _stretch_engine(f: Any) -> None:
    for itl in (0.02, 0.03, 0.06):
        _choose(f, _roofline, 8, 4096, itl, "Qwen3-32B on an H100")


def _stretch_asked(f: Any) -> None:
    price = Priced(_linear)
    f(price, 8, 100_000, 30_000.0)
    expect_at_most(price.asked, 20, "prices asked for a prompt of 100,000 tokens")


STRETCH = Task(
    "5.2 stretch",
    "Choose the largest chunk that keeps a promise",
    (
        NamedCheck("shape", _stretch_shape, hint=2),
        NamedCheck("exact: a price by hand", _stretch_by_hand, hint=2),
        NamedCheck("random: against trying every chunk", _stretch_random, hint=2),
        NamedCheck("edges: everything fits, nothing fits, exactly fits", _stretch_edges, hint=3),
        NamedCheck("edges: attention makes the last piece the dearest", _stretch_context, hint=1),
        NamedCheck("engine: on the roofline of a real model and card", _stretch_engine, hint=1),
        NamedCheck("budget: prices asked", _stretch_asked, hint=3),
    ),
    (
        "A larger chunk never makes a step cheaper, so the chunks that keep the promise are 1, 2, … up to some largest one. The\n"
        "dearest step of a prompt is its last full piece, which sees all the others.",
        "The price to look at is seconds(decodes, chunk, prompt - chunk), for chunks from 1 to prompt. 0 if even 1 is too dear.",
        "Halve: low = 0 (keeps the promise), high = prompt. While low < high: middle = (low + high + 1) // 2; if its price is\n"
        "within itl then low = middle, else high = middle - 1. Return low.",
    ),
)
