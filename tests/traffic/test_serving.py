"""A trace on a real engine and without a model: the same steps, the same tokens, times that add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import SamplingParams
from minillm.engine.policies import POLICIES
from minillm.perf.hardware import CARDS
from minillm.perf.roofline import predict, step_work
from minillm.traffic.replay import replay
from minillm.traffic.run import SLO, Row, Step
from minillm.traffic.simulate import simulate, simulate_split
from minillm.traffic.step_time import Roofline, StepCurve
from minillm.traffic.trace import Arrival, Trace, at_once, make_trace, poisson, uniform_lengths

from ..strategies import VOCAB, policies, tiny_config, tiny_engine

EVERY = [(name, prefill) for name in POLICIES for prefill in ("chunked", "first")]


class Clock:
    """Time that passes only when somebody looks at it or sleeps."""

    def __init__(self, tick=0.001):
        self.now, self.tick, self.slept = 0.0, tick, []

    def __call__(self):
        self.now += self.tick
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


def trace_of(n=12, times=None, seed=1, longest=12):
    outputs = uniform_lengths(n, 1, 10, seed + 1)
    return make_trace("t", times or at_once(n), uniform_lengths(n, 1, longest, seed), outputs, VOCAB, seed)


def sharing(seed, n=12):
    """Prompts that begin alike, each with a token that no other has: no answer is another's, or begins somebody's prompt, and in
    a simulation no two answers are alike."""
    heads, tails = uniform_lengths(n, 1, 9, seed), uniform_lengths(n, 1, 3, seed + 1)
    prompts = [(4,) * heads[i] + (5 + i,) + (3,) * tails[i] for i in range(n)]
    outputs = uniform_lengths(n, 1, 10, seed + 2)
    return Trace("sharing", tuple(Arrival(0.0, p, m) for p, m in zip(prompts, outputs, strict=True)))


def shape(run):
    """What each step did, without its times."""
    return [(s.rows, s.waiting, s.padded_rows, s.padded_tokens, s.preempted) for s in run.steps]


def one_second(step):
    return 1.0


@settings(max_examples=25)
@given(
    policies, st.integers(0, 50), st.integers(6, 20), st.integers(1, 20), st.integers(1, 5), st.integers(1, 5),
    st.sampled_from(["none", "hash", "radix"]),
)  # fmt: skip
def test_a_simulation_takes_exactly_the_steps_of_the_engine(policy, seed, blocks, budget, seqs, block_size, prefix):
    trace = sharing(seed) if prefix != "none" else trace_of(seed=seed, longest=10)
    blocks = max(blocks, -(-trace.longest // block_size))
    options = dict(
        num_blocks=blocks, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=seqs, prefix_cache=prefix, **policy
    )
    clock = Clock()
    real = replay(tiny_engine(**options), trace, clock, clock.sleep)
    simulated = simulate(trace, one_second, **options)
    assert shape(real) == shape(simulated)
    assert [len(r.token_times) for r in real.requests] == [a.output_len for a in trace.arrivals]
    assert [len(r.token_times) for r in simulated.requests] == [a.output_len for a in trace.arrivals]
    assert simulated.seconds == len(simulated.steps), "a second each"


@pytest.mark.parametrize("kv_cache", ["contiguous", "none"])
def test_the_baselines_of_the_cache_are_simulated_too(kv_cache):
    options = dict(kv_cache=kv_cache, num_blocks=48, block_size=2, max_model_len=24, max_num_batched_tokens=40, max_num_seqs=3)
    clock, trace = Clock(), trace_of()
    assert shape(replay(tiny_engine(**options), trace, clock)) == shape(simulate(trace, one_second, **options))


@pytest.mark.parametrize("allocation", ["reserve", "exact"])
def test_reserved_strips_are_simulated_too(allocation):
    options = dict(allocation=allocation, num_blocks=30, block_size=2, max_model_len=24, max_num_batched_tokens=40)
    clock, trace = Clock(), trace_of()
    assert shape(replay(tiny_engine(**options), trace, clock)) == shape(simulate(trace, one_second, **options))


def test_a_request_that_joins_finds_the_prompt_of_one_that_still_runs():
    prompt = (4, 5, 6, 7, 8, 9, 10)
    trace = Trace("t", (Arrival(0.0, prompt, 6), Arrival(0.0, prompt, 2)))
    options = dict(num_blocks=20, block_size=2, max_num_batched_tokens=7, prefix_cache="radix")
    clock = Clock()
    simulated = simulate(trace, one_second, **options)
    assert shape(replay(tiny_engine(**options), trace, clock)) == shape(simulated)
    assert [sum(row.new for row in s.rows) for s in simulated.steps[:2]] == [7, 2], "six of its seven tokens were there"


@pytest.mark.parametrize("option", [{"speculative": "ngram"}, {"attention_window": 4}, {"overlap": True}, {"kv_memory": 9}])
def test_an_option_that_a_simulation_does_not_know_is_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}=.* cannot be simulated"):
        simulate(trace_of(), one_second, **option)


def test_without_num_blocks_a_simulated_pool_has_room_for_everybody():
    run = simulate(trace_of(), one_second, max_num_seqs=4)
    assert not any(s.preempted for s in run.steps) and max(len(s.rows) for s in run.steps) == 4


def test_arrivals_are_waited_for_and_waiting_in_the_queue_counts():
    trace = Trace("t", tuple(Arrival(t, (5, 6), 2) for t in (3.0, 3.5, 10.0)))
    run = simulate(trace, one_second, batching="sequential")
    assert [r.token_times for r in run.requests] == [(4.0, 5.0), (6.0, 7.0), (11.0, 12.0)]
    assert [r.ttft for r in run.requests] == [1.0, 2.5, 1.0] and run.seconds == 9.0
    clock = Clock()
    real = replay(tiny_engine(batching="sequential"), trace, clock, clock.sleep)
    assert len(clock.slept) >= 2 and all(r.token_times[0] >= r.arrival.time for r in real.requests)
    assert [r.arrival for r in real.requests] == list(trace.arrivals)


def test_a_replay_refuses_a_busy_engine_and_requests_that_do_not_fit_before_it_starts():
    engine = tiny_engine(num_blocks=2)
    with pytest.raises(ValueError, match="whole pool has 8"):
        replay(engine, Trace("t", (Arrival(0, (5,), 1), Arrival(0, (5,) * 8, 8))))
    assert not engine.has_work and not engine.scheduler.observers
    engine.add_request([5], SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="other work"):
        replay(engine, trace_of())


def test_a_replay_refuses_a_token_outside_the_vocabulary_before_it_starts():
    engine = tiny_engine()
    with pytest.raises(ValueError, match="token id 99 is outside the vocabulary of 32"):
        replay(engine, Trace("t", (Arrival(0, (5,), 3), Arrival(0, (99,), 1))))
    assert engine.add_request([5], SamplingParams(max_tokens=1)) == "request-0", "nobody was sent"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "1", None])
def test_a_step_time_that_is_no_time_is_refused(seconds):
    with pytest.raises(ValueError, match=f"step_time must give .* got {seconds!r}"):
        simulate(trace_of(), lambda step: seconds)


def test_an_interrupted_replay_leaves_nothing_behind():
    engine = tiny_engine()

    def clock(calls=[0]):  # noqa: B006
        calls[0] += 1
        if calls[0] == 9:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        replay(engine, trace_of(), clock)
    assert not engine.has_work and not engine.scheduler.observers and engine.cache.pool.num_referenced == 0


def test_a_simulation_refuses_what_an_engine_refuses():
    with pytest.raises(ValueError, match="the whole pool has 8"):
        simulate(Trace("t", (Arrival(0, (5,) * 8, 8),)), one_second, num_blocks=2, block_size=4)
    with pytest.raises(ValueError, match="unknown option 'batchin'"):
        simulate(trace_of(), one_second, batchin="static")


# --- how long a step takes ---


def test_the_roofline_of_a_step_is_that_of_its_chunks():
    config, card = tiny_config(), CARDS["h100"]
    step = Step((Row("a", 0, 4, False), Row("b", 7, 1, True)), 0, 4, padded_tokens=1)
    work = step_work(config, [(0, 4), (7, 1), (0, 1)], logits=1)
    assert Roofline(config, card)(step) == predict(work, card).seconds
    assert Roofline(config, card, overhead_s=0.5)(step) == pytest.approx(0.5 + predict(work, card).seconds)


def true_time(step):
    return 0.010 + 0.0004 * step.tokens + 0.002 * step.samples + 1e-6 * step.kv_tokens + 1e-7 * step.pairs


def test_a_curve_gives_back_a_machine_whose_steps_are_linear():
    trace = trace_of(40, longest=12)
    run = simulate(trace, true_time, max_num_seqs=8, max_num_batched_tokens=16)
    curve = StepCurve.fit(run.steps)
    other = simulate(trace_of(40, seed=9), true_time, max_num_seqs=8, max_num_batched_tokens=16)
    for step in other.steps:
        assert curve(step) == pytest.approx(true_time(step), rel=0.03)


def test_no_weight_of_a_curve_is_negative():
    run = simulate(trace_of(30), lambda s: max(0.02 - 0.0001 * s.kv_tokens, 0.001), max_num_seqs=8)
    curve = StepCurve.fit(run.steps)
    assert min(curve.decode.weights + curve.mixed.weights) >= 0 and all(curve(s) >= 0 for s in run.steps)


def test_a_curve_needs_steps_of_both_kinds():
    with pytest.raises(ValueError, match="got 0 and 1"):
        StepCurve.fit([Step((Row("a", 0, 4, True),), 0, 1, end=1.0)])


def test_measuring_a_curve_meets_every_load_and_leaves_the_engine_idle():
    engine, clock = tiny_engine(max_num_seqs=4, max_num_batched_tokens=16), Clock()
    seen = []
    engine.scheduler.observers.append(lambda plan: seen.append(len(plan.scheduled)))
    curve = StepCurve.measure(engine, clock, prompts=(2, 20))
    assert {1, 2, 3, 4} <= set(seen) and not engine.has_work and len(engine.scheduler.observers) == 1
    assert curve(Step((Row("a", 5, 1, True),), 0, 4)) == pytest.approx(0.001, rel=0.01)


# --- prefill and decode apart ---


def test_a_split_counts_the_transfer_and_gives_every_token_once():
    """Two prompts of 4 tokens at 0; a second a step; 10 bytes a token over 10 bytes/s: 4 s each, one after the other."""
    trace = Trace("t", (Arrival(0.0, (5, 6, 7, 8), 3), Arrival(0.0, (6, 6, 6, 6), 2)))
    split = simulate_split(trace, one_second, one_second, kv_bytes_per_token=10, link=10)
    assert split.transfer_bytes == 80 and split.transfer_s == 8.0
    assert [r.token_times for r in split.run.requests] == [(1.0, 6.0, 7.0), (1.0, 10.0)]
    assert [[row.new for row in s.rows] for s in split.decode.steps] == [[1], [1], [1]], "a received prompt is not computed again"
    assert split.decode.steps[0].rows[0].past == 4


def test_requests_of_one_token_never_reach_the_decode_pool():
    trace = Trace("t", (Arrival(0.0, (5, 6), 1),))
    split = simulate_split(trace, one_second, one_second, kv_bytes_per_token=10, link=10, latency=5)
    assert split.decode is None and split.transfer_bytes == 0 and split.run.requests[0].token_times == (1.0,)


@given(st.integers(0, 30), st.integers(1, 6))
@settings(max_examples=20)
def test_a_split_serves_every_request_in_full_and_in_order(seed, seqs):
    trace = trace_of(15, poisson(15, 0.5, seed), seed)
    split = simulate_split(
        trace, one_second, one_second, kv_bytes_per_token=1, link=100, latency=0.1, prefill={"max_num_batched_tokens": 8},
        decode={"max_num_seqs": seqs},
    )  # fmt: skip
    for r, a in zip(split.run.requests, trace.arrivals, strict=True):
        assert r.arrival == a and len(r.token_times) == a.output_len and list(r.token_times) == sorted(r.token_times)
        assert r.ttft > 0.999
    assert split.run.attainment(SLO(1e9, 1e9)) == 1.0


def test_a_long_prompt_disturbs_nobody_who_decodes_in_the_other_pool():
    def step_time(step):
        return 0.1 + 0.1 * step.tokens

    trace = Trace("t", (Arrival(0.0, (5,), 30), Arrival(1.0, (6,) * 40, 2)))
    together = simulate(trace, step_time, prefill="first")
    split = simulate_split(trace, step_time, step_time, kv_bytes_per_token=1, link=1e6)
    assert max(together.requests[0].gaps) > 4.0 > 0.5 > max(split.run.requests[0].gaps)
