"""Exercise 5.3 beyond what tests/notebooks proves of every exercise: mine() replays in the learner's sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm import SamplingParams, Transformer
from minillm.course.checks import check
from minillm.course.mine import mine, rooms
from minillm.course.progress import Progress
from minillm.course.tasks.ex_5_3 import TASKS
from minillm.course.tasks.ex_5_3.core import CORE, TINY
from minillm.course.tasks.ex_5_3.stretch import _spans

from .conftest import written

ANSWER = """from dataclasses import replace

import torch


class MyPadding:
    def bucket(self, rows, most):
        return min(1 << (rows - 1).bit_length(), most)

    def pad(self, batch, rows):
        more = rows - batch.num_rows
        zeros = torch.zeros(more, dtype=torch.int64)
        tensors = {name: torch.cat([getattr(batch, name), zeros]) for name in ("token_ids", "positions", "slots")}
        ones, tables = (1,) * more, batch.tables + ((0,),) * more
        lens = {"q_lens": batch.q_lens + ones, "kv_lens": batch.kv_lens + ones}
        return replace(batch, **tensors, **lens, tables=tables, num_padding=batch.num_padding + more)
"""


def test_mine_replays_in_the_learners_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("MINILLM_PROGRESS_DIR", str(tmp_path / "progress"))
    store = Progress(tmp_path / "progress")
    options = {"dtype": "float32", "num_blocks": 16, "block_size": 4, "max_num_seqs": 5, "progress": store, "tasks": TASKS}
    model, greedy = Transformer.random(TINY), SamplingParams(max_tokens=6, ignore_eos=True)
    ours = mine(model, **options)
    check(CORE, written(ANSWER, "MyPadding"), progress=store)
    assert rooms(store, TASKS) == {"padding of replayed steps": "yours (5.3 core, MyPadding)"}
    theirs = mine(model, **options)
    prompts = [[5, 3], [8], [1, 2, 3]]
    assert [o.token_ids for o in theirs.generate(prompts, greedy)] == [o.token_ids for o in ours.generate(prompts, greedy)]
    graphs = theirs.engine.runner.graphs
    assert type(graphs.padding).__name__ == "MyPadding" and [rows for rows, _ in graphs.sizes] == [4]
    assert ours.engine.runner.graphs is None


def test_the_schedules_oracle_never_idles_for_less_than_one_step_at_a_time() -> None:
    plan, run, hand = [1.0] * 5, [2.0, 4.0, 1.0, 3.0, 2.0], [0.5] * 5
    one, ahead = (_spans(plan, run, hand, overlap) for overlap in (False, True))
    assert ahead[-1][1] < one[-1][1] and [b - a for a, b in one] == [b - a for a, b in ahead] == run
    assert all(spans[i + 1][0] >= spans[i][1] for spans in (one, ahead) for i in range(4))
