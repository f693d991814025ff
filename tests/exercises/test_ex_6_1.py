"""Exercise 6.1 beyond what tests/notebooks proves of every exercise: mine() judges drafts with the learner's rule."""

from __future__ import annotations

import pytest
import torch

from minillm import SamplingParams
from minillm.course.checks import check
from minillm.course.mine import mine, rooms
from minillm.course.progress import Progress
from minillm.course.tasks.ex_6_1 import TASKS
from minillm.course.tasks.ex_6_1.common import PROMPTS, TINY, true_rule
from minillm.course.tasks.ex_6_1.core import CORE
from minillm.model.transformer import Transformer
from minillm.spec.verify import accept_or_replace

from .conftest import written

ANSWER = """def my_rule(p, q, token, u, w):
    if u * q[token] < p[token]:
        return token, True
    left = (p - q).clamp(min=0)
    shares = (left if left.sum() > 0 else p).cumsum(0)
    return int((shares > w * shares[-1]).nonzero()[0]), False
"""


def test_mine_judges_with_the_learners_rule(store: Progress, capsys: pytest.CaptureFixture[str]) -> None:
    model, params = Transformer.random(TINY), SamplingParams(max_tokens=30, temperature=0.9, seed=4, ignore_eos=True)
    options = {"dtype": "float64", "num_blocks": 60, "block_size": 4, "progress": store, "tasks": TASKS}
    drafts = {"speculative": "draft", "draft_model": [0, 1], "adaptive_drafts": False}
    assert rooms(store, TASKS) == {"accept rule": "minillm"}
    ours = mine(model, **options, **drafts)
    check(CORE, written(ANSWER, "my_rule"), progress=store)
    theirs = mine(model, **options, **drafts)
    assert "accept rule: yours (6.1 core, my_rule)" in capsys.readouterr().out
    assert theirs.engine.runner.accept_rule.__name__ == "my_rule"
    expected = [o.token_ids for o in ours.generate(list(PROMPTS), params)]
    assert [o.token_ids for o in theirs.generate(list(PROMPTS), params)] == expected and theirs.meter.accepted > 0


def test_the_oracle_of_the_rule_is_the_engines() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        p, q = (torch.softmax(4 * torch.randn(5, generator=generator, dtype=torch.float64), -1) for _ in range(2))
        u, w = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        for token in range(5):
            assert accept_or_replace(p, q, token, u, w) == true_rule(p, q, token, u, w)
