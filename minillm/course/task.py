"""What an exercise asks: a task with named checks, three hints and, where the engine has a seam for it, the way in."""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

KINDS = ("shape", "exact", "random", "edges", "state", "engine", "budget")
HINT_KINDS = ("idea", "shapes", "skeleton")
ID = re.compile(r"(\d+)\.(\d+) (core|break|stretch)")


@dataclass(frozen=True)
class NamedCheck:
    """One check. ``name`` is its kind, or kind and what it tries: "edges: a prompt of one token".

    Kinds, in the order in which a task runs them: shape, exact (small enough to do by hand), random (against an oracle),
    edges, state (inputs unchanged, no leak), engine (the answer inside the engine), budget (bytes or passes, counted).
    ``fn(candidate)`` raises ``Mismatch`` or AssertionError. ``hint`` is the number of the hint that helps here.
    """

    name: str
    fn: Callable[[Any], None]
    hint: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"check {self.name!r}: its name must begin with one of {', '.join(KINDS)}")
        if self.hint not in (None, 1, 2, 3):
            raise ValueError(f"check {self.name!r}: hint must be 1, 2 or 3, got {self.hint!r}")

    @property
    def kind(self) -> str:
        return self.name.split(":")[0]


@dataclass(frozen=True)
class Seam:
    """Where a solved task fits into the engine.

    name: the seam, "prefix_cache". room: what ``status`` calls it. build: makes options for ``LLM(...)`` from the
    learner's function or class, for example ``lambda cls: {"prefix_cache": cls()}``.
    """

    name: str
    room: str
    build: Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Task:
    """One task. ``references`` are the functions and classes that an answer may neither be nor call."""

    id: str
    title: str
    checks: Sequence[NamedCheck]
    hints: Sequence[str]
    seam: Seam | None = None
    references: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if not ID.fullmatch(self.id):
            raise ValueError(f"a task's id is number and kind, like '1.1 core', got {self.id!r}")
        if not self.checks:
            raise ValueError(f"{self.id} has no checks")
        names = [check.name for check in self.checks]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.id}: check names must differ, got {names}")
        order = [KINDS.index(check.kind) for check in self.checks]
        if order != sorted(order):
            raise ValueError(f"{self.id}: checks must run in the order {', '.join(KINDS)}, got {names}")
        if len(self.hints) != len(HINT_KINDS):
            raise ValueError(f"{self.id} needs {len(HINT_KINDS)} hints ({', '.join(HINT_KINDS)}), got {len(self.hints)}")

    @property
    def number(self) -> str:
        """The notebook's number, "1.1"."""
        return self.id.split()[0]

    @property
    def sort_key(self) -> tuple[int, int, int]:
        chapter, section = self.number.split(".")
        return int(chapter), int(section), ("core", "break", "stretch").index(self.id.split()[1])


def all_tasks() -> tuple[Task, ...]:
    """Every task of the course in order: ``TASKS`` of each minillm/course/tasks/ex_<chapter>_<section>."""
    from minillm.course import tasks

    modules = [importlib.import_module(f"{tasks.__name__}.{m.name}") for m in pkgutil.iter_modules(tasks.__path__)]
    return tuple(sorted((t for m in modules for t in m.TASKS), key=lambda t: t.sort_key))


def find_task(id: Any) -> Task:
    """The task with this id, a text; imports only its own exercise. ValueError names the tasks that exist."""
    match = ID.fullmatch(id) if isinstance(id, str) else None
    if match:
        name = f"minillm.course.tasks.ex_{match[1]}_{match[2]}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
        else:
            for task in module.TASKS:
                if task.id == id:
                    return task
    raise ValueError(f"no task {id!r}; there are {', '.join(t.id for t in all_tasks()) or 'none yet'}")
