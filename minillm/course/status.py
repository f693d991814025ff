"""``minillm course status`` and ``reset``: what is read, what is green, how good the predictions are, which rooms are yours."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from minillm.course.mine import rooms
from minillm.course.predictions import calibration, short, verdict
from minillm.course.progress import NUMBER, Progress, ProgressError
from minillm.course.session import course_root, notebook_number, notebooks
from minillm.course.task import ID, all_tasks

KINDS = ("core", "break", "stretch")


def status(progress: Progress | None = None, root: Path | None = None) -> str:
    """The learner's state as text: notebooks and tasks, predictions, rooms of the engine, what comes next."""
    store, base = progress or Progress(), root or course_root()
    data = store.read()
    sections = [_notebooks(data, base), _predictions(data, store), _rooms(store), [f"Progress file: {store.path}"]]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _notebooks(data: dict[str, Any], base: Path | None) -> list[str]:
    chapters = {notebook_number(p): p for p in notebooks(base / "chapters")} if base else {}
    checked = [id for id in data["checks"] if ID.fullmatch(id)]
    finished = [number for number in data["notebooks"] if NUMBER.fullmatch(number)]  # an older file may hold others
    asked = {t.id for t in all_tasks()} | set(checked)
    names = {number: path.stem.split("_", 1)[1].replace("_", " ") for number, path in chapters.items()}
    for number in [*finished, *(id.split()[0] for id in checked)]:
        names.setdefault(number, "")
    if not names:
        return ["Nothing read yet, and no chapters/ found from here."]
    width = max(len(name) for name in names.values())
    lines = [f"Notebooks: {len(finished)} of {len(names)} read"]
    first = None
    for number, name in sorted(names.items(), key=lambda item: [int(n) for n in item[0].split(".")]):
        read = number in finished
        ids = [f"{number} {kind}" for kind in KINDS]
        marks = [f"{id.split()[1]} {_mark(data['checks'].get(id, {}))}" for id in ids if id in asked]
        lines.append(f"  {number}  {name:{width}}  {'read' if read else '-':4}  {', '.join(marks)}".rstrip())
        first = first or (None if read or number not in chapters else chapters[number])
    if first is not None and base is not None:
        lines.append(f"Next: {first.relative_to(base).as_posix()}")
    return lines


def _mark(entry: dict[str, Any]) -> str:
    if "green" in entry:
        return "green"
    return f"red at {entry['last']!r}" if entry.get("attempts") and "last" in entry else "open"


def _predictions(data: dict[str, Any], store: Progress) -> list[str]:
    lines = []
    for id, e in sorted(data["predictions"].items()):
        if e.get("value") is None:
            continue
        unit = e.get("unit", "")
        if e.get("measured") is None:
            lines.append(f"  {id}: {short(e['value'])} {unit}, not measured yet")
        else:
            late = " (late: does not count)" if e.get("late") else ""
            said = verdict(e["value"], e["measured"], unit, e.get("log", True))
            lines.append(f"  {id}: you {short(e['value'])}, measured {short(e['measured'])} {unit}. {said}{late}")
    if not lines:
        return []
    chapters = calibration(store)
    if chapters:
        total, near = sum(c.count for c in chapters), sum(c.within_two for c in chapters)
        typical = statistics.median([c.median_factor for c in chapters])
        each = ", ".join(f"chapter {c.chapter} ×{short(c.median_factor)}" for c in chapters)
        lines.append(f"  Typically off by ×{short(typical)} ({each}); {near} of {total} within a factor of 2.")
    return ["Predictions:", *lines]


def _rooms(store: Progress) -> list[str]:
    owned = rooms(store)
    if not owned:
        return []
    width = max(len(room) for room in owned)
    yours = sum(owner.startswith("yours") for owner in owned.values())
    lines = [f"  {room:{width}}  {owner}" for room, owner in owned.items()]
    rooms_are = f"{'room' if len(owned) == 1 else 'rooms'} {'is' if 1 in (yours, len(owned)) else 'are'}"
    return [f"Your engine: {yours} of {len(owned)} {rooms_are} yours", *lines]


def add_course_arguments(subparsers: Any) -> None:
    """Add ``course`` with its commands to the subparsers of ``minillm``; ``run_course(args)`` then runs it."""
    course = subparsers.add_parser("course", help="your progress in the course", description="Your progress in the course.")
    commands = course.add_subparsers(dest="course_command", metavar="COMMAND", required=True)
    commands.add_parser("status", help="notebooks read, tasks green, predictions, and which rooms of the engine are yours")
    again = commands.add_parser("reset", help="give back an exercise as shipped; your version is kept")
    again.add_argument("number", help="the exercise's number, for example 1.1")
    course.set_defaults(run=run_course)


def run_course(args: argparse.Namespace) -> int:
    """Run ``minillm course ...``; returns the exit code. Errors that a user can cause go to stderr without a traceback."""
    try:
        if args.course_command == "status":
            print(status())
        else:
            from minillm.course.exercises import reset  # nbformat only where it is needed

            print(reset(args.number))
    except (ProgressError, ValueError) as error:
        print(f"minillm course {args.course_command}: {error}", file=sys.stderr)
        return 1
    return 0
