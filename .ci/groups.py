"""Run the test groups one after another, each within its time budget, and count what they ran.

    python .ci/groups.py                 every group that has files
    python .ci/groups.py unit browser    these groups
    python .ci/groups.py --fast          unit tests without the slow ones and those that need the model

A group without files is not run. The last line, also kept as build/tests/summary.txt, is ``N passed, N failed, N skipped``,
summed over the groups; an error, and a group that did not get as far as a report, count as failed. The exit status is 1 if
anything failed or nothing ran.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("notebooks", "exercises", "browser", "gpu")  # folders of tests/ that are not unit tests; gpu needs a command of its own
PARALLEL = ("-n", "2", "--dist", "loadfile")  # the one distribution that nbval works with
NBVAL = ("--nbval", "--nbval-current-env", "--nbval-cell-timeout=120", "--nbval-kernel-startup-timeout=120")
FAST = ("-m", "not slow and not model and not network")
PATIENCE = 1.2  # a group over its budget is reported, and ended at this many budgets: all of them fit CI's 40 minutes


@dataclass(frozen=True)
class Group:
    """Tests that are run in the same way. paths: folders; ignored: sub-folders of other groups; budget: seconds on two cores."""

    name: str
    paths: tuple[str, ...]
    budget: int
    options: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    one_thread: bool = False  # beside a second worker on two cores, a second torch thread only gets in the way

    def folders(self, root: Path) -> list[str]:
        """Those of the paths that hold a test or a notebook."""
        return [p for p in self.paths if any(self._is_test(file.relative_to(root / p)) for file in (root / p).rglob("*"))]

    def _is_test(self, file: Path) -> bool:
        test = file.suffix == ".ipynb" or (file.name.startswith("test_") and file.suffix == ".py")
        return test and file.parts[0] not in self.ignored and ".ipynb_checkpoints" not in file.parts

    def command(self, folders: list[str], report: Path) -> list[str]:
        ignore = [f"--ignore={path}/{name}" for path in folders for name in self.ignored]
        return [sys.executable, "-m", "pytest", "-q", "-rfEs", f"--junitxml={report}", *self.options, *ignore, *folders]


GROUPS = (
    Group("unit", ("tests",), budget=500, options=PARALLEL, ignored=OTHERS, one_thread=True),
    Group("notebooks", ("chapters", "solutions", "tests/notebooks"), budget=650, options=(*PARALLEL, *NBVAL), one_thread=True),
    Group("exercises", ("tests/exercises",), budget=70, options=PARALLEL, one_thread=True),
    Group("browser", ("tests/browser",), budget=470, options=PARALLEL, one_thread=True),
)


def count(report: Path) -> Counter[str]:
    """Passed, failed and skipped in a JUnit report. A report that is missing or cut off is one failure."""
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return Counter(failed=1)
    total = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")}
    failed = total["failures"] + total["errors"]
    return Counter(passed=max(0, total["tests"] - failed - total["skipped"]), failed=failed, skipped=total["skipped"])


def run(command: list[str], root: Path, limit: float, one_thread: bool) -> int | None:
    """The exit status of a command, or None if it had to be ended, with everything it started, after ``limit`` seconds."""
    env = dict(os.environ)
    if one_thread:
        env.setdefault("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(command, cwd=root, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise


def run_group(group: Group, root: Path, reports: Path, fast: bool) -> tuple[Counter[str], float]:
    """Counts and seconds of one group; both empty if it has no files yet."""
    folders = group.folders(root)
    if not folders:
        return Counter(), 0.0
    report = reports / f"{group.name}.xml"
    report.unlink(missing_ok=True)
    print(f"== {group.name}: {' '.join(folders)}", flush=True)
    start = time.monotonic()
    status = run([*group.command(folders, report), *(FAST if fast else ())], root, group.budget * PATIENCE, group.one_thread)
    seconds = time.monotonic() - start
    counts = count(report)
    if status not in (0, 5) and not counts["failed"]:  # 5: no test was selected
        counts["failed"] = 1
    if status is None:
        print(f"{group.name} was ended after {seconds:.0f} s, {PATIENCE:g} times its budget", flush=True)
    return counts, seconds


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    names = [group.name for group in GROUPS]
    parser = argparse.ArgumentParser(description="Run the test groups and count what they ran.")
    parser.add_argument("groups", nargs="*", help=f"some of: {', '.join(names)} (all of them)")
    parser.add_argument("--fast", action="store_true", help="unit tests without the slow ones and those that need the model")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.groups) - set(names))
    if unknown:
        parser.error(f"unknown group {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = options.groups or (["unit"] if options.fast else names)
    reports = root / "build" / "tests"
    reports.mkdir(parents=True, exist_ok=True)
    total: Counter[str] = Counter()
    lines = []
    for group in GROUPS:
        if group.name in chosen:
            counts, seconds = run_group(group, root, reports, options.fast)
            total += counts
            late = "  over budget" if seconds > group.budget else ""
            ran = ", ".join(f"{counts[k]} {k}" for k in ("passed", "failed", "skipped")) if counts else "no files yet"
            lines.append(f"{group.name:10} {ran:38} {seconds:5.0f} s of {group.budget} s{late}")
    print("\n" + "\n".join(lines))
    summary = ", ".join(f"{total[key]} {key}" for key in ("passed", "failed", "skipped"))
    reports.joinpath("summary.txt").write_text(summary + "\n")
    print(summary, flush=True)
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
