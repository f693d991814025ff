"""Exercise 5.2: a token budget that serves decodes first, where a mixed step is sampled, the largest chunk within a limit."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any, Callable, Iterator, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole, show
from minillm.course.task import NamedCheck, Seam, Task
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.policies import Continuous, share, start
from minillm.engine.runner import ModelRunner
from minillm.engine.scheduler import SchedulerOutput
from minillm.model.config import ModelConfig
from minillm.model.presets import preset
from minillm.model.transformer import Transformer
from minillm.perf.hardware import card
from minillm.perf.roofline import predict, step_work

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=128,
    name="a tiny random model",
)  # fmt: skip


# 5.2 core: the token budget ---------------------------------------------------------------------------------------------------


class Queue:
    """What waits, taken one by one; counts how many were taken."""

    def __init__(self, left: Sequence[int]):
        self.left, self.taken = list(left), 0

    def __iter__(self) -> Iterator[int]:
        for n in self.left:
            self.taken += 1
            yield n


def _fair(running: Sequence[int], waiting: Sequence[int], budget: int, limit: int) -> list[int]:
    """The answer: token by token, decodes, then prompts that run, then who starts."""
    grants = [0] * len(running)
    for i, n in enumerate(running):
        if n == 1 and budget:
            grants[i], budget = 1, budget - 1
    for i, n in enumerate(running):
        while n > 1 and grants[i] < n and budget:
            grants[i], budget = grants[i] + 1, budget - 1
    for n in waiting:
        if len(grants) == limit or not budget:
            break
        grants.append(0)
        while grants[-1] < n and budget:
            grants[-1], budget = grants[-1] + 1, budget - 1
    return grants


def _ask(policy: Any, running: Sequence[int], waiting: Sequence[int], budget: int, limit: int) -> list[int]:
    got = policy().grants(tuple(running), Queue(waiting), budget, limit)
    if not isinstance(got, (list, tuple)):
        raise Mismatch(f"grants gives a list of whole numbers, got {show(got)}")
    for i, n in enumerate(got):
        if not is_whole(n) or n < 0:
            raise Mismatch(f"grant [{i}] must be a whole number of at least 0, got {show(n)}")
    return [int(n) for n in got]


def _compare(policy: Any, running: Sequence[int], waiting: Sequence[int], budget: int, limit: int) -> None:
    what = f"running {list(running)}, waiting {list(waiting)}, budget {budget}, limit {limit}"
    expect_equal(_ask(policy, running, waiting, budget, limit), _fair(running, waiting, budget, limit), what=what)


def _core_shape(policy: Any) -> None:
    if not callable(policy):
        raise Mismatch("check takes the class itself, not an object of it: the checks make objects of their own")
    for running, waiting, length in (((1, 1), (), 2), ((), (5,), 1), ((1, 9), (4, 3), 4)):
        got = _ask(policy, running, waiting, 64, 8)
        if len(got) != length:
            raise Mismatch(
                f"running {list(running)} and waiting {list(waiting)} with room for all: got {len(got)} grants, expected {length}"
            )


def _core_by_hand(policy: Any) -> None:
    _compare(policy, (1, 1, 1), (20,), 8, 8)
    _compare(policy, (30, 1, 1), (), 8, 8)


def _core_random(policy: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(200):
        running = [draw.choice([1, 1, 1, draw.randint(2, 40)]) for _ in range(draw.randint(0, 6))]
        waiting = [draw.randint(1, 40) for _ in range(draw.randint(0, 4))]
        if running or waiting:
            _compare(policy, running, waiting, draw.randint(1, 60), len(running) + draw.randint(0, 3))


def _core_small_budget(policy: Any) -> None:
    for budget in (1, 2, 3):
        _compare(policy, (1, 1, 1), (9,), budget, 8)
        _compare(policy, (9, 1, 1), (9,), budget, 8)


def _core_full(policy: Any) -> None:
    _compare(policy, (1, 1), (5,), 64, 2)
    _compare(policy, (), (5, 5, 5), 64, 2)


def _core_last_piece(policy: Any) -> None:
    _compare(policy, (1, 7), (6, 5, 4), 20, 8)
    _compare(policy, (), (8, 8), 8, 8)
    _compare(policy, (8,), (8,), 8, 8)


def _core_state(policy: Any) -> None:
    running, mine = [1, 9, 1], policy()
    before = copy.deepcopy(running)
    first = list(mine.grants(running, Queue([4]), 12, 8))
    expect_equal(running, before, what="your code changed running")
    expect_equal(list(mine.grants(running, Queue([4]), 12, 8)), first, what="the same question asked twice")


def _core_engine(policy: Any) -> None:
    prompts = [[(5 * i + 3 * r) % 61 for i in range(n)] for r, n in enumerate((70, 4, 6, 5))]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 24, 20, 22)]
    model = Transformer.random(TINY)

    def run(batching: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        llm = LLM(model, dtype="float32", block_size=4, num_blocks=64, max_num_batched_tokens=8, batching=batching)
        steps: list[tuple[int, ...]] = []

        def observe(plan: SchedulerOutput) -> None:
            running = [r for r in llm.engine.scheduler.running if r.num_output_tokens]
            served = {id(s.request) for s in plan.scheduled}
            steps.append((sum(s.num_tokens for s in plan.scheduled), sum(id(r) not in served for r in running)))

        llm.engine.scheduler.observers.append(observe)
        return [o.token_ids for o in llm.generate(prompts, params)], steps

    expected, _ = run("continuous")
    got, steps = run(policy())
    expect_equal(got, expected, what="tokens of four prompts under your policy")
    for i, (tokens, stalled) in enumerate(steps):
        expect_at_most(tokens, 8, f"tokens of step {i}")
        expect_at_most(stalled, 0, f"decoding requests that sat out step {i}")


def _core_taken(policy: Any) -> None:
    for running, budget, limit, most in (((1, 1), 2, 8, 0), ((1, 1), 64, 2, 0), ((1,), 11, 8, 1), ((), 64, 3, 3)):
        queue = Queue([10] * 1000)
        policy().grants(running, queue, budget, limit)
        expect_at_most(queue.taken, most + 1, f"waiting requests taken, running {list(running)}, budget {budget}, limit {limit}")


CORE = Task(
    "5.2 core",
    "Share the token budget",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: three decode and a prompt waits; a prompt that is older than who decodes", _core_by_hand, hint=1),
        NamedCheck("random: against token by token", _core_random, hint=3),
        NamedCheck("edges: a budget that is smaller than the number of decodes", _core_small_budget, hint=1),
        NamedCheck("edges: no room for another request", _core_full, hint=2),
        NamedCheck("edges: pieces that end a prompt", _core_last_piece, hint=3),
        NamedCheck("state: inputs unchanged, nothing remembered", _core_state, hint=3),
        NamedCheck("engine: the same tokens, and nobody who decodes sits a step out", _core_engine, hint=1),
        NamedCheck("budget: the queue is not searched", _core_taken, hint=2),
    ),
    (
        "Three groups share the budget one after the other: who has exactly one token left, who has more, and who waits. Within\n"
        "a group the order stays: the oldest first. Age must not put a long prompt in front of somebody's next token.",
        "The result has one number for each running request, in their order, 0 included. Then one for each waiting request that\n"
        "starts; it ends where the budget or the room (limit - len(running)) ends. Take from waiting one by one, no list().",
        "grants = [0] * len(running)\n"
        "for i, n in enumerate(running): if n == 1: ...   then the same for n > 1 with min(n, budget)\n"
        "then: for n in waiting, after checking that there is room and budget left, append min(n, budget).",
    ),
    Seam("batching", "batching policy", lambda cls: {"batching": cls()}),
    (Continuous, share, start),
)


# 5.2 break: where a mixed step is sampled -------------------------------------------------------------------------------------


def _true_places(granted: Sequence[int], left: Sequence[int]) -> list[int | None]:
    """Token by token: the flat step is walked, and who has just computed the last token it had left is noted."""
    places: list[int | None] = [None] * len(granted)
    rows = [row for row, n in enumerate(granted) for _ in range(n)]
    missing = list(left)
    for place, row in enumerate(rows):
        missing[row] -= 1
        if not missing[row]:
            places[row] = place
    return places


def _places(f: Any, granted: Sequence[int], left: Sequence[int]) -> None:
    got, expected = f(tuple(granted), tuple(left)), _true_places(granted, left)
    what = f"granted={list(granted)}, left={list(left)}"
    if not isinstance(got, list) or len(got) != len(expected):
        raise Mismatch(f"{what}: one entry for each of {len(expected)} requests in a list, got {show(got)}")
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if not (g is None or is_whole(g)) or g != e:  # in words of its own: None is an answer here, not a forgotten return
            place = f"place of request {i}: got {show(g)}, expected {show(e)}"
            raise Mismatch(f"{what}: {place}; in all: got {show(got)}, expected {show(expected)}")


def _break_shape(f: Any) -> None:
    got = f((1, 1), (1, 1))
    if not isinstance(got, list) or len(got) != 2 or not all(is_whole(p) or p is None for p in got):
        raise Mismatch(f"sample_places gives a list, one whole number or None for each request, got {show(got)}")


def _break_by_hand(f: Any) -> None:
    _places(f, (1, 1, 1), (1, 1, 1))
    _places(f, (1, 6, 1), (1, 14, 1))
    _places(f, (1, 8, 1), (1, 8, 1))


def _break_random(f: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(300):
        left = [draw.choice((1, 1, draw.randint(1, 30))) for _ in range(draw.randint(1, 6))]
        _places(f, [draw.choice((n, draw.randint(1, n))) for n in left], left)


def _break_edges(f: Any) -> None:
    _places(f, (1, 0, 4), (1, 9, 4))
    _places(f, (0, 0, 3), (1, 1, 9))
    _places(f, (1,), (7,))
    _places(f, (), ())


def _break_state(f: Any) -> None:
    granted, left = [1, 4, 0, 2], [1, 9, 1, 2]
    f(granted, left)
    expect_equal((granted, left), ([1, 4, 0, 2], [1, 9, 1, 2]), what="granted and left after the call")


def _break_engine(f: Any) -> None:
    model = Transformer.random(TINY)
    prompts = [[3, 1], [3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8]]
    outputs = LLM(model, dtype="float32", num_blocks=24).generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    for budget in (64, 5, 1):
        got = _drive(model, f, prompts, budget)
        expect_equal(got, [list(o.token_ids) for o in outputs], what=f"tokens with a budget of {budget}")


def _drive(model: Transformer, f: Callable[..., Any], prompts: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Six greedy tokens for each prompt, all in one batch, each token taken from where f says."""
    store = PlainKVStore.allocate(model.config, 64 * len(prompts), model.dtype, model.device)
    runner = ModelRunner(model, store, TorchAttention(), 64)
    texts, computed = [list(p) for p in prompts], [0] * len(prompts)
    for _ in range(200):
        left = [len(t) - c if len(t) < len(p) + 6 else 0 for t, c, p in zip(texts, computed, prompts, strict=True)]
        at_work = [i for i, n in enumerate(left) if n]
        if not at_work:
            return [t[len(p) :] for t, p in zip(texts, prompts, strict=True)]
        wanted = [left[i] for i in at_work]
        granted = _fair(wanted, (), budget, len(prompts))
        ends = [(i, computed[i] + n) for i, n in zip(at_work, granted, strict=True) if n]
        rows = [Row(texts[i][computed[i] : end], computed[i], [i]) for i, end in ends]
        places = f(tuple(granted), tuple(wanted))
        expect_at_most(max((p for p in places if p is not None), default=0), sum(granted) - 1, what="the last place")
        taken = [(i, p) for i, p in zip(at_work, places, strict=True) if p is not None]
        batch = ForwardBatch.build(rows, 64)
        if taken:
            batch = replace(batch, logit_indices=torch.tensor([p for _, p in taken]))
        logits, _ = runner.forward(batch)
        for i, n in zip(at_work, granted, strict=True):
            computed[i] += n
        for (i, _), row in zip(taken, logits, strict=False):
            texts[i].append(int(row.argmax()))
    raise Mismatch("200 steps did not give six tokens to everybody")


BREAK = Task(
    "5.2 break",
    "Find out why answers went wrong when chunking was switched on",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: three decode; a piece of a prompt between them; its end", _break_by_hand, hint=1),
        NamedCheck("random: pieces of all lengths", _break_random, hint=2),
        NamedCheck("edges: who sits out, one token of many, an empty step", _break_edges, hint=3),
        NamedCheck("state: inputs unchanged", _break_state, hint=2),
        NamedCheck("engine: greedy tokens of a mixed batch", _break_engine, hint=3),
    ),
    (
        "Before chunking, whoever took part in a step computed all it had left. Which two things were true then of every\n"
        "request in a step, and are not any more?",
        "granted and left have one number for each request. The step's tokens lie one after the other: the tokens of request i\n"
        "end at sum(granted[: i + 1]).",
        "Who has computed less than it had left has no next token yet; who was granted nothing has no place at all. Both are\n"
        "answered by comparing two numbers.",
    ),
)  # fmt: skip


# 5.2 stretch: the largest chunk within a limit --------------------------------------------------------------------------------


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

TASKS = (CORE, BREAK, STRETCH)
