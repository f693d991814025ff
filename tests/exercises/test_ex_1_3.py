"""Exercise 1.3 beyond what tests/notebooks proves of every exercise: its oracle is the engine's rule; mine() uses the answer."""

from __future__ import annotations

import random

import pytest

from minillm import SamplingParams
from minillm.course.checks import run_checks
from minillm.course.mine import mine
from minillm.course.progress import Progress
from minillm.course.tasks.ex_1_3 import TASKS
from minillm.course.tasks.ex_1_3.broken import BREAK
from minillm.course.tasks.ex_1_3.common import FIRST, SECOND, TINY
from minillm.course.tasks.ex_1_3.core import _attention, _best, _offer
from minillm.model.transformer import Transformer
from minillm.perf.transfer import Link, LoadOffer, load_or_recompute

from ..notebooks.proof import wrong_answers


def test_the_oracle_of_the_core_is_the_engines_rule():
    draw = random.Random(1)
    for _ in range(100):
        tiers = [draw.choice(["host", "disk"]) for _ in range(draw.randrange(9))]
        links = {name: Link(2 ** draw.uniform(6, 12), draw.uniform(0, 30)) for name in ("host", "disk")}
        o = _offer(tiers, _attention, draw.randrange(60), draw.randrange(1, 40), **links)
        assert _best(o) == load_or_recompute(LoadOffer(**vars(o)))


def test_the_shipped_fault_is_red_where_a_block_is_about_to_be_read():
    fault = next(answer for answer, _ in wrong_answers(BREAK) if answer.__name__ == "GivesAwayWhatIsPending")
    report = run_checks(BREAK, fault)
    assert report.failed == "edges: a block that is about to be read stays"
    assert "edges: what leaves is handed on, oldest first" in report.passed


def test_mine_decides_with_the_learners_function(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINILLM_PROGRESS_DIR", str(tmp_path / "progress"))
    calls = []

    def never(offer):
        calls.append(offer)
        return 0

    monkeypatch.setattr("minillm.course.mine.my_options", lambda *_: TASKS[0].seam.build(never))
    options = {"prefix_cache": "radix", "host_cache": 10**6, "num_blocks": 4, "block_size": 4, "dtype": "float32"}
    llm = mine(Transformer.random(TINY), progress=Progress(tmp_path / "progress"), tasks=TASKS, **options)
    for prompt in (FIRST, SECOND, FIRST):
        (out,) = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    assert len(calls) == 1 and out.num_loaded_tokens == 0 and "load or recompute" in capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.id)
def test_every_task_has_wrong_answers_of_several_kinds(task):
    kinds = {red.split(":")[0] for _, red in wrong_answers(task)}
    assert len(wrong_answers(task)) >= 3 and len(kinds) >= 3
