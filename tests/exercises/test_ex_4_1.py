"""Exercise 4.1 beyond what tests/notebooks proves of every exercise: an engine preempts and shares on an answer's pool."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from minillm.course.checks import run_checks
from minillm.course.tasks.ex_1_1.common import TINY
from minillm.course.tasks.ex_4_1 import TASKS
from minillm.course.tasks.ex_4_1.broken import BREAK
from minillm.course.tasks.ex_4_1.common import PROMPTS
from minillm.course.tasks.ex_4_1.core import InEngine
from minillm.course.tasks.ex_4_1.stretch import STRETCH, _life, _lines_run
from minillm.model.transformer import Transformer


@pytest.fixture(scope="module")
def wrong():
    path = Path(__file__).parents[1] / "notebooks" / "wrong" / "ex_4_1.py"
    spec = importlib.util.spec_from_file_location("wrong_ex_4_1", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("num_blocks, n", [(9, 1), (12, 3)])
def test_the_small_pools_of_the_engine_check_do_preempt_and_share(wrong, num_blocks, n):
    llm = LLM(Transformer.random(TINY), dtype="float32", block_size=4, num_blocks=num_blocks, max_num_seqs=6)
    llm.engine.cache.pool = pool = InEngine(wrong.Right, num_blocks, 4)
    acquired = []
    pool.acquire, plain = lambda blocks: (blocks := list(blocks), acquired.extend(blocks), plain(blocks)), pool.acquire
    params = [SamplingParams(max_tokens=9 + i, ignore_eos=True, n=n) for i in range(len(PROMPTS))]
    llm.generate([list(p) for p in PROMPTS], params)
    assert llm.engine.scheduler.num_preemptions > 0 and bool(acquired) is (n > 1)


def test_the_shipped_fault_decodes_and_is_red_where_a_write_crosses_into_a_fresh_block(wrong):
    report = run_checks(BREAK, wrong.shipped)
    assert report.failed == "edges: a write across blocks" and "random: one token at a time" in report.passed


def test_the_engine_check_of_the_break_would_catch_the_shipped_fault_on_its_own(wrong):
    alone = next(check for check in BREAK.checks if check.kind == "engine")
    with pytest.raises(AssertionError, match="tokens of three samples"):
        alone.fn(wrong.shipped)


def test_lines_are_counted_and_grow_with_a_loop_only():
    assert _lines_run(_life, 3, 200, 4) > _lines_run(_life, 3, 100, 4) + 90
    assert _lines_run(lambda a: a + 1, 1) < 5
    assert sys.gettrace() is None or "pytest_cov" in sys.modules or "coverage" in sys.modules


def test_every_task_has_wrong_answers_red_at_several_kinds_of_checks(wrong):
    for task in TASKS:
        kinds = {red.split(":")[0] for _, red in wrong.WRONG[task.id]}
        assert len(wrong.WRONG[task.id]) >= 3 and len(kinds) >= 3, f"{task.id}: {kinds}"
    assert STRETCH.checks[-1].kind == "budget"
