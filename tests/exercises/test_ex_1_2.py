"""Exercise 1.2 beyond what tests/notebooks proves of every exercise: mine() answers with the learner's cache."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import sys
import types
from pathlib import Path

import pytest

from minillm import SamplingParams
from minillm.course.checks import CheckFailed, check
from minillm.course.mine import mine, rooms
from minillm.course.tasks.ex_1_1.common import TINY
from minillm.course.tasks.ex_1_2 import TASKS
from minillm.course.tasks.ex_1_2.broken import BREAK, _names_engine
from minillm.course.tasks.ex_1_2.common import Prefixes, Token
from minillm.course.tasks.ex_1_2.core import CORE
from minillm.course.tasks.ex_1_2.stretch import Chains
from minillm.model.transformer import Transformer

ROOM = {"prefix cache": "minillm"}


@pytest.fixture(scope="module")
def wrong():
    path = Path(__file__).parents[1] / "notebooks" / "wrong" / "ex_1_2.py"
    spec = importlib.util.spec_from_file_location("wrong_ex_1_2", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def written(wrong, old="", new=""):
    """The right core answer, or a variation, as if it had been written in a notebook."""
    text = inspect.getsource(wrong.whole_blocks) + "\n\n" + inspect.getsource(wrong.Right).replace(old, new)
    module = types.ModuleType("learner_1_2")
    sys.modules["learner_1_2"] = module
    linecache.cache["<learner 1.2>"] = (len(text), None, text.splitlines(keepends=True), "<learner 1.2>")
    exec(compile(text, "<learner 1.2>", "exec"), vars(module))
    return module.Right


def test_mine_answers_with_the_learners_cache(store, wrong, capsys):
    model, greedy = Transformer.random(TINY), SamplingParams(max_tokens=8, ignore_eos=True)
    options = {"dtype": "float32", "num_blocks": 8, "progress": store, "tasks": TASKS}
    assert rooms(store, TASKS) == ROOM
    ours = mine(model, **options)
    check(CORE, written(wrong), progress=store)
    assert "Your Right is now the prefix cache of mine()." in capsys.readouterr().out
    theirs = mine(model, **options)
    assert "prefix cache: yours (1.2 core, Right)" in capsys.readouterr().out
    assert type(theirs.engine.cache.prefix).__name__ == "Right"
    prompt = [5, 3, 8, 1] * 5
    for hit in (0, 16):
        out = theirs.generate(prompt, greedy)[0]
        assert out.token_ids == ours.generate(prompt, greedy)[0].token_ids and out.num_cached_tokens == hit


def test_a_wrong_cache_is_not_kept(store, wrong):
    newest = written(wrong, "if piece not in children:\n", "if True:\n")
    with pytest.raises(CheckFailed, match="FAIL"):
        check(CORE, newest, progress=store)
    assert rooms(store, TASKS) == ROOM


def test_the_shipped_names_are_right_for_prompts_that_begin_alike(wrong):
    from minillm.course.checks import run_checks

    report = run_checks(BREAK, wrong.shipped)
    assert report.failed == "edges: the same block behind another beginning"
    assert "random: prompts that begin alike and go on differently" in report.passed


def test_the_shipped_names_change_an_answer_inside_the_engine(wrong):
    """The harm is real: on the tiny model, too, a guest gets another guest's tokens."""
    with pytest.raises(AssertionError, match="tokens of four prompts"):
        _names_engine(wrong.shipped)


def test_the_oracle_counts_what_can_be_evicted():
    truth = Prefixes(2)
    truth.insert([1, 2, 3, 4, 5, 6], [1, 2, 3])
    truth.insert([1, 2, 9, 9], [1, 4])
    assert truth.possible(lambda b: True) == 4 and truth.possible(lambda b: b != 2) == 2 and truth.possible(lambda b: b != 3) == 1
    truth.forget([1])
    assert sorted(truth.orphans()) == [2, 4]


def test_the_order_of_the_oracle_is_that_of_the_contract():
    order = Chains()
    for chain in ([1, 2], [1, 3], [4]):
        order.touch(chain)
    assert order.evict(2, lambda b: True) == [2, 3] and order.evict(5, lambda b: True) == [1, 4]


def test_hashing_a_tuple_of_tokens_is_counted_token_by_token():
    before = Token.hashed
    hash((None, tuple(map(Token, range(16)))))
    assert Token.hashed - before == 16 and hash(Token(7)) == hash(7)


def test_every_kind_of_check_has_a_wrong_answer(wrong):
    for task in TASKS:
        kinds = {red.split(":")[0] for _, red in wrong.WRONG[task.id]}
        assert len(wrong.WRONG[task.id]) >= 3 and len(kinds) >= 3, f"{task.id}: {kinds}"
