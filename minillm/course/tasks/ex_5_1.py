"""Exercise 5.1: a continuous batching policy, a request whose phase is guessed, and the steps of a thousand requests."""

from __future__ import annotations

import itertools
from typing import Any, Iterator, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, is_whole, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.engine import policies
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.runner import ModelRunner
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.traffic.simulate import simulate
from minillm.traffic.trace import at_once, exponential_lengths, lognormal_lengths, make_trace, uniform_lengths

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=96,
    name="a tiny random model",
)  # fmt: skip
WORK = (([3, 1, 4, 1, 5, 9, 2, 6, 5] * 4, 3), ([2, 7], 9), ([1, 6, 1, 8, 0], 1), ([5] * 20, 6), ([4, 4], 5))


def _draw(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def _several(n: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(_draw(low, high) for _ in range(n))


# 5.1 core: a continuous policy ------------------------------------------------------------------------------------------------


class Queue:
    """The waiting requests' numbers, worked out one by one as they are taken; counts how many were."""

    def __init__(self, left: Sequence[int]):
        self.left, self.taken = left, 0

    def __iter__(self) -> Iterator[int]:
        for n in self.left:
            self.taken += 1
            yield n


def _expected(running: Sequence[int], waiting: Sequence[int], budget: int, limit: int) -> list[int]:
    """What a continuous policy grants, one request after the other."""
    grants: list[int] = []
    for place, n in enumerate([*running, *waiting]):
        free = budget - sum(grants)
        if place >= len(running) and (free == 0 or place >= limit):
            break
        grants.append(n if n < free else free)
    return grants


def _ask(policy: Any, running: Sequence[int], waiting: Sequence[int], budget: int, limit: int, what: str) -> None:
    got = policy().grants(tuple(running), iter(waiting), budget, limit)
    case = f"{what}: grants(running={tuple(running)}, waiting={tuple(waiting)}, budget={budget}, limit={limit})"
    expect_equal(list(got), _expected(running, waiting, budget, limit), what=case)


def _core_shape(policy: Any) -> None:
    if not callable(policy):
        raise Mismatch("check takes the class itself, not an object of it: the checks make objects of their own")
    for running, waiting in (((1, 1), (3, 3)), ((), (2,)), ((5,), ())):
        got = policy().grants(running, iter(waiting), 100, 8)
        if not isinstance(got, (list, tuple)) or not all(is_whole(n) for n in got):
            raise Mismatch(f"grants gives a list of whole numbers, got {got!r:.60}")
        if len(got) != len(running) + len(waiting):
            both = f"{len(running)} run, {len(waiting)} wait and all fit"
            raise Mismatch(f"{both}: one grant for each, got {len(got)}")


def _core_by_hand(policy: Any) -> None:
    _ask(policy, (1, 1), (9, 9), 8, 4, "two decode, the next prompt gets the rest of the budget")
    _ask(policy, (1, 5, 1), (9,), 4, 4, "a long prompt runs; the last one sits this step out")
    _ask(policy, (1,), (2, 3, 4), 100, 3, "two slots are free")


def _core_random(policy: Any) -> None:
    for _ in range(60):
        limit = _draw(1, 8)
        running = _several(_draw(0, limit), 1, 12)
        _ask(policy, running, _several(_draw(0, 9), 1, 12), _draw(1, 40), limit, "drawn at random")


def _core_empty(policy: Any) -> None:
    _ask(policy, (), (), 8, 4, "nobody is there")
    _ask(policy, (1, 1, 1), (), 8, 4, "nobody waits")
    _ask(policy, (), (40,), 8, 4, "a prompt longer than the budget")


def _core_full(policy: Any) -> None:
    _ask(policy, (1, 1), (1, 1), 8, 2, "every slot is taken")
    _ask(policy, (4, 4), (1, 1), 8, 4, "the budget is used up by those who run")
    _ask(policy, (1, 1), (6, 1), 8, 4, "a prompt that fits exactly")
    _ask(policy, (1, 1, 1), (1,), 2, 4, "less budget than requests")


def _core_state(policy: Any) -> None:
    mine, running, waiting = policy(), (1, 7), [3, 3]
    with unchanged(waiting=waiting):
        first = list(mine.grants(running, iter(waiting), 9, 4))
    mine.grants((2, 2, 2), iter([5]), 30, 8)
    expect_equal(list(mine.grants(running, iter(waiting), 9, 4)), first, what="the same question, asked again")


def _served(policy: Any, **options: Any) -> tuple[list[tuple[int, ...]], int]:
    settings: dict[str, Any] = dict(dtype="float32", block_size=4, num_blocks=64, max_num_seqs=3, max_num_batched_tokens=16)
    llm = LLM(Transformer.random(TINY), batching=policy, **(settings | options))
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in WORK]
    outputs = llm.generate([prompt for prompt, _ in WORK], params)
    return [o.token_ids for o in outputs], llm.meter.steps


def _core_engine(policy: Any) -> None:
    expected, _ = _served("sequential")
    for options in ({}, {"max_num_batched_tokens": 5}, {"num_blocks": 14}):
        got, steps = _served(policy(), **options)
        said = ", ".join(f"{k}={v}" for k, v in options.items()) or "as it is"
        expect_equal(got, expected, what=f"tokens of five requests on your policy, engine {said}")
        expect_equal(steps, _served("continuous", **options)[1], what=f"steps, engine {said}")


def _core_budget(policy: Any) -> None:
    queue = Queue([4] * 10_000)
    policy().grants((1,) * 6, queue, 64, 8)
    expect_at_most(queue.taken, 2, "waiting requests taken from the iterable, two slots free")
    queue = Queue([40] * 10_000)
    policy().grants((1,) * 6, queue, 64, 32)
    expect_at_most(queue.taken, 2, "waiting requests taken from the iterable, budget for two")
    trace = make_trace("traffic", at_once(60), [3] * 60, lognormal_lengths(60, 8, 1.0, high=60), 61)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    run = simulate(trace, lambda _: 1.0, batching=policy(), **options)
    best = simulate(trace, lambda _: 1.0, **options)
    expect_at_most(len(run.steps), len(best.steps), "steps for 60 requests on 8 slots")


CORE = Task(
    "5.1 core",
    "Write a continuous batching policy",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: three steps by hand", _core_by_hand, hint=1),
        NamedCheck("random: against one request after the other", _core_random, hint=3),
        NamedCheck("edges: nobody runs, nobody waits, a long prompt", _core_empty, hint=2),
        NamedCheck("edges: no slot or no budget is left", _core_full, hint=3),
        NamedCheck("state: nothing is remembered, inputs unchanged", _core_state, hint=1),
        NamedCheck("engine: five requests, small budgets and pools", _core_engine, hint=3),
        NamedCheck("budget: requests looked at, steps taken", _core_budget, hint=3),
    ),
    (
        "Everything that a step needs is in the four arguments. Go through the running requests, oldest first, and give each\n"
        "what it wants while the budget lasts. Then let waiting ones start in the same way, until slots or budget are used up.",
        "The answer has len(running) numbers first, 0 for a request that gets nothing this step, and then one for each waiting\n"
        "request that starts, at least 1. Free slots: limit - len(running). The other waiting ones are not in the answer.",
        "for n in running: grant = min(n, budget); budget -= grant. Then queue = iter(waiting), and while slots are free and\n"
        "budget > 0: left = next(queue, None); stop at None. Test before you take: a request that was taken was looked up.",
    ),
    Seam("batching", "batching policy", lambda cls: {"batching": cls()}),
    (
        policies.Continuous, policies.Sequential, policies.Static, policies.StaticSorted, policies.share, policies.start,
        _expected,
    ),
)  # fmt: skip


