"""The learner's progress: one JSON file on this machine, safe for two notebooks at once. Nothing leaves the machine."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any, Iterator

import filelock

from minillm.course.session import data_dir

SECTIONS = ("predictions", "checks", "notebooks", "parts")
LOCK_SECONDS = 10.0


class ProgressError(RuntimeError):
    """The progress file cannot be used; the message says why and what to do."""


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


class Progress:
    """The progress file in ``folder`` (default: ``session.data_dir()``).

    ``read()`` gives its content, ``with change() as data`` alters it: sections predictions, checks, notebooks, parts, each
    a dict keyed by id. A file that cannot be understood is kept aside as ``progress.json.broken`` and a fresh one begins.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder) if folder is not None else data_dir()
        self.path = self.folder / "progress.json"

    def read(self) -> dict[str, Any]:
        if not self.folder.is_dir():
            return {section: {} for section in SECTIONS}
        with self._locked():
            return self._load()

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, Any]]:
        """Yield the content; what the block made of it is written when it ends without an exception."""
        with self._locked():
            data = self._load()
            yield data
            self._store(data)

    def subfolder(self, name: str) -> Path:
        """A folder beside the progress file, made if need be."""
        with self._locked():
            folder = self.folder / name
            folder.mkdir(exist_ok=True)
        return folder

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.path.with_suffix(".lock"), timeout=LOCK_SECONDS)
            lock.acquire()
        except filelock.Timeout:
            raise ProgressError(f"{self.path} has been in use by another program for {LOCK_SECONDS:g} s; try again") from None
        except OSError as error:
            raise ProgressError(
                f"cannot keep progress in {self.folder} ({error}); set MINILLM_HOME to a folder that you can write"
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _load(self) -> dict[str, Any]:
        data: Any = {}
        if self.path.exists():
            try:
                data = json.loads(self.path.read_text(encoding="utf-8"))
                if not isinstance(data, dict) or any(not isinstance(data.get(s, {}), dict) for s in SECTIONS):
                    raise ValueError("not a progress file")
            except ValueError as error:  # JSON and Unicode errors are ValueErrors too
                aside = self._keep_aside()
                warnings.warn(f"{self.path} was unreadable ({error}); it is kept as {aside} and a fresh one begins", stacklevel=4)
                data = {}
        for section in SECTIONS:
            data.setdefault(section, {})
        return data

    def _keep_aside(self) -> Path:
        aside, n = self.path.with_name("progress.json.broken"), 2
        while aside.exists():
            aside, n = self.path.with_name(f"progress.json.broken-{n}"), n + 1
        os.replace(self.path, aside)
        return aside

    def _store(self, data: dict[str, Any]) -> None:
        """Write beside the file and rename over it: a reader sees the old content or the new one, never half of it."""
        text = json.dumps({"version": 1, **data}, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        handle, name = tempfile.mkstemp(dir=self.folder, prefix="progress.", suffix=".tmp")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def finish(number: str, progress: Progress | None = None) -> None:
    """Mark a chapter notebook ("1.1") as read; its recap cell calls this."""
    store = progress or Progress()
    with store.change() as data:
        data["notebooks"].setdefault(number, now())
    print(f"Notebook {number} is marked as read.")
