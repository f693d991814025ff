"""My engine: solved tasks are parts. ``mine()`` assembles an engine from them; what is not solved yet is minillm's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Callable, Iterable

from minillm.course.progress import Progress, now
from minillm.course.source import SourceError, bundle, name_of
from minillm.course.task import Task, all_tasks


def save_part(task: Task, candidate: Any, progress: Progress | None = None) -> Path:
    """Keep the source of a solved task so that a later session can run it. SourceError says why that is impossible."""
    if task.seam is None:
        raise ValueError(f"{task.id} has no seam in the engine")
    store, name = progress or Progress(), name_of(candidate)
    text = f"# {task.id}, {task.title}: written by you, kept on {now()}\n{bundle(candidate)}"
    path = store.subfolder("parts") / f"{task.id.replace(' ', '_')}.py"
    trial = path.with_name("trial_" + path.name)
    trial.write_text(text, encoding="utf-8")
    try:
        _load(trial, name)
    except Exception as error:
        raise SourceError(f"{name} does not run outside of this notebook: {type(error).__name__}: {error}") from error
    else:
        trial.replace(path)  # an older part stays until a newer one is known to load
    finally:
        trial.unlink(missing_ok=True)
    with store.change() as data:
        data["parts"][task.id] = {"name": name, "seam": task.seam.name, "room": task.seam.room, "time": now(), "file": path.name}
    return path


def _load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"part_{path.stem.replace('.', '_')}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return getattr(module, name)


def load_part(task: Task, progress: Progress | None = None) -> Any:
    """The learner's function or class of a solved task. SourceError says what to do when its copy no longer loads."""
    store = progress or Progress()
    entry = store.read()["parts"].get(task.id)
    if entry is None:
        raise ValueError(f"no part is kept for {task.id}; its check must be green first")
    path = store.folder / "parts" / entry["file"]
    try:
        return _load(path, entry["name"])
    except Exception as error:
        raise SourceError(
            f"your part of {task.id} no longer loads from {path} ({type(error).__name__}: {error}); "
            f"run its check again, or `minillm course reset {task.number}`"
        ) from error


def rooms(progress: Progress | None = None, tasks: Iterable[Task] | None = None) -> dict[str, str]:
    """Each room of the engine that the course has a seam for: "yours (1.1 core, attend)" or "minillm"."""
    parts = (progress or Progress()).read()["parts"]
    found: dict[str, str] = {}
    for task in tasks if tasks is not None else all_tasks():
        if task.seam is not None:
            found.setdefault(task.seam.room, "minillm")
            if task.id in parts:
                found[task.seam.room] = f"yours ({task.id}, {parts[task.id]['name']})"
    return found


def my_options(progress: Progress | None = None, tasks: Iterable[Task] | None = None) -> dict[str, Any]:
    """Options for ``LLM(...)`` made of the learner's parts. Of two tasks for one seam the later counts."""
    store = progress or Progress()
    parts = store.read()["parts"]
    listed = tasks if tasks is not None else all_tasks()
    by_seam = {task.seam.name: (task.seam, task) for task in listed if task.seam is not None and task.id in parts}
    options: dict[str, Any] = {}
    source: dict[str, str] = {}
    for seam, task in by_seam.values():
        for key, value in seam.build(load_part(task, store)).items():
            if key in options:
                raise ValueError(f"your parts for {source[key]} and {seam.name} both set the engine's option {key!r}")
            options[key], source[key] = value, seam.name
    return options


def mine(
    model: Any = "smollm2-135m", *, progress: Progress | None = None, tasks: Iterable[Task] | None = None,
    engine: Callable[..., Any] | None = None, **options: Any,
) -> Any:
    """An engine in which every solved seam runs the learner's code and the rest is minillm's; says which is which.

    ``options`` go to ``LLM`` and win over a part that sets the same one. ``engine`` builds it (default ``minillm.LLM``).
    """
    listed = tuple(tasks if tasks is not None else all_tasks())
    parts = my_options(progress, listed)
    print("\n".join(f"{room}: {owner}" for room, owner in rooms(progress, listed).items()) or "every room: minillm")
    return (engine or _llm())(model, **{**parts, **options})


def _llm() -> Callable[..., Any]:
    return importlib.import_module("minillm.llm").LLM  # late: the engine is heavy, and status needs none
