"""No test of the course touches the progress of whoever runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm.course.progress import Progress


@pytest.fixture(autouse=True)
def progress_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "progress"
    monkeypatch.setenv("MINILLM_PROGRESS_DIR", str(folder))
    return folder


@pytest.fixture
def store(progress_folder: Path) -> Progress:
    return Progress(progress_folder)


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a learner sat in front of it."""
    monkeypatch.setenv("MINILLM_HEADLESS", "0")
