"""Exercise 5.2 beyond what tests/notebooks proves of every exercise: mine() schedules with the learner's policy."""

from __future__ import annotations

import pytest

from minillm import SamplingParams
from minillm.course.checks import check
from minillm.course.mine import mine, rooms
from minillm.course.progress import Progress
from minillm.course.tasks.ex_5_2 import TASKS
from minillm.course.tasks.ex_5_2.common import TINY
from minillm.course.tasks.ex_5_2.core import CORE
from minillm.course.tasks.ex_5_2.stretch import _largest, _linear, _with_context
from minillm.engine.policies import Continuous
from minillm.model.transformer import Transformer

from .conftest import written

ANSWER = """class MyBudget:
    def grants(self, running, waiting, budget, limit):
        out = [0] * len(running)
        for decoding in (True, False):
            for i, n in enumerate(running):
                if (n == 1) is decoding:
                    out[i] = min(n, budget)
                    budget -= out[i]
        queue = iter(waiting)
        while budget and len(out) < limit and (n := next(queue, None)) is not None:
            out.append(min(n, budget))
            budget -= out[-1]
        return out
"""


def test_mine_schedules_with_the_learners_policy(store: Progress, capsys: pytest.CaptureFixture[str]) -> None:
    model, greedy = Transformer.random(TINY), SamplingParams(max_tokens=8, ignore_eos=True)
    options = {"dtype": "float32", "num_blocks": 16, "max_num_batched_tokens": 6, "progress": store, "tasks": TASKS}
    assert rooms(store, TASKS) == {"batching policy": "minillm"}
    ours = mine(model, **options)
    check(CORE, written(ANSWER, "MyBudget"), progress=store)
    theirs = mine(model, **options)
    assert "batching policy: yours (5.2 core, MyBudget)" in capsys.readouterr().out
    assert type(theirs.engine.scheduler.policy).__name__ == "MyBudget"
    prompts = [[5, 3, 8] * 5, [1], [7, 7]]
    assert [o.token_ids for o in theirs.generate(prompts, greedy)] == [o.token_ids for o in ours.generate(prompts, greedy)]


def test_the_engines_own_policy_is_no_answer_to_the_core() -> None:
    """It serves the oldest first, which is another rule; and an answer may not borrow it."""
    with pytest.raises(Exception, match="minillm|Continuous"):
        check(CORE, Continuous)


def test_the_largest_chunk_is_monotone_in_the_promise() -> None:
    for price in (_linear, _with_context):
        found = [_largest(price, 3, 120, itl) for itl in range(0, 300, 7)]
        assert found == sorted(found) and found[0] == 0 and found[-1] == 120
        costs = [price(3, c, 120 - c) for c in range(1, 121)]
        assert costs == sorted(costs), "a larger chunk never makes the last piece cheaper"