# 5.1 break: what a request computes next --------------------------------------------------------------------------------------


def _next(prompt_len: int, num_tokens: int, num_computed: int, budget: int) -> tuple[int, bool]:
    left = num_tokens - num_computed
    return (left, True) if left <= budget else (budget, False)


def _compare(f: Any, prompt_len: int, num_tokens: int, num_computed: int, budget: int, what: str) -> None:
    case = f"{what}: prompt_len={prompt_len}, num_tokens={num_tokens}, num_computed={num_computed}, budget={budget}"
    expected = _next(prompt_len, num_tokens, num_computed, budget)
    expect_equal(tuple(f(prompt_len, num_tokens, num_computed, budget)), expected, what=case)


def _break_shape(f: Any) -> None:
    got = f(5, 5, 0, 8)
    if not isinstance(got, tuple) or len(got) != 2 or not is_whole(got[0]) or not isinstance(got[1], bool):
        raise Mismatch(f"it gives (tokens, samples), a whole number and True or False, got {got!r:.60}")


def _break_prompt(f: Any) -> None:
    """33 tokens, 8 at a time: 8, 8, 8, 8, 1."""
    done, seen = 0, []
    for _ in range(5):
        n, samples = f(33, 33, done, 8)
        seen.append((int(n), samples))
        done += n
    expect_equal(seen, [(8, False)] * 4 + [(1, True)], what="a prompt of 33 in chunks of 8")


def _break_decode(f: Any) -> None:
    for output in (1, 2, 7):
        _compare(f, 5, 5 + output, 5 + output - 1, 8, f"{output} tokens are out, one is to be computed")


def _break_random(f: Any) -> None:
    for _ in range(60):
        prompt = _draw(1, 40)
        _compare(f, prompt, prompt, _draw(0, prompt - 1), _draw(1, 50), "a prompt, drawn at random")


