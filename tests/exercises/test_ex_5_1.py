"""Exercise 5.1 beyond what tests/notebooks proves of every exercise: mine() schedules by the learner's policy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from minillm import SamplingParams
from minillm.course.checks import CheckFailed, check, run_checks
from minillm.course.mine import mine, rooms
from minillm.course.tasks.ex_5_1 import TASKS
from minillm.course.tasks.ex_5_1.broken import BREAK
from minillm.course.tasks.ex_5_1.common import TINY
from minillm.course.tasks.ex_5_1.core import CORE
from minillm.course.tasks.ex_5_1.stretch import Long
from minillm.model.transformer import Transformer

from .conftest import written

ANSWER = """class MyPolicy:
    def grants(self, running, waiting, budget, limit):
        answer = []
        for left in running:
            answer.append(min(left, budget))
            budget -= answer[-1]
        queue = iter(waiting)
        while budget > 0 and len(answer) < limit:
            left = next(queue, None)
            if left is None:
                break
            answer.append(min(left, budget))
            budget -= answer[-1]
        return answer
"""


def test_mine_schedules_by_the_learners_policy(store, capsys):
    model, params = Transformer.random(TINY), SamplingParams(max_tokens=8, ignore_eos=True)
    options = {"dtype": "float32", "num_blocks": 16, "max_num_seqs": 2, "progress": store, "tasks": TASKS}
    ours = mine(model, **options)
    check(CORE, written(ANSWER, "MyPolicy"), progress=store)
    theirs = mine(model, **options)
    assert "batching policy: yours (5.1 core, MyPolicy)" in capsys.readouterr().out
    policy = theirs.engine.scheduler.policy
    assert type(policy).__name__ == "MyPolicy"
    prompts = [[5, 3, 8, 1], [2, 2], [9] * 7]
    got, expected = (llm.generate(prompts, params) for llm in (theirs, ours))
    assert [o.token_ids for o in got] == [o.token_ids for o in expected] and theirs.meter.steps == ours.meter.steps


def test_a_wrong_policy_is_not_kept(store):
    with pytest.raises(CheckFailed, match=r"two slots are free: grants\(running=\(1,\)"):
        check(CORE, written(ANSWER.replace("len(answer) < limit", "len(answer) <= limit"), "MyPolicy"), progress=store)
    assert rooms(store, TASKS) == {"batching policy": "minillm"}


def test_the_shipped_fault_passes_every_chunk_size_and_is_red_at_the_first_preemption():
    def shipped(prompt_len, num_tokens, num_computed, budget):
        if num_tokens == prompt_len:
            tokens = min(prompt_len - num_computed, budget)
            return tokens, num_computed + tokens == prompt_len
        return min(1, budget), budget > 0

    report = run_checks(BREAK, shipped)
    assert report.failed == "edges: preempted after three tokens" and "random: prompts and budgets" in report.passed


def test_a_counted_length_is_a_number_whose_uses_are_counted():
    import itertools

    Long.uses = itertools.count()
    a, b = Long(3), Long(5)
    assert a + b == 8 and max(a, b) == 5 and 2 + a == 5 and sorted([b, a])[0] == 3
    assert next(Long.uses) >= 6 and type(a + 1) is Long and hash(a) == hash(3)


def test_every_task_has_wrong_answers_red_at_several_kinds_of_checks():
    path = Path(__file__).parents[1] / "notebooks" / "wrong" / "ex_5_1.py"
    spec = importlib.util.spec_from_file_location("wrong_ex_5_1", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for task in TASKS:
        kinds = {red.split(":")[0] for _, red in module.WRONG[task.id]}
        assert len(module.WRONG[task.id]) >= 3 and len(kinds) >= 3, f"{task.id}: {kinds}"
