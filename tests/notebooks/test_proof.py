"""The proof itself notices an exercise that does not keep its promises."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from minillm.course.exercises import build
from minillm.course.expect import expect_equal
from minillm.course.notebooks import dumps, normalise
from minillm.course.task import NamedCheck, Task

from .proof import faults, wrong_answers

CORE = "def add(x):\n    ### BEGIN SOLUTION core\n    return x + 1\n    ### END SOLUTION"
BREAK = (
    "def sub(x):\n    ### BEGIN SOLUTION break\n    return x - 1\n    ### BEGIN FAULT\n    # return x - 2\n    ### END FAULT\n"
    "    ### END SOLUTION"
)
CELLS = ["from minillm.course.checks import check", CORE, "add(1)", 'check("1.1 core", add)', BREAK, 'check("1.1 break", sub)']


def tasks(right: int = 1) -> tuple[Task, Task]:
    def make(kind: str, sign: int) -> Task:
        def small(f):
            expect_equal(f(2), 2 + sign)

        def large(f):
            expect_equal(f(100), 100 + sign)

        return Task(f"1.1 {kind}", "toy", (NamedCheck("exact", small), NamedCheck("random", large)), ("a", "b", "c"))

    return make("core", right), make("break", -right)


def same(x):
    return x


def twice(x):
    return 2 * x


def small_only(x):
    return x + 1 if x < 50 else x


WRONG = [(same, "exact"), (twice, "exact"), (small_only, "random")]


@pytest.fixture
def course(tmp_path: Path) -> tuple[Path, Path]:
    for part in ("solutions", "exercises"):
        (tmp_path / part / "1_skip").mkdir(parents=True)
    solution = tmp_path / "solutions/1_skip/1_toy.ipynb"
    cells = [nbformat.v4.new_code_cell(source, id=f"c{i}") for i, source in enumerate(CELLS)]
    solution.write_text(dumps(normalise(nbformat.v4.new_notebook(cells=cells))))
    build(tmp_path)
    return tmp_path / "exercises/1_skip/1_toy.ipynb", solution


def test_a_good_exercise_has_no_faults(course):
    core, fault = tasks()
    assert list(faults(core, *course, WRONG)) == []
    assert list(faults(fault, *course, [(same, "exact"), (twice, "exact"), (small_only, "exact")])) == []


def test_each_broken_promise_is_reported(course):
    core, fault = tasks()
    exercise, solution = course
    assert ["2 wrong answers" in f for f in faults(core, *course, WRONG[:2])] == [True]
    assert ["small_only must be red at 'exact'" in f for f in faults(core, *course, [*WRONG, (small_only, "exact")])] == [True]
    assert ["same must be red at 'elegance'" in f for f in faults(core, *course, [*WRONG, (same, "elegance")])] == [True]
    assert any("starter must be 'not done yet'" in f for f in faults(core, solution, solution, WRONG)), "a starter that is solved"
    assert any("solution is not green" in f for f in faults(core, exercise, exercise, WRONG)), "a solution that is not"
    assert any("shipped fault is not found" in f for f in faults(fault, solution, solution, WRONG)), "a fault that is none"
    other = Task("1.1 stretch", "toy", core.checks, core.hints)
    assert ["never handed to check()" in f for f in faults(other, *course, WRONG)] == [True]


def test_wrong_answers_are_found_by_the_tasks_number(tmp_path):
    core, fault = tasks()
    (tmp_path / "ex_1_1.py").write_text('def bad(x):\n    return x\n\n\nWRONG = {"1.1 core": ((bad, "exact"),)}\n')
    assert [(f.__name__, red) for f, red in wrong_answers(core, tmp_path)] == [("bad", "exact")]
    assert wrong_answers(fault, tmp_path) == [] and wrong_answers(core, tmp_path / "none") == []