def _break_preempted(f: Any) -> None:
    _compare(f, 6, 9, 0, 64, "three tokens are out, and its KV was taken away")
    _compare(f, 6, 9, 0, 4, "the same, and the budget is small")
    _compare(f, 6, 9, 4, 4, "the second chunk of the same: it ends inside the output")
    _compare(f, 6, 9, 8, 4, "the last chunk of the same")
    _compare(f, 1, 40, 0, 64, "a prompt of one token, preempted late")


def _break_no_budget(f: Any) -> None:
    _compare(f, 5, 5, 0, 0, "no budget is left for a prompt")
    _compare(f, 5, 7, 6, 0, "no budget is left for one that decodes")


def _answer(model: Transformer, f: Any, prompt: Sequence[int], tokens: int, chunk: int, preempt_at: Sequence[int]) -> list[int]:
    """Greedy tokens of one request on a loop of its own; when so many are out, its KV is thrown away."""
    store = PlainKVStore.allocate(model.config, 97, torch.float32)
    runner = ModelRunner(model, store, TorchAttention(), 96)
    ids, computed, to_preempt = list(prompt), 0, set(preempt_at)
    for _ in range(400):
        out = len(ids) - len(prompt)
        if out == tokens:
            return ids[len(prompt) :]
        if out in to_preempt:
            to_preempt.remove(out)
            computed = 0
            store.poison(torch.arange(1, 97))
        n, samples = f(len(prompt), len(ids), computed, chunk)
        if not n:
            raise Mismatch(f"nothing is computed although {chunk} tokens of budget are left")
        row = Row(ids[computed : computed + n], computed, [0], wants_logits=bool(samples))
        with torch.inference_mode():
            logits, _ = runner.forward(ForwardBatch.build([row], 96))
        computed += n
        if samples:
            ids.append(int(logits[0].argmax()))
    raise Mismatch(f"the request has not ended after 400 steps; it has {len(ids) - len(prompt)} of {tokens} tokens")


def _break_engine(f: Any) -> None:
    model = Transformer.random(TINY)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    expected = list(LLM(model, num_blocks=8).generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids)
    for chunk, preempt_at in ((64, ()), (4, ()), (64, (3,)), (4, (3, 7))):
        got = _answer(model, f, prompt, 12, chunk, preempt_at)
        when = f", preempted after {' and '.join(map(str, preempt_at))} tokens" if preempt_at else ""
        expect_equal(got, expected, what=f"tokens, at most {chunk} a step{when}")


BREAK = Task(
    "5.1 break",
    "Find the fault in what a request computes next",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: a prompt of 33 in chunks of 8", _break_prompt, hint=2),
        NamedCheck("exact: one token after another", _break_decode, hint=2),
        NamedCheck("random: prompts and budgets", _break_random, hint=2),
        NamedCheck("edges: preempted after three tokens", _break_preempted, hint=1),
        NamedCheck("edges: no budget is left", _break_no_budget, hint=3),
        NamedCheck("engine: the same tokens, preempted or not", _break_engine, hint=1),
    ),
    (
        "The code asks whether there is output yet, and takes the answer for the phase. Which request has output and still has\n"
        "its whole prompt to compute?",
        "tokens = how many of num_tokens - num_computed fit into the budget. samples = whether nothing is left after them: a\n"
        "token can be sampled only from the logits of the last one. prompt_len says nothing about either.",
        "left = num_tokens - num_computed; n = min(left, budget); return n, ... Which n means that the request has caught up?\n"
        "And is that true when n is 0?",
    ),
    references=(_next,),
)


# 5.1 stretch: steps without taking them ---------------------------------------------------------------------------------------

BATCHINGS = ("static", "static-sorted", "continuous")


def _oracle(lengths: Sequence[int], slots: int, batching: str) -> int:
    """The engine's own scheduler, one step after the other."""
    trace = make_trace("lengths", at_once(len(lengths)), [1] * len(lengths), lengths, 61)
    return len(simulate(trace, lambda _: 1.0, batching=batching, max_num_seqs=slots).steps)


def _count(f: Any, lengths: Sequence[int], slots: int, batching: str, expected: int, what: str = "") -> None:
    got = f(list(lengths), slots, batching)
    shown = list(lengths) if len(lengths) < 9 else f"{len(lengths)} lengths"
    expect_equal(got, expected, what=f"{what}count_steps({shown}, {slots}, {batching!r})")


def _stretch_shape(f: Any) -> None:
    for batching in BATCHINGS:
        got = f([2, 3], 2, batching)
        if not is_whole(got):
            raise Mismatch(f"count_steps gives a whole number, got {got!r:.60}")


