"""``check(task, candidate)``: named checks on the learner's own code, the first difference shown, and hints on request."""

from __future__ import annotations

import linecache
import random
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch

from minillm.course.expect import Mismatch, describe
from minillm.course.mine import save_part
from minillm.course.progress import Progress, ProgressError, now
from minillm.course.source import SourceError, label, location, name_of
from minillm.course.task import HINT_KINDS, NamedCheck, Task, find_task
from minillm.course.witness import Witness, codes, unwrap


@dataclass
class Report:
    """What one run of a task's checks found."""

    task: Task
    tested: str
    passed: list[str] = field(default_factory=list)
    failed: str | None = None  # the name of the red check
    reason: str = ""
    hint: int | None = None
    pending: bool = False  # the starter's NotImplementedError: not wrong, not done yet
    note: str = ""

    @property
    def green(self) -> bool:
        return self.failed is None

    def __str__(self) -> str:
        lines = [f"{self.task.id}: {self.task.title}", f"Tested: {self.tested}"]
        lines += [f"PASS  {name}" for name in self.passed]
        if self.failed is not None:
            lines.append(f"{'TODO' if self.pending else 'FAIL'}  {self.failed}")
            lines += [f"      {line}" for line in self.reason.splitlines()]
            if self.hint:
                lines.append(f'      Stuck? hint("{self.task.id}", {self.hint}): {HINT_KINDS[self.hint - 1]}')
            after = [c.name for c in self.task.checks][len(self.passed) + 1 :]
            lines += [f"Not run yet: {'; '.join(after)}"] if after else []
        else:
            lines.append(f"All {len(self.passed)} checks passed.")
        return "\n".join([*lines, self.note] if self.note else lines)


class CheckFailed(Exception):
    """A check is red. In Jupyter only the report is shown, not a traceback through the course's machinery."""

    def __init__(self, report: Report) -> None:
        super().__init__(f"{report.failed}\n{report}")
        self.report = report

    def _render_traceback_(self, *_: Any) -> list[str]:
        return str(self.report).splitlines()


_MISSING: Any = object()


def check(task: str | Task, candidate: Any = _MISSING, *, progress: Progress | None = None) -> None:
    """Run a task's checks on ``candidate``, the learner's function or class, and print the report.

    Stops at the first red check and raises CheckFailed. A green run is recorded, and its source is kept for ``mine()``
    where the task has a seam. ValueError names the tasks that exist, or says that ``candidate`` is missing.
    """
    task = task if isinstance(task, Task) else find_task(task)
    if candidate is _MISSING:
        raise ValueError(f'the candidate is missing: hand in your function or class too, as in check("{task.id}", my_answer)')
    store = progress or Progress()
    report = run_checks(task, candidate)
    if report.green and task.seam is not None:
        try:
            save_part(task, candidate, store)
            report.note = f"Your {name_of(candidate)} is now the {task.seam.room} of mine()."
        except (SourceError, ProgressError, OSError) as error:
            report.note = f"Green, but not kept for mine(): {error}"
    try:
        _record(report, store)
    except (ProgressError, OSError) as error:
        report.note = f"{report.note}\nNot recorded: {error}".strip()
    if not report.green:
        raise CheckFailed(report) from None
    print(report)


def run_checks(task: Task, candidate: Any) -> Report:
    """Run the checks without recording or printing anything."""
    report = Report(task, _tested(candidate))
    refusal = refuse(task, candidate)
    if refusal:
        report.tested = "nothing"
        report.failed, report.reason = task.checks[0].name, refusal
        return report
    for named in task.checks:
        reason, pending = _run_one(task, named, candidate)
        if reason is not None:
            report.failed, report.reason, report.pending = named.name, reason, pending
            report.hint = None if pending else named.hint
            return report
        report.passed.append(named.name)
    return report


def _tested(candidate: Any) -> str:
    try:
        return f"yours, {label(candidate)}, from {location(candidate)}"
    except Exception:  # a signature that inspect cannot read, a __getattr__ that raises: no reason not to test it
        return f"yours, of type {type(candidate).__name__}"


