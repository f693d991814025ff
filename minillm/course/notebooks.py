"""Notebook hygiene: ``python -m minillm.course.notebooks`` executes and normalises, ``--check`` only judges.

Normal form: two runs with equal results give equal bytes. Rules that a chapter or solution must keep are in ``problems``.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Iterator

import nbformat

from minillm.course.percent import from_notebook, to_notebook
from minillm.course.session import course_root, notebooks

KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
IGNORED = "nbval-ignore-output"
WIDGET = "application/vnd.jupyter.widget-view+json"
KEPT_METADATA = {"tags", "nbgrader", "deletable", "editable"}
MAX_LINES = 30
BUDGET_SECONDS = {"chapters": 60, "solutions": 30}
ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "timeit", "measure_machine", "Panel", "predict", "reveal", "stream"}


def dumps(notebook: Any) -> str:
    """A notebook as text: sorted keys, one-space indent, newline at the end."""
    lines = nbformat.v4.rwbase.split_lines(copy.deepcopy(notebook))
    return json.dumps(lines, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def normalise(notebook: Any) -> Any:
    """A copy in normal form: fixed kernel, no timestamps, no widget state or views, counts from 1, no object addresses."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = nbformat.from_dict(copy.deepcopy(KERNEL))
    notebook.nbformat_minor = 5
    count = 0
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in KEPT_METADATA})
        cell.source = cell.source.rstrip()
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count if cell.outputs or cell.execution_count else None
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
            if "data" in output:
                output.data.pop(WIDGET, None)  # a model id means nothing without its kernel; the picture beside it stays
                output.metadata = nbformat.from_dict({})
                if "text/plain" in output.data:
                    output.data["text/plain"] = ADDRESS.sub("0x…", output.data["text/plain"])
    return notebook


def execute(path: Path, timeout: int = 600) -> float:
    """Run a notebook top to bottom without a front end, write it in normal form, return the seconds it took."""
    from nbclient import NotebookClient

    notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    client = NotebookClient(
        notebook, timeout=timeout, startup_timeout=120, kernel_name="python3", record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.monotonic()
    client.execute(env={**os.environ, "MINILLM_HEADLESS": "1"})
    seconds = time.monotonic() - start
    path.write_text(dumps(normalise(notebook)), encoding="utf-8", newline="\n")
    return seconds


def problems(notebook: Any, outputs: bool = True) -> Iterator[str]:
    """What breaks the course's rules, one line each; ``outputs``: the notebook must be executed (chapters and solutions)."""
    for i, cell in enumerate(notebook.cells, 1):
        if not cell.source.strip():
            yield f"cell {i}: empty"
        if cell.cell_type == "code":
            yield from (f"cell {i}: {found}" for found in _code_problems(cell, outputs))


def _code_problems(cell: Any, outputs: bool) -> Iterator[str]:
    lines = len(cell.source.splitlines())
    if lines > MAX_LINES:
        yield f"{lines} lines, at most {MAX_LINES}"
    try:
        tree = ast.parse(cell.source)
    except SyntaxError:
        yield "not plain Python (magics and shell escapes do not run everywhere)"
        return
    tagged = IGNORED in cell.metadata.get("tags", [])
    if outputs and not cell.execution_count:
        yield "not executed"
    kinds = {mime for o in cell.outputs for mime in o.get("data", {})}
    if any(o.output_type == "error" for o in cell.outputs) and "raises-exception" not in cell.metadata.get("tags", []):
        yield "ends in an error"
    if tagged:
        return
    prints = _prints(tree)
    if prints > 1:
        yield f"a compared cell has one print outside of loops, this one has {'a print in a loop' if prints == LOOP else prints}"
    if kinds & {"image/png", "image/svg+xml", WIDGET}:
        yield f"shows a figure or widget: tag it {IGNORED}"
    names = (n for n in ast.walk(tree) if isinstance(n, (ast.Name, ast.Attribute)))
    clocks = CLOCKS & {n.attr if isinstance(n, ast.Attribute) else n.id for n in names}
    if clocks and cell.outputs:
        yield f"depends on {', '.join(sorted(clocks))} and shows something: tag it {IGNORED}"
    if any(ADDRESS.search(str(o)) or str(Path.home()) + "/" in str(o) for o in cell.outputs):
        yield "shows an object's address or a path of this machine"


LOOP = 10**6


def _prints(tree: ast.AST, looped: bool = False) -> int:
    """How many prints a cell may run at its top level; one in a loop counts as LOOP. Bodies of functions do not count."""
    if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return 0
    here = isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "print"
    inner = looped or isinstance(tree, (ast.For, ast.While, ast.ListComp, ast.GeneratorExp))
    found = (LOOP if looped else 1) if here else 0
    return min(LOOP, found + sum(_prints(child, inner) for child in ast.iter_child_nodes(tree)))


def judge(path: Path) -> list[str]:
    """Everything wrong with a committed chapter or solution."""
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    found = list(problems(notebook))
    if dumps(normalise(notebook)) != text:
        found.insert(0, "not in normal form; run python -m minillm.course.notebooks --normalise on it")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minillm.course.notebooks", description="Execute and normalise notebooks.")
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks (default: all in chapters/ and solutions/)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="run nothing; exit with 1 if a notebook breaks a rule")
    mode.add_argument("--normalise", action="store_true", help="run nothing; only bring the files into normal form")
    mode.add_argument("--from-py", action="store_true", help="paths are name.py in py:percent form; write name.ipynb beside each")
    mode.add_argument("--to-py", action="store_true", help="write each notebook as name.py in py:percent form beside it")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one cell (default 600)")
    options = parser.parse_args(argv)
    root = course_root()
    paths = options.paths or ([p for part in BUDGET_SECONDS for p in notebooks(root / part)] if root else [])
    bad = 0
    for path in paths:
        try:
            said = _one(path, options)
        except Exception as error:  # a failing cell is reported and the next notebook still runs
            said = [str(error)]
        bad += bool(said)
        print(f"{path}: {'ok' if not said else ''}" + "".join(f"\n  {line}" for line in said))
    if not paths:
        print("no notebooks found", file=sys.stderr)
    return 1 if bad or not paths else 0


def _one(path: Path, options: argparse.Namespace) -> list[str]:
    if options.check:
        return judge(path)
    if options.from_py:
        target = path.with_suffix(".ipynb")
        old = nbformat.reads(target.read_text(encoding="utf-8"), as_version=4) if target.exists() else None
        target.write_text(dumps(normalise(to_notebook(path.read_text(encoding="utf-8"), old))), encoding="utf-8", newline="\n")
        return []
    notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    if options.to_py:
        path.with_suffix(".py").write_text(from_notebook(notebook), encoding="utf-8", newline="\n")
        return []
    if options.normalise:
        path.write_text(dumps(normalise(notebook)), encoding="utf-8", newline="\n")
        return []
    seconds = execute(path, options.timeout)
    budget = next((s for part, s in BUDGET_SECONDS.items() if part in path.resolve().parts), None)
    late = [f"took {seconds:.0f} s, the budget is {budget} s"] if budget and seconds > budget else []
    print(f"{path}: {seconds:.1f} s")
    return late + judge(path)


if __name__ == "__main__":
    sys.exit(main())