def _stretch_by_hand(f: Any) -> None:
    _count(f, [5, 1, 4, 2], 2, "static", 9)
    _count(f, [5, 1, 4, 2], 2, "static-sorted", 7)
    _count(f, [5, 1, 4, 2], 2, "continuous", 7)
    _count(f, [1, 1, 6, 6], 2, "continuous", 7)


def _stretch_random(f: Any) -> None:
    for _ in range(12):
        lengths, slots = _several(_draw(1, 20), 1, 12), _draw(1, 6)
        for batching in BATCHINGS:
            _count(f, lengths, slots, batching, _oracle(lengths, slots, batching))


def _stretch_edges(f: Any) -> None:
    for batching in BATCHINGS:
        _count(f, [], 4, batching, 0, "nobody: ")
        _count(f, [7], 4, batching, 7, "fewer requests than slots: ")
        _count(f, [3, 5, 2], 1, batching, 10, "one slot: ")
        _count(f, [4] * 6, 3, batching, 8, "equal lengths: ")
        _count(f, [4] * 7, 3, batching, 12, "a batch that is not full: ")


def _stretch_law(f: Any) -> None:
    """Use of the slots for exponential lengths against 1 / H_n."""
    for n in (4, 16):
        lengths = exponential_lengths(n * 1000, 300, seed=n)
        use = sum(lengths) / (n * f(list(lengths), n, "static"))
        law = 1 / sum(1 / i for i in range(1, n + 1))
        expect_equal(use, law, atol=0.03, what=f"share of {n} slots in use, exponential lengths, static")


def _stretch_state(f: Any) -> None:
    lengths = [5, 1, 4, 2]
    for batching in BATCHINGS:
        with unchanged(lengths=lengths):
            f(lengths, 2, batching)


def _stretch_engine(f: Any) -> None:
    lengths = [5, 1, 9, 2, 3, 3, 8]
    for batching in BATCHINGS:
        llm = LLM(Transformer.random(TINY), block_size=4, num_blocks=40, max_num_seqs=3, batching=batching)
        llm.generate([[i] for i in range(7)], [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
        _count(f, lengths, 3, batching, llm.meter.steps, "steps that the engine took: ")


class Long(int):
    """A length that counts how often it is compared or used in a sum."""

    uses = itertools.count()

    __hash__ = int.__hash__


def _counted(name: str) -> Any:
    def operation(self: Long, other: Any) -> Any:
        next(Long.uses)
        result = getattr(int, name)(self, other)
        return Long(result) if type(result) is int else result

    return operation


for _name in ("add", "radd", "sub", "rsub", "lt", "gt", "le", "ge", "eq"):
    setattr(Long, f"__{_name}__", _counted(f"__{_name}__"))


def _stretch_budget(f: Any) -> None:
    """A thousand requests: the work may grow with them and with the logarithm of the slots, not with the lengths."""
    lengths = [Long(n) for n in uniform_lengths(1000, 1000, 3000, seed=1)]
    for batching in BATCHINGS:
        Long.uses = itertools.count()
        f(list(lengths), 16, batching)
        used = next(Long.uses)
        expect_at_most(used, 60_000, f"sums and comparisons for 1,000 lengths of 1,000 to 3,000, {batching}")


STRETCH = Task(
    "5.1 stretch",
    "The steps of a thousand requests, without taking them",
    (
        NamedCheck("shape", _stretch_shape, hint=2),
        NamedCheck("exact: four requests on two slots by hand", _stretch_by_hand, hint=1),
        NamedCheck("random: against the engine's scheduler", _stretch_random, hint=2),
        NamedCheck("random: exponential lengths and the harmonic number", _stretch_law, hint=1),
        NamedCheck("edges: nobody, one slot, equal lengths, a batch that is not full", _stretch_edges, hint=2),
        NamedCheck("state: lengths unchanged", _stretch_state),
        NamedCheck("engine: the steps that an engine takes", _stretch_engine, hint=3),
        NamedCheck("budget: work that does not grow with the lengths", _stretch_budget, hint=3),
    ),
    (
        "A static batch takes as many steps as its longest answer; cut the list into batches and add up. Sorting first changes\n"
        "only which answers share a batch. For continuous batching think of each slot as a cashier: who is free first?",
        "static: sum of max(lengths[i : i + slots]) for i = 0, slots, 2 * slots …; an empty list has no batch. continuous: for\n"
        "each slot the step at which it is free next; the answer is the largest when all requests have been placed.",
        "ends = [0] * slots as a heap; for each length: heapq.heappush(ends, heapq.heappop(ends) + length). max(ends).\n"
        "static-sorted is static of sorted(lengths); lengths itself must stay as it is.",
    ),
    references=(simulate, _oracle),
)

TASKS = (CORE, BREAK, STRETCH)
