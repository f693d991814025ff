"""Exercise 3.2 beyond what tests/notebooks proves of every exercise: mine() answers with the learner's layers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from minillm import SamplingParams
from minillm.course.checks import CheckFailed, check
from minillm.course.mine import mine
from minillm.course.tasks.ex_3_2 import TASKS
from minillm.course.tasks.ex_3_2.broken import BREAK
from minillm.course.tasks.ex_3_2.common import TINY
from minillm.course.tasks.ex_3_2.core import CORE
from minillm.model.transformer import Transformer

from .conftest import written

WRONG = Path(__file__).parents[1] / "notebooks" / "wrong" / "ex_3_2.py"


@pytest.fixture
def right():
    """The class that the wrong answers are variations of, as if it had been written in a notebook."""
    text = WRONG.read_text(encoding="utf-8")
    start = text.index("class Right:")
    source = "import torch\nimport torch.nn.functional as F\n\n\n" + text[start : text.index("class Transposed")]
    return written(source, "Right")


def test_mine_answers_with_the_learners_layers(store, right, capsys):
    check(CORE, right, progress=store)
    llm = mine(Transformer.random(TINY), dtype="float32", num_blocks=8, progress=store, tasks=TASKS)
    assert "linear layers: yours (3.2 core, Right)" in capsys.readouterr().out
    assert type(llm.model.head.method).__name__ == "Right" and "codes" in llm.model.head._buffers
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_the_planted_fault_shows_in_every_eighth_channel_only():
    spec = importlib.util.spec_from_file_location("wrong_3_2", WRONG)
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    words = torch.tensor([[-1, 0x7FFFFFFF]], dtype=torch.int32)
    differ = (wrong.signed_top(words) != wrong.masked(words)).flatten()
    assert differ.nonzero().flatten().tolist() == [7]


def test_the_fault_is_found_by_the_check_that_it_breaks(store):
    spec = importlib.util.spec_from_file_location("wrong_3_2", WRONG)
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    with pytest.raises(CheckFailed, match="all codes"):
        check(BREAK, lambda qweight, qzeros, scales: wrong.read(qweight, qzeros, scales, wrong.signed_top), progress=store)
