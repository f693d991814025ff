"""Every task of the course keeps its promises: see proof.py."""

from __future__ import annotations

import pytest

from minillm.course.session import course_root, find_notebook
from minillm.course.task import Task, all_tasks

from .proof import faults, wrong_answers


@pytest.mark.slow
@pytest.mark.parametrize("task", all_tasks(), ids=lambda task: task.id)
def test_starter_is_red_solution_is_green_and_wrong_answers_are_caught(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    root = course_root()
    assert root is not None
    exercise, solution = (find_notebook(root / part, task.number) for part in ("exercises", "solutions"))
    assert list(faults(task, exercise, solution, wrong_answers(task))) == []
