"""What works on this machine, and what to do about the rest.

These modules import only the standard library at the top: a doctor that needs a healthy patient is of no use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from minillm.course.doctor import machine, software
from minillm.course.doctor.finding import SET_UP, Check, Finding, Status, one_line

STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}
CHECKS: tuple[Check, ...] = (
    software.check_python, software.check_packages, software.check_widgets, software.check_model,
    machine.check_gpu, machine.check_triton, machine.check_compiler, machine.check_space, machine.check_machine,
)


def run_doctor(out: TextIO | None = None, checks: Iterable[Check] = CHECKS) -> int:
    """Write one line for each finding to ``out`` (stdout) as it is found; 1 if one of them is a FAIL, else 0.

    A check that itself fails is reported as a FAIL; the others still run.
    """
    write = _writer(out or sys.stdout)
    tally: dict[Status, int] = {"OK": 0, "WARN": 0, "FAIL": 0}
    for check in checks:
        for finding in _findings(check):
            tally[finding.status] += 1
            write(finding.status, f"{finding.what:12}  {finding.detail}")
            if finding.remedy:
                write("", f"{'':12}  do: {finding.remedy}")
    write("", f"{tally['OK']} fine, {tally['WARN']} to know, {tally['FAIL']} to mend")
    return 1 if tally["FAIL"] else 0


def _findings(check: Check) -> Iterator[Finding]:
    try:
        yield from check()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken package may raise anything, SystemExit included
        yield Finding("FAIL", check.__name__.removeprefix("check_"), f"could not be checked: {one_line(error)}", SET_UP)


def _writer(out: TextIO) -> Callable[[str, str], None]:
    """A function that writes a status in colour on a terminal and plainly elsewhere, or where rich is missing."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return lambda status, line: print(f"{status:4}  {line}", file=out, flush=True)
    console = Console(file=out, highlight=False, soft_wrap=True)
    return lambda status, line: console.print(Text.assemble((f"{status:4}", STYLES.get(status, "")), "  ", line))