def refuse(task: Task, candidate: Any) -> str | None:
    """Why this is not the learner's own code, or None: a result instead of a function, the reference, code of minillm."""
    target = unwrap(candidate)
    own_type = target if isinstance(target, type) else type(target)
    if not callable(target) and own_type.__module__ in ("builtins", "torch", "numpy"):
        return f"you handed in {describe(candidate)}; hand in your function or class itself, without calling it"
    names = {getattr(target, "__module__", "") or "", own_type.__module__ if not callable(target) else ""}
    ours = any(n == "minillm" or n.startswith("minillm.") for n in names)
    if ours or any(target is unwrap(r) or own_type is r for r in task.references):
        return f"{name_of(candidate)} is the course's own code; hand in what you wrote"
    if not codes(candidate, task.references):
        return f"there is nothing of yours in {name_of(candidate)}: it has no Python code of its own"
    for base in own_type.__mro__:
        if any(base is r for r in task.references):
            return f"{name_of(candidate)} inherits from the course's own {base.__name__}; write the whole class yourself"
    return None


def _run_one(task: Task, named: NamedCheck, candidate: Any) -> tuple[str | None, bool]:
    """(why it is red, or None; whether that is only "not done yet")."""
    witness = Witness(candidate, task.references)
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), witness:  # the learner's random numbers are not disturbed
            torch.manual_seed(0)
            random.seed(0)
            named.fn(candidate)
    except KeyboardInterrupt:
        raise  # the learner stops an endless loop
    except Mismatch as error:
        return said(error), False
    except BaseException as error:  # SystemExit too: an answer must not end the notebook's kernel
        where = _line_of(error, candidate)
        if isinstance(error, NotImplementedError) and where:
            return f"not done yet: {said(error) or 'it raises NotImplementedError'}", True
        return _explain(error, where), False
    finally:
        random.setstate(state)
    if witness.borrowed:
        return f"your code calls the course's own {witness.borrowed}; write that part yourself", False
    if not witness.calls:
        return "this check never ran your code (a fault of the check, unless you handed in a compiled function)", False
    return None, False


def _line_of(error: BaseException, candidate: Any) -> str:
    """"line 3: k = cache[layer]", the deepest line of the learner's file or cell on the way to the error."""
    files = {code.co_filename for code in codes(candidate)}
    own = {id(code) for code in codes(candidate)}
    inside, found = False, ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        inside = inside or id(frame.f_code) in own
        if inside and frame.f_code.co_filename in files:
            found = f"line {line}: {linecache.getline(frame.f_code.co_filename, line).strip()}"
    return found


def said(error: BaseException) -> str:
    """An exception's message; a learner's own exception may have a ``__str__`` that fails."""
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be shown: __str__ raises {type(second).__name__})"


def _explain(error: BaseException, where: str) -> str:
    if where:
        return f"your code raised {type(error).__name__}: {said(error)}\n{where}"
    if isinstance(error, AssertionError):
        return said(error) or "the check's assertion does not hold"
    return f"the check could not use what your code gave: {type(error).__name__}: {said(error)}"


def _record(report: Report, store: Progress) -> None:
    with store.change() as data:
        entry = data["checks"].setdefault(report.task.id, {})
        entry["attempts"] = entry.get("attempts", 0) + (not report.pending)
        entry["last"] = report.failed or "green"
        if report.green:
            entry.setdefault("green", now())


def hint(task: str | Task, n: int, *, progress: Progress | None = None) -> None:
    """Print hint 1 (idea), 2 (shapes) or 3 (skeleton) of a task; ValueError for another number."""
    task = task if isinstance(task, Task) else find_task(task)
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= len(HINT_KINDS):
        raise ValueError(f"hint must be 1 to {len(HINT_KINDS)}, got {n!r}")
    print(f"{task.id}, hint {n} of {len(HINT_KINDS)} ({HINT_KINDS[n - 1]})\n{task.hints[n - 1]}")
    try:
        with (progress or Progress()).change() as data:
            entry = data["checks"].setdefault(task.id, {})
            entry["hints"] = sorted({*entry.get("hints", []), n})
    except (ProgressError, OSError) as error:
        print(f"Not recorded: {error}")
