"""The committed notebooks are in normal form, keep the rules, and exercises/ is what solutions/ gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm.course.exercises import build
from minillm.course.notebooks import judge
from minillm.course.session import notebook_number, notebooks
from minillm.course.task import all_tasks

ROOT = Path(__file__).parents[2]
EXECUTED = [path for part in ("chapters", "solutions") for path in notebooks(ROOT / part)]


@pytest.mark.parametrize("path", EXECUTED, ids=lambda p: "/".join(p.parts[-3:]))
def test_a_notebook_is_normal_and_keeps_the_rules(path: Path) -> None:
    assert judge(path) == []


def test_exercises_are_what_the_solutions_give() -> None:
    assert build(ROOT, check=True) == []


def test_every_chapter_has_its_exercise_and_every_exercise_its_tasks() -> None:
    chapters, solutions = ([notebook_number(p) for p in notebooks(ROOT / part)] for part in ("chapters", "solutions"))
    assert chapters == solutions
    assert {f"{n} {kind}" for n in solutions for kind in ("core", "break", "stretch")} == {task.id for task in all_tasks()}
