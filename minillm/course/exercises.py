"""exercises/ is generated from solutions/: ``python -m minillm.course.exercises [--check]``.

Markers in a solution's code cells, which nbgrader also understands:

    ### BEGIN SOLUTION core                 a region that the learner writes; ``core``, ``break`` or ``stretch``
    ### END SOLUTION                        → raise NotImplementedError("exercise 1.1 core")
    ### BEGIN FAULT ... ### END FAULT       inside a solution region, commented out: shipped instead of the stub (break tasks)
    ### BEGIN HIDDEN TESTS ... ### END HIDDEN TESTS      dropped

Cells tagged ``solution-only`` are dropped; outputs and counts are removed. Equal sources give equal bytes.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
import time
from pathlib import Path

import nbformat

from minillm.course.notebooks import KERNEL, dumps
from minillm.course.progress import Progress
from minillm.course.session import course_root, find_notebook, notebook_number, notebooks

SOLUTION = re.compile(
    r"^(?P<indent>[ \t]*)### BEGIN SOLUTION[ \t]*(?P<kind>\w*)[ \t]*\n(?P<body>.*?)^[ \t]*### END SOLUTION[ \t]*$", re.S | re.M
)
FAULT = re.compile(r"^[ \t]*### BEGIN FAULT[ \t]*\n(?P<body>.*?)^[ \t]*### END FAULT[ \t]*$", re.S | re.M)
HIDDEN = re.compile(r"^[ \t]*### BEGIN HIDDEN TESTS[ \t]*\n.*?^[ \t]*### END HIDDEN TESTS[ \t]*\n?", re.S | re.M)
KEPT_METADATA = ("nbgrader", "tags", "deletable", "editable")


def strip_source(source: str, number: str, where: str) -> str:
    """The learner's version of a code cell. ValueError names the cell where markers do not pair up or the rest does not parse."""

    def stub(match: re.Match[str]) -> str:
        kind, indent = match["kind"], match["indent"]
        if kind not in ("core", "break", "stretch"):
            raise ValueError(f"{where}: BEGIN SOLUTION must name core, break or stretch, got {kind!r}")
        fault = FAULT.search(match["body"])
        if fault is None:
            lines = ["# YOUR CODE HERE", f'raise NotImplementedError("exercise {number} {kind}")']
            return "\n".join(indent + line for line in lines)
        lines = fault["body"].splitlines()
        bare = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if bare:
            raise ValueError(f"{where}: every line of a FAULT must be commented out, got {bare[0].strip()!r}")
        return "\n".join(re.sub(r"^([ \t]*)# ?", r"\1", line).rstrip() for line in lines)

    text = HIDDEN.sub("", SOLUTION.sub(stub, source)).rstrip("\n")
    left = re.search(r"### (BEGIN|END) (SOLUTION|FAULT|HIDDEN TESTS)", text)
    if left:
        raise ValueError(f"{where}: {left[0]} has no partner")
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{where}: what remains for the learner does not parse: {error}") from None
    return text


def generate(solution: Path) -> str:
    """The text of the exercise notebook that belongs to a solution notebook."""
    number, cells = notebook_number(solution), []
    notebook = nbformat.reads(solution.read_text(encoding="utf-8"), as_version=4)
    for i, cell in enumerate(notebook.cells):
        if "solution-only" in cell.metadata.get("tags", []):
            continue
        new = {
            "id": cell.id, "cell_type": cell.cell_type, "source": cell.source,
            "metadata": {key: cell.metadata[key] for key in KEPT_METADATA if key in cell.metadata},
        }
        if cell.cell_type == "code":
            source = strip_source(cell.source, number, f"{solution.name}, cell {i + 1}")
            new.update(source=source, execution_count=None, outputs=[])
        cells.append(new)
    made = nbformat.from_dict({"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5})
    nbformat.validate(made)
    return dumps(made)


def keep_copy(path: Path, progress: Progress | None = None) -> Path:
    """Copy a learner's notebook into the data folder before it is replaced; returns where it is kept."""
    folder = (progress or Progress()).subfolder("backups")
    stem = f"{notebook_number(path)}_{path.stem}_{time.strftime('%Y%m%d-%H%M%S')}"
    kept, n = folder / f"{stem}.ipynb", 2
    while kept.exists():
        kept, n = folder / f"{stem}-{n}.ipynb", n + 1
    kept.write_bytes(path.read_bytes())
    return kept


def reset(number: str, *, progress: Progress | None = None, root: Path | None = None) -> str:
    """Give back the shipped exercise notebook ("1.1") and clear its marks; the learner's file is kept. Returns a message."""
    store, base = progress or Progress(), root or course_root()
    if base is None:
        raise ValueError("the course's folder (with chapters/ and solutions/) was not found from here; change into it first")
    solution = find_notebook(base / "solutions", number)
    exercise = base / "exercises" / solution.parent.name / solution.name
    fresh, said = generate(solution), []
    if exercise.exists() and exercise.read_text(encoding="utf-8", errors="replace") != fresh:
        said.append(f"Your version is kept as {keep_copy(exercise, store)}.")
    exercise.parent.mkdir(parents=True, exist_ok=True)
    exercise.write_text(fresh, encoding="utf-8", newline="\n")
    with store.change() as data:
        for section in ("checks", "parts"):
            for id in [key for key in data[section] if key.split()[0] == number]:
                del data[section][id]
    said.append(f"{exercise} is as shipped, its marks are cleared. If it is open, use File > Reload Notebook from Disk.")
    return "\n".join(said)


def build(root: Path, check: bool = False) -> list[str]:
    """Write exercises/ from solutions/, or only compare them. Returns one line per file that was written or differs."""
    wanted = {root / "exercises" / p.parent.name / p.name: generate(p) for p in notebooks(root / "solutions")}
    said = []
    for path in sorted({*wanted, *notebooks(root / "exercises")}):
        have = path.read_text(encoding="utf-8") if path.exists() else ""
        name = path.relative_to(root).as_posix()
        if path not in wanted:
            said.append(f"{name}: has no solution" + ("" if check else "; removed"))
            if not check:
                keep_copy(path)
                path.unlink()
        elif have != wanted[path]:
            if check:
                pair = have.splitlines(), wanted[path].splitlines()
                diff = list(difflib.unified_diff(*pair, "committed", "generated", n=1, lineterm=""))
                said.append("\n".join([f"{name}: differs from its solution", *diff[:30]]))
                continue
            kept = f"; the version that was worked in is kept as {keep_copy(path)}" if '"execution_count": 1' in have else ""
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8", newline="\n")
            said.append(f"{name}: written{kept}")
    return said


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m minillm.course.exercises", description="Generate exercises/ from solutions/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if exercises/ is out of date")
    parser.add_argument("--root", type=Path, help="folder with solutions/ (default: found from the working folder)")
    options = parser.parse_args(argv)
    root = options.root or course_root()
    if root is None or not (root / "solutions").is_dir():
        print("no solutions/ folder found; use --root", file=sys.stderr)
        return 2
    try:
        said = build(root, options.check)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(said) or "exercises/ agrees with solutions/")
    return 1 if options.check and said else 0


if __name__ == "__main__":
    sys.exit(main())
