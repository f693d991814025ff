"""The report says what is wrong and what to do; the exit status is 1 only when something must be mended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minillm.course.doctor import Finding, Status

Install = Callable[..., None]
Report = Callable[..., tuple[int, str]]
LineWith = Callable[[str, str], str]


@pytest.mark.parametrize("status, code", [("OK", 0), ("WARN", 0), ("FAIL", 1)])
def test_only_a_failure_makes_the_exit_status_1(report: Report, status: Status, code: int) -> None:
    assert report(lambda: [Finding("OK", "a", "fine"), Finding(status, "b", "so", "do that")])[0] == code


def test_report_is_plain_where_out_is_not_a_terminal_and_long_lines_stay_whole(report: Report) -> None:
    code, text = report(lambda: [Finding("FAIL", "thing", "x" * 300, "[bold]do[/bold] this")])
    assert code == 1 and "\x1b" not in text
    assert text.splitlines()[:2] == [f"FAIL  thing         {'x' * 300}", f"{'':20}do: [bold]do[/bold] this"]
    assert text.splitlines()[-1].strip() == "0 fine, 0 to know, 1 to mend"


def test_report_is_written_without_rich_too(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = report(lambda: [Finding("WARN", "a", "b", "c")])
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert report(lambda: [Finding("WARN", "a", "b", "c")]) == expected


@pytest.mark.parametrize("error", [SystemExit(3), OSError("libfoo.so: cannot open\nmore"), RecursionError()])
def test_check_that_fails_itself_is_reported_and_the_next_one_runs(
    report: Report, line_with: LineWith, error: BaseException
) -> None:
    def check_odd() -> list[Finding]:
        raise error

    code, text = report(check_odd, lambda: [Finding("OK", "after", "still here")])
    assert code == 1 and type(error).__name__ in line_with(text, "odd") and "still here" in text


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch", "numpy", "transformers"])
def test_doctor_itself_runs_where_a_package_it_examines_is_broken(
    line_with: LineWith, install: Install, tmp_path: Path, module: str
) -> None:
    install("minillm", "0.1.0", requires=(f"{module}>=1",))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules[{module!r}] = None\n"
        "from minillm.course import doctor\n"
        "sys.exit(doctor.run_doctor(checks=doctor.CHECKS[:-1]))"  # all but the measurement
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "does not import: ModuleNotFoundError" in line_with(result.stdout, module)
    assert "to mend" in result.stdout.splitlines()[-1]
