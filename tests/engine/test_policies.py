"""Batching policies: what they grant, what the engine then does, and what a policy of one's own may and may not do."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm import EngineConfig, SamplingParams
from minillm.engine.policies import POLICIES, Continuous, Sequential, Static, StaticSorted

from ..cache.dict_prefix import DictPrefixCache
from ..strategies import greedy, run_to_end, tiny_engine

EVERY = [(name, prefill) for name in POLICIES for prefill in ("chunked", "first")]


def ask(engine, prompt, max_tokens=4):
    return engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def steps_of(engine):
    """Run to the end; {request id: tokens} of each step."""
    steps, schedule = [], engine.scheduler.schedule

    def recording():
        plan = schedule()
        steps.append({s.request.request_id: s.num_tokens for s in plan.scheduled})
        return plan

    engine.scheduler.schedule = recording
    run_to_end(engine)
    return steps


# --- numbers in, numbers out ---


@given(
    st.sampled_from(EVERY), st.lists(st.integers(1, 20), max_size=6), st.lists(st.integers(1, 20), max_size=8),
    st.integers(1, 30), st.integers(0, 4),
)  # fmt: skip
def test_every_policy_keeps_the_rules(policy, running, waiting, budget, room):
    name, prefill = policy
    limit = max(len(running) + room, 1)
    if name == "sequential":
        running = running[:1]
    taken = iter(waiting)
    grants = POLICIES[name](prefill).grants(tuple(running), taken, budget, limit)
    started = grants[len(running) :]
    left = [*running, *waiting]
    assert len(running) <= len(grants) <= len(left) and sum(grants) <= budget
    assert all(0 <= n <= wanted for n, wanted in zip(grants, left, strict=False)) and all(n > 0 for n in started)
    assert len(running) + len(started) <= limit
    assert any(grants) or not left, "somebody goes on"
    assert len(waiting) - len(list(taken)) <= len(started) + 1, "those who cannot start are not even looked at"


@pytest.mark.parametrize(
    "policy, running, waiting, budget, limit, grants",
    [
        (Continuous(), (1, 1), (9, 9), 8, 4, [1, 1, 6]),
        (Continuous(), (1, 5, 1), (9,), 4, 4, [1, 3, 0]),
        (Continuous(), (1, 1), (1, 1), 8, 3, [1, 1, 1]),
        (Continuous(), (1, 1), (), 8, 2, [1, 1]),
        (Continuous("first"), (1, 1), (9, 9), 8, 4, [0, 0, 8]),
        (Continuous("first"), (1, 5, 1), (9,), 8, 4, [0, 5, 0, 3]),
        (Continuous("first"), (1, 5, 1), (9,), 8, 3, [0, 5, 0]),
        (Continuous("first"), (1, 1), (9,), 8, 2, [1, 1]),
        (Sequential(), (), (3, 3), 8, 4, [3]),
        (Sequential(), (1,), (3,), 8, 4, [1]),
        (Static(), (), (3, 3, 3), 8, 4, [3, 3]),
        (Static(), (), (20, 3), 8, 4, [8]),
        (Static(), (), (2, 1, 2), 8, 2, [2, 1]),
        (Static(), (1, 4), (3,), 8, 4, [1, 4]),
        (Static("first"), (1, 4), (3,), 8, 4, [0, 4]),
        (StaticSorted(), (1,), (3,), 8, 4, [1]),
    ],
)
def test_grants_by_hand(policy, running, waiting, budget, limit, grants):
    assert list(policy.grants(running, iter(waiting), budget, limit)) == grants


# --- in the engine ---


WORK = [([5] * 33, 3), ([4], 6), ([6, 7], 1), ([8] * 40, 2), ([9] * 5, 5)]


@pytest.mark.parametrize("batching, prefill", EVERY)
@pytest.mark.parametrize("budget", [1, 8, 32, 33])
@pytest.mark.parametrize("num_blocks", [11, 64])
def test_every_policy_gives_the_same_tokens_at_every_budget_and_pool(batching, prefill, budget, num_blocks):
    engine = tiny_engine(batching=batching, prefill=prefill, max_num_batched_tokens=budget, num_blocks=num_blocks, max_num_seqs=3)
    names = [ask(engine, prompt, n) for prompt, n in WORK]
    done = run_to_end(engine)
    assert [done[name].token_ids for name in names] == [greedy(prompt, n) for prompt, n in WORK]
    assert engine.cache.pool.num_free == num_blocks and engine.scheduler.num_live_tokens == 0


def test_sequential_runs_one_request_at_a_time_in_order():
    engine = tiny_engine(batching="sequential")
    a, b = ask(engine, [4, 5], 2), ask(engine, [6], 2)
    assert steps_of(engine) == [{a: 2}, {a: 1}, {b: 1}, {b: 1}]


def test_prefill_first_lets_decoding_requests_wait_until_the_prompt_is_whole():
    engine = tiny_engine(prefill="first", max_num_batched_tokens=8)
    short = ask(engine, [5], 4)
    engine.step()
    long = ask(engine, [7] * 20, 2)
    assert steps_of(engine)[:4] == [{long: 8}, {long: 8}, {long: 4}, {short: 1, long: 1}]
    assert engine.meter.stalled_tokens == 3


def test_with_prefill_first_a_prompt_that_finds_no_blocks_holds_nobody_up():
    engine = tiny_engine(prefill="first", max_num_batched_tokens=8, num_blocks=3, block_size=4)
    first = ask(engine, [5] * 5, 4)
    engine.step()
    second = ask(engine, [7] * 8, 2)
    steps = steps_of(engine)
    assert steps[:4] == [{first: 1}, {first: 1}, {first: 1}, {second: 8}]


def test_with_prefill_first_a_prompt_that_was_pushed_out_of_its_second_chunk_lets_the_others_go_on():
    engine = tiny_engine(prefill="first", max_num_batched_tokens=4, num_blocks=3, block_size=4)
    first = ask(engine, [5] * 4, 5)
    engine.step()
    second = ask(engine, [7] * 10, 2)
    engine.step(), engine.step()
    steps = steps_of(engine)
    assert {first: 1} in steps and second in steps[-1]


def test_length_sorted_batches_hold_requests_of_similar_length():
    engine = tiny_engine(batching="static-sorted", max_num_seqs=2)
    lengths = [5, 1, 4, 2]
    names = [ask(engine, [4], n) for n in lengths]
    assert [set(s) for s in steps_of(engine)][:2] == [{names[1], names[3]}, {names[3]}]
    assert engine.meter.steps == 2 + 5 and engine.meter.slots_padded == 1 + 1


def test_continuous_needs_no_more_steps_than_static_and_as_many_for_equal_lengths():
    def steps(batching, lengths):
        engine = tiny_engine(batching=batching, max_num_seqs=4)
        for n in lengths:
            ask(engine, [4, 5], n)
        run_to_end(engine)
        return engine.meter.steps

    assert steps("continuous", [6] * 8) == steps("static", [6] * 8) == steps("static-sorted", [6] * 8) == 12
    mixed = [1, 9, 1, 3, 1, 9, 2, 5]
    assert steps("continuous", mixed) < steps("static-sorted", mixed) < steps("static", mixed)


def test_the_longest_cached_prefix_starts_first():
    engine = tiny_engine(prefix_cache=DictPrefixCache(4), queue_order="cache", max_num_seqs=1)
    ask(engine, [5] * 9, 1)
    run_to_end(engine)
    cold, warm = ask(engine, [6] * 9, 1), ask(engine, [5] * 9, 1)
    steps = steps_of(engine)
    assert [set(s) for s in steps] == [{warm}, {cold}]


def test_nobody_starves_behind_a_cached_prefix_that_keeps_coming():
    engine = tiny_engine(prefix_cache=DictPrefixCache(4), queue_order="cache", max_num_seqs=1)
    ask(engine, [5] * 9, 1)
    run_to_end(engine)
    cold = ask(engine, [6] * 9, 1)
    overtaken = -1
    while cold is not None:
        ask(engine, [5] * 9, 1)
        cold = None if any(o.request_id == cold for o in engine.step()) else cold
        overtaken += 1
    assert overtaken == engine.scheduler.waiting.patience


# --- a policy of one's own ---


class YoungestFirst:
    """Legal and odd: one request a step, the youngest that runs; waiting ones start when nobody else is left."""

    def grants(self, running, waiting, budget, limit):
        if running:
            return [0] * (len(running) - 1) + [min(running[-1], budget)]
        return [min(next(iter(waiting)), budget)]


def test_a_policy_of_ones_own_is_asked_and_obeyed():
    engine = tiny_engine(batching=YoungestFirst(), max_num_batched_tokens=8)
    names = [ask(engine, prompt, n) for prompt, n in WORK]
    done = run_to_end(engine)
    assert [done[name].token_ids for name in names] == [greedy(prompt, n) for prompt, n in WORK]


class Answers:
    def __init__(self, *grants):
        self.answer = grants[0] if len(grants) == 1 else list(grants)

    def grants(self, running, waiting, budget, limit):
        list(waiting)
        return self.answer


@pytest.mark.parametrize(
    "answer, message",
    [
        ([3, 3, 3], "granted 9 tokens; the budget of a step is 8"),
        ([4], "granted 4 tokens to a request that has 3 left"),
        ([-1], "granted -1 tokens to a request that has 3 left"),
        ([1, 1, 1, 1], "4 grants for 0 running requests and the 3 waiting"),
        ([1, 1, 1], "would run 3 requests at once; the limit is 2"),
        ([1.0], "whole numbers"),
        (None, "whole numbers"),
        (7, "whole numbers"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_named_and_nothing_has_changed(answer, message):
    limit = 2 if "limit" in message else 4
    engine = tiny_engine(batching=Answers(answer), max_num_batched_tokens=8, max_num_seqs=limit)
    for t in (4, 5, 6):
        ask(engine, [t] * 3, 1)
    with pytest.raises(ValueError, match=f"Answers.*{message}"):
        engine.step()
    assert len(engine.scheduler.waiting) == 3 and engine.cache.pool.num_referenced == 0


def test_a_policy_that_forgets_a_running_request_is_named():
    engine = tiny_engine()
    ask(engine, [4], 3)
    engine.step()
    engine.scheduler.policy = Answers([])
    with pytest.raises(ValueError, match="0 grants for 1 running"):
        engine.step()


@pytest.mark.parametrize("answer", [[], [0, 0]])
def test_a_policy_that_grants_nothing_is_named(answer):
    engine = tiny_engine(batching=Answers(answer))
    ask(engine, [4], 1), ask(engine, [4], 1)
    with pytest.raises(RuntimeError, match="2 requests: batching policy Answers granted nothing"):
        engine.step()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batching": "dynamic"}, "'sequential', 'static', 'static-sorted', 'continuous', got 'dynamic'"),
        ({"batching": None}, "a name or a BatchingPolicy, got None, which lacks grants"),
        ({"prefill": "last"}, "prefill must be one of 'chunked', 'first', got 'last'"),
        ({"prefill": None}, "prefill must be a string, got None"),
        ({"queue_order": "length"}, "queue_order must be one of 'arrival', 'cache', got 'length'"),
        ({"batching": "static-sorted", "queue_order": "cache"}, "orders by length; queue_order='cache'"),
        ({"batching": YoungestFirst(), "prefill": "first"}, "prefill='first'"),
        ({"batching": type("Odd", (YoungestFirst,), {"order": "age"})()}, "order of the batching policy must be .* got 'age'"),
    ],
)
def test_options_that_cannot_hold_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


# --- endless mixtures ---


@pytest.mark.slow
@pytest.mark.parametrize("batching, prefill", [("continuous", "chunked"), ("continuous", "first"), ("static-sorted", "first")])
def test_two_thousand_short_requests_with_random_aborts_leak_nothing_and_all_end(batching, prefill):
    random = Random(0)
    engine = tiny_engine(
        batching=batching, prefill=prefill, queue_order="arrival" if batching == "static-sorted" else "cache",
        prefix_cache=DictPrefixCache(4), num_blocks=24, max_num_seqs=8, max_num_batched_tokens=16,
    )  # fmt: skip
    live, ended, sent = set(), 0, 0
    while sent < 2000 or engine.has_work:
        for _ in range(min(random.randint(0, 12), 2000 - sent)):
            live.add(ask(engine, [random.randint(2, 4) for _ in range(random.randint(1, 12))], random.randint(1, 5)))
            sent += 1
        for name in [n for n in sorted(live) if random.random() < 0.05]:
            assert engine.abort(name).finish_reason == "abort"
            live.discard(name)
            ended += 1
        for out in engine.step():
            if out.finished:
                live.remove(out.request_id)
                ended += 1
    pool = engine.cache.pool
    pool.check()
    assert ended == 2000 and not live and pool.num_referenced == 0 and engine.scheduler.num_live_tokens == 0
    assert not engine.scheduler.waiting and not engine.scheduler.running
