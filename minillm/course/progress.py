"""The learner's progress: one JSON file on this machine, safe for two notebooks at once. Nothing leaves the machine."""

from __future__ import annotations

import contextlib
import datetime
import json
import numbers
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, Iterator

import filelock

from minillm.course.session import data_dir

SECTIONS = ("predictions", "checks", "notebooks", "parts")
NUMBER = re.compile(r"\d+\.\d+")  # a notebook's number, "1.1"
LOCK_SECONDS = 10.0
DEPTH = 20  # levels of lists and dicts; a progress file has four


class ProgressError(RuntimeError):
    """The progress file cannot be used; the message says why and what to do."""


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _hints(value: Any) -> bool:
    return isinstance(value, list) and all(_whole(n) for n in value)


# What an entry's fields must be where they are there; what is not listed here may be anything, and is kept.
FIELDS = {
    "predictions": {"value": _number, "measured": _number, "unit": _text, "log": _flag, "late": _flag},
    "checks": {"attempts": _whole, "last": _text, "hints": _hints},
    "parts": {"name": _text, "file": _text},
}
REQUIRED = {"parts": ("name", "file")}


def understand(data: Any) -> dict[str, Any]:
    """``data`` if it can be a progress file's content; ValueError says what is wrong with it."""
    stack = [(data, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > DEPTH:
            raise ValueError(f"nested more than {DEPTH} deep")
        if isinstance(value, (dict, list)):
            stack.extend((inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value))
    if not isinstance(data, dict):
        raise ValueError("not a progress file")
    json.dumps(data, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair could never be written back
    for section in SECTIONS:
        entries = data.get(section, {})
        if not isinstance(entries, dict):
            raise ValueError(f"{section} is not a dict")
        for id, entry in entries.items() if section in FIELDS else ():
            if not isinstance(entry, dict):
                raise ValueError(f"{section}: {id!r} is not a dict")
            missing = [key for key in REQUIRED.get(section, ()) if key not in entry]
            wrong = [key for key, fits in FIELDS[section].items() if key in entry and not fits(entry[key])]
            if missing or wrong:
                raise ValueError(f"{section}: {id!r} " + (f"lacks {missing[0]}" if missing else f"has a wrong {wrong[0]}"))
    return data


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
                if self.path.is_dir():
                    raise ValueError("a folder")
                data = understand(json.loads(self.path.read_text(encoding="utf-8")))
            except OSError as error:
                raise ProgressError(f"cannot read {self.path} ({error}); set MINILLM_HOME to a folder of yours") from error
            except (ValueError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors too
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
        try:
            os.replace(self.path, aside)
        except OSError as error:
            raise ProgressError(f"{self.path} is unreadable and cannot be moved away ({error}); move it yourself") from error
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
    """Mark a chapter notebook ("1.1") as read; its recap cell calls this. ValueError for anything but such a number."""
    if not isinstance(number, str) or not NUMBER.fullmatch(number):
        raise ValueError(f"finish() takes a notebook's number such as '1.1', got {number!r}")
    store = progress or Progress()
    with store.change() as data:
        data["notebooks"].setdefault(number, now())
    print(f"Notebook {number} is marked as read.")
