"""What the exercises' own tests share: a progress file of their own, and code as a learner would have written it."""

from __future__ import annotations

import linecache
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from minillm.course.progress import Progress

FILE = "<learner>"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Progress:
    monkeypatch.setenv("MINILLM_PROGRESS_DIR", str(tmp_path / "progress"))
    return Progress(tmp_path / "progress")


def written(text: str, name: str) -> Any:
    """A class or function as if it had been written in a notebook: its source can be read back."""
    module = types.ModuleType("learner")
    sys.modules["learner"] = module
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    exec(compile(text, FILE, "exec"), vars(module))
    return getattr(module, name)
