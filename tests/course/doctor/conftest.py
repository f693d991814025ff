"""Ways to make a machine look ill, and the report that a set of checks gives."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from minillm.course.doctor import Check, run_doctor

Install = Callable[..., None]
Report = Callable[..., tuple[int, str]]


@pytest.fixture
def report() -> Report:
    """Runs some checks: report(check, ...) gives the exit status and the text."""

    def run(*checks: Check) -> tuple[int, str]:
        out = io.StringIO()
        return run_doctor(out, checks), out.getvalue()

    return run


@pytest.fixture
def line_with() -> Callable[[str, str], str]:
    """The line of a text about one thing: line_with(text, "torch")."""
    return lambda text, what: next(line for line in text.splitlines() if f" {what} " in line)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts packages in front of the installed ones: install("name", "1.0", requires=[...], source="what its import runs")."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(name: str, version: str, requires: tuple[str, ...] = (), source: str | None = None, python: str = ">=3.11") -> None:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
        info.joinpath("METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires)]) + "\n")
        if source is not None:
            tmp_path.joinpath(f"{name}.py").write_text(source)

    return add
