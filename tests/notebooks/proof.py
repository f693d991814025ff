"""Proves an exercise: its starter is red at the first check, its solution green, wrong answers red where they should be."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import linecache
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, Iterable, Iterator

import nbformat
import pytest

from minillm.course import checks
from minillm.course.checks import run_checks
from minillm.course.task import Task

WRONG = Path(__file__).parent / "wrong"


def handed_in(path: Path) -> dict[str, Any]:
    """Run an exercise or solution notebook's cells in this process; what it hands to ``check``, by task id.

    ``check`` only takes note here, so that a red one does not stop the rest. Cells that run an unfinished answer may raise
    NotImplementedError.
    """
    taken: dict[str, Any] = {}
    book = types.ModuleType(f"notebook_{path.parent.parent.name}_{path.stem}")
    notebook = nbformat.read(path, as_version=4)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()),
        tempfile.TemporaryDirectory() as progress,
    ):
        patch.setenv("MINILLM_PROGRESS_DIR", progress)  # nobody's own progress
        for module in (checks, importlib.import_module("minillm.course")):
            patch.setattr(module, "check", lambda id, answer, **_: taken.update({getattr(id, "id", id): answer}), raising=False)
            patch.setattr(module, "hint", lambda *_, **__: None, raising=False)
        patch.setitem(sys.modules, book.__name__, book)
        patch.chdir(path.parent)
        for i, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            name = f"{path}[cell {i + 1}]"
            linecache.cache[name] = (len(cell.source), None, cell.source.splitlines(keepends=True), name)
            try:
                exec(compile(cell.source, name, "exec"), vars(book))
            except NotImplementedError:
                pass
    return taken


def wrong_answers(task: Task, folder: Path = WRONG) -> list[tuple[Any, str]]:
    """(answer, name of the check at which it must be red): WRONG[task.id] of wrong/ex_<chapter>_<section>.py."""
    path = folder / f"ex_{task.number.replace('.', '_')}.py"
    spec = importlib.util.spec_from_file_location(f"wrong_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        return []
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return list(module.WRONG.get(task.id, ()))


def faults(task: Task, exercise: Path, solution: Path, wrong: Iterable[tuple[Any, str]]) -> Iterator[str]:
    """What is wrong with an exercise, one line each; nothing when it keeps its promises."""
    shipped, solved, first = handed_in(exercise), handed_in(solution), task.checks[0].name
    if task.id not in shipped or task.id not in solved:
        yield f"{task.id}: never handed to check() in {exercise if task.id not in shipped else solution}"
        return
    start = run_checks(task, shipped[task.id])
    if task.id.endswith("break"):
        if start.green or start.pending:
            yield f"{task.id}: the shipped fault is not found: {start}"
    elif not (start.pending and start.failed == first):
        yield f"{task.id}: the starter must be 'not done yet' at {first!r}: {start}"
    end = run_checks(task, solved[task.id])
    if not end.green:
        yield f"{task.id}: the solution is not green: {end}"
    wrong = list(wrong)
    if len(wrong) < 3:
        yield f"{task.id}: {len(wrong)} wrong answers in {os.path.relpath(WRONG)}, at least 3 are needed"
    names = {check.name for check in task.checks}
    for answer, red in wrong:
        report = run_checks(task, answer)
        if red not in names or report.failed != red or report.pending:
            yield f"{task.id}: {answer.__name__} must be red at {red!r}: {report}"
