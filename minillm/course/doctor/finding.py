"""What a check of the doctor finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["OK", "WARN", "FAIL"]
SET_UP = "run `make setup`; in an environment of your own: python -m pip install -e '.[course,test]'"


@dataclass(frozen=True)
class Finding:
    """One line of the report. remedy: what to do, for anything but OK. Only a FAIL makes the exit status 1."""

    status: Status
    what: str
    detail: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def one_line(error: object) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
