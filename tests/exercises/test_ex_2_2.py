"""Exercise 2.2 beyond what tests/notebooks proves of every exercise: mine() reads the blocks that the learner's class chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm import SamplingParams
from minillm.course.checks import CheckFailed, check
from minillm.course.mine import mine
from minillm.course.tasks.ex_2_2 import TASKS
from minillm.course.tasks.ex_2_2.broken import BREAK, keys_oracle
from minillm.course.tasks.ex_2_2.core import CORE, TINY
from minillm.model.transformer import Transformer

from .conftest import written

WRONG = Path(__file__).parents[1] / "notebooks" / "wrong" / "ex_2_2.py"
PROMPT = [(7 * i + i * i) % 59 + 1 for i in range(60)]


@pytest.fixture
def right():
    """The class that the wrong answers are variations of, as if it had been written in a notebook."""
    text = WRONG.read_text(encoding="utf-8")
    start = text.index("class Right:")
    source = "import math\n\nimport torch\n\n\n" + text[start : text.index("class OneRowOfNumbers")]
    return written(source, "Right")


def test_mine_reads_the_blocks_of_the_learners_indexer_where_sparse_blocks_are_asked_for(store, right, capsys):
    check(CORE, right, progress=store)
    same = dict(dtype="float32", num_blocks=24, block_size=4, progress=store, tasks=TASKS)
    model, ask = Transformer.random(TINY, seed=3), SamplingParams(max_tokens=4, ignore_eos=True)
    dense, sparse = mine(model, **same), mine(model, sparse_blocks=2, sparse_window=4, **same)
    assert "indexer of sparse attention: yours (2.2 core, Right)" in capsys.readouterr().out
    assert type(sparse.engine.runner.backend.indexer).__name__ == "Right"
    assert sparse.generate([PROMPT], ask)[0].token_ids and sparse.meter.index_flops > 0
    assert dense.generate([PROMPT], ask)[0].token_ids and dense.meter.index_flops == 0


def test_the_fault_shows_within_a_block_only(store):
    def full_blocks_only(query, chosen, window, size):
        blocks = {*chosen, *range(max(0, query - window + 1) // size, (query + 1) // size)}
        return [key for b in sorted(blocks) for key in range(b * size, min((b + 1) * size, query + 1))]

    assert all((full_blocks_only(q, [], 5, 4) == keys_oracle(q, [], 5, 4)) == (q % 4 == 3) for q in range(30))
    with pytest.raises(CheckFailed, match="within its block"):
        check(BREAK, full_blocks_only, progress=store)
