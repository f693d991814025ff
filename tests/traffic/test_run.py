"""The numbers made of a run, against numbers made by hand."""

from __future__ import annotations

import math

import pytest

from minillm.traffic.run import SLO, Row, Run, Served, Step
from minillm.traffic.trace import Arrival

A = Served("a", Arrival(1.0, (5, 6), 3), (2.0, 3.0, 5.0))
B = Served("b", Arrival(1.5, (7,), 1), (4.5,))
STEPS = (
    Step((Row("a", 0, 2, True),), waiting=1, limit=2, start=1.0, end=2.0),
    Step((Row("a", 2, 1, True), Row("b", 0, 1, True)), waiting=2, limit=2, padded_rows=0, padded_tokens=3, start=2.0, end=3.0),
    Step((Row("a", 3, 1, True),), waiting=0, limit=2, padded_rows=1, padded_tokens=1, start=3.0, end=5.0),
)
RUN = Run("by hand", (A, B), STEPS)


def test_one_requests_times():
    assert (A.ttft, A.tpot, A.gaps, A.latency) == (1.0, 1.5, [1.0, 2.0], 4.0)
    assert (B.ttft, B.tpot, B.gaps, B.latency) == (3.0, 0.0, [], 3.0)


def test_a_runs_numbers():
    assert RUN.seconds == 4.0 and RUN.output_tokens == 4 and RUN.throughput == 1.0
    assert RUN.ttft(0) == 1.0 and RUN.ttft(100) == 3.0 and RUN.ttft(50) == 2.0
    assert RUN.tpot(99) == 1.5, "a request of one token has no time per token"
    assert RUN.itl(0) == 1.0 and RUN.itl(100) == 2.0 and RUN.itl(50) == 1.5
    assert RUN.latency(100) == 4.0
    assert Run("one", (B,), STEPS[:1]).tpot(50) == 0.0


def test_occupancy_counts_requests_in_steps_that_left_somebody_waiting():
    assert RUN.occupancy == (1 / 2 + 2 / 2) / 2, "padding is nobody, and the last step kept nobody waiting"
    assert math.isnan(Run("idle", (A,), STEPS[2:]).occupancy)


@pytest.mark.parametrize("slo, share", [(SLO(1.0, 1.5), 0.5), (SLO(3.0, 1.5), 1.0), (SLO(3.0, 1.4), 0.5), (SLO(0.9, 9.0), 0.0)])
def test_goodput_counts_requests_within_both_limits(slo, share):
    assert RUN.attainment(slo) == share and RUN.goodput(slo) == share * 2 / 4.0


def test_a_steps_counts():
    step = Step((Row("a", 10, 4, False), Row("b", 0, 3, True)), 0, 4, padded_tokens=2)
    assert (step.tokens, step.samples, step.kv_tokens) == (9, 1, 17)
    assert step.pairs == (11 + 12 + 13 + 14) + (1 + 2 + 3)
    assert step.at(1.0, 3.5).seconds == 2.5


def test_a_slot_is_kept_while_a_request_runs_and_then_given_to_the_next():
    def step(*names, preempted=()):
        return Step(tuple(Row(n, 0, 1, True) for n in names), 0, 3, preempted=preempted)

    steps = (step("a", "b"), step("b"), step("b", "c"), step("c", preempted=("b",)), step("c", "d", "b"))
    slots = [{slot: row.request_id for slot, row in at.items()} for at in Run("x", (A,), steps).slots()]
    assert slots == [{0: "a", 1: "b"}, {1: "b"}, {1: "b", 0: "c"}, {0: "c"}, {0: "c", 1: "d", 2: "b"}]


def test_a_run_that_took_no_time_has_a_rate_all_the_same():
    run = Run("at once", (Served("a", Arrival(0.0, (5,), 1), (0.0,)),), ())
    assert run.throughput == run.goodput(SLO(1.0, 1.0)) == math.inf and run.goodput(SLO(-1.0, 1.0)) == 0.0


@pytest.mark.parametrize("requests, words", [((), "at least one request"), ((A, Served("c", A.arrival, ())), "'c' has no token")])
def test_a_run_without_requests_or_tokens_is_refused(requests, words):
    with pytest.raises(ValueError, match=words):
        Run("nothing", requests, STEPS)


def test_a_run_says_what_it_was():
    assert "2 requests, 4 tokens in 4.00 s and 3 steps: 1 tok/s" in str(RUN)
