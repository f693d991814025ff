"""Exercise 3.3 beyond what tests/notebooks proves of every exercise: mine() answers over the learner's store."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from minillm import SamplingParams
from minillm.course.checks import CheckFailed, check
from minillm.course.mine import mine
from minillm.course.tasks.ex_3_3 import TASKS
from minillm.course.tasks.ex_3_3.broken import BREAK
from minillm.course.tasks.ex_3_3.common import TINY
from minillm.course.tasks.ex_3_3.core import CORE
from minillm.model.transformer import Transformer

from .conftest import written

WRONG = Path(__file__).parents[1] / "notebooks" / "wrong" / "ex_3_3.py"


@pytest.fixture
def right():
    """The class that the wrong answers are variations of, as if it had been written in a notebook."""
    text = WRONG.read_text(encoding="utf-8")
    source = "import torch\n\n\n" + text[text.index("class Right:") : text.index("class PerStep")]
    return written(source, "Right")


def test_mine_answers_over_the_learners_store(store, right, capsys):
    check(CORE, right, progress=store)
    llm = mine(Transformer.random(TINY), dtype="float32", num_blocks=8, progress=store, tasks=TASKS)
    assert "KV store: yours (3.3 core, Right)" in capsys.readouterr().out
    assert type(llm.engine.store).__name__ == "Right" and llm.engine.store.codes[0].dtype == torch.int8
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_the_fault_is_found_where_tokens_differ_in_size(store):
    spec = importlib.util.spec_from_file_location("wrong_3_3", WRONG)
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    with pytest.raises(CheckFailed, match="different sizes"):
        check(BREAK, wrong.PerStep, progress=store)
