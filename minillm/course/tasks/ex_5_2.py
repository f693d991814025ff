"""Exercise 5.2: a token budget that serves decodes first, an engine that guesses its phase, the largest chunk within a limit."""

from __future__ import annotations

import copy
import random
from typing import Any, Callable, Iterator, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.config import ModelConfig
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole, show
from minillm.course.task import NamedCheck, Seam, Task
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.policies import Continuous, share, start
from minillm.engine.runner import ModelRunner
from minillm.engine.scheduler import SchedulerOutput
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


# 5.2 break: an engine that guesses its phase ----------------------------------------------------------------------------------


def _true_piece(prompt: int, outputs: int, computed: int, budget: int) -> tuple[int, int, bool]:
    total = prompt + outputs
    stop = min(total, computed + budget)
    return computed, stop, stop == total


def _piece(f: Any, *args: int) -> None:
    got = f(*args)
    if not isinstance(got, tuple) or len(got) != 3:
        raise Mismatch(f"next_piece gives (start, stop, samples), got {show(got)}")
    names = ("prompt", "outputs", "computed", "budget")
    what = ", ".join(f"{name}={n}" for name, n in zip(names, args, strict=True))
    expect_equal(got, _true_piece(*args), what=what)


def _break_shape(f: Any) -> None:
    got = f(10, 0, 0, 4)
    if not isinstance(got, tuple) or len(got) != 3 or not (is_whole(got[0]) and is_whole(got[1]) and isinstance(got[2], bool)):
        raise Mismatch(f"next_piece gives (start, stop, samples): two whole numbers and a bool, got {show(got)}")


def _break_by_hand(f: Any) -> None:
    for args in ((10, 0, 0, 4), (10, 0, 4, 4), (10, 0, 8, 4), (10, 1, 10, 4), (10, 2, 11, 4)):
        _piece(f, *args)


def _break_random(f: Any) -> None:
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(300):
        prompt, outputs = draw.randint(1, 40), draw.choice([0, 0, draw.randint(1, 9)])
        _piece(f, prompt, outputs, draw.randint(0, prompt + outputs - 1), draw.randint(1, 50))


def _break_preempted(f: Any) -> None:
    for computed in (0, 4, 8, 12):
        _piece(f, 10, 3, computed, 4)


def _break_inside(f: Any) -> None:
    _piece(f, 10, 3, 8, 64)
    _piece(f, 10, 3, 8, 2)
    _piece(f, 1, 0, 0, 1)


def _break_engine(f: Any) -> None:
    model, prompt = Transformer.random(TINY), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    llm = LLM(model, dtype="float32", num_blocks=8, block_size=16)
    expected = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
    for budget in (1, 4, 64):
        for lost_after in (None, 1, 3):
            got = _drive(model, f, prompt, budget, lost_after)
            lost = f", KV lost after {lost_after} tokens" if lost_after else ""
            expect_equal(got, expected, what=f"tokens with pieces of {budget}{lost}")


def _drive(
    model: Transformer, f: Callable[..., Any], prompt: Sequence[int], budget: int, lost_after: int | None
) -> tuple[int, ...]:
    """Eight greedy tokens, computed in the pieces that f names; at one point the KV is taken away."""
    store = PlainKVStore.allocate(model.config, 64, model.dtype, model.device)
    runner = ModelRunner(model, store, TorchAttention(), 64)
    ids, computed = list(prompt), 0
    for _ in range(200):
        outputs = len(ids) - len(prompt)
        if outputs == 8:
            return tuple(ids[len(prompt) :])
        start_, stop, samples = f(len(prompt), outputs, computed, budget)
        if start_ != computed or not start_ < stop <= len(ids):
            raise Mismatch(f"{computed} of {len(ids)} tokens are computed: got the piece {start_}..{stop}")
        logits, _ = runner.forward(ForwardBatch.build([Row(ids[start_:stop], start_, [0], samples)], 64))
        computed = stop
        if samples:
            ids.append(int(logits[0].argmax()))
            if len(ids) - len(prompt) == lost_after:
                computed, lost_after = 0, None
    raise Mismatch("200 steps did not give eight tokens")


BREAK = Task(
    "5.2 break",
    "Find out why a preempted request goes on wrongly",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: a prompt of ten in pieces of four, then two tokens", _break_by_hand, hint=2),
        NamedCheck("random: any progress", _break_random, hint=1),
        NamedCheck("edges: KV lost after three tokens", _break_preempted, hint=1),
        NamedCheck("edges: a hit in the prefix cache, a prompt of one token", _break_inside, hint=3),
        NamedCheck("engine: greedy tokens in pieces, with KV lost on the way", _break_engine, hint=3),
    ),
    (
        "\"It has output, so it decodes\" is a guess about the past. What has a request left to compute when its KV was taken\n"
        "away after three tokens?",
        "start is computed. stop is at most prompt + outputs, and at most budget tokens later. samples: nothing is left then.",
        "total = prompt + outputs; the piece ends at computed + budget, or where nothing is left. Which stop means that the\n"
        "logits of the newest token are there?",
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
