"""Where the course runs: with a learner in front of it or without, where its files lie, and how its notebooks are numbered."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import minillm


def kernel() -> Any:
    """The running Jupyter kernel, or None. Imports nothing: without IPython there is no kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None)


def headless() -> bool:
    """True when nobody can move a slider: no kernel, a test run, or a runner such as nbval, nbclient or nbconvert.

    ``MINILLM_HEADLESS=1`` or ``0`` decides by hand. Otherwise a kernel is asked whether the sender of the running cell
    can answer questions (``allow_stdin``): every front end with a person in front of it says yes, every runner says no.
    """
    if os.environ.get("MINILLM_HEADLESS") == "0":
        return False
    if _by_hand():
        return True
    running = kernel()
    if running is None:
        return True
    try:
        content = running.get_parent("shell").get("content", {})
    except (AttributeError, LookupError, TypeError):
        return False
    return not content.get("allow_stdin", True)


def _by_hand() -> bool:
    """Whether the environment says that this is a run without a learner."""
    flag = os.environ.get("MINILLM_HEADLESS", "")
    return flag not in ("", "0") or "PYTEST_VERSION" in os.environ or "PYTEST_CURRENT_TEST" in os.environ


@functools.cache
def _scratch() -> Path:
    """A folder that lives as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="minillm-headless-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def data_dir() -> Path:
    """The folder of the learner's progress: ``$MINILLM_HOME``, else the user's data folder (``~/.local/share/minillm``).

    A kernel without a front end, and any test run that names no home, gets a throw-away folder: running the solutions
    never marks the learner's tasks as done. ``$MINILLM_PROGRESS_DIR`` overrides all of this.
    """
    if explicit := os.environ.get("MINILLM_PROGRESS_DIR"):
        return Path(explicit).expanduser()
    home = os.environ.get("MINILLM_HOME")
    if headless() and (kernel() is not None or (_by_hand() and not home)):
        return _scratch()
    if home:
        return Path(home).expanduser()
    shared = os.environ.get("XDG_DATA_HOME", "")
    # the XDG rule: a relative path there is invalid and must be ignored
    return (Path(shared) if Path(shared).is_absolute() else Path.home() / ".local" / "share") / "minillm"


def course_root(start: Path | None = None) -> Path | None:
    """The folder that holds chapters/ and solutions/: above the working folder, else beside the package; None if neither."""
    here = (start or Path.cwd()).resolve()
    package = Path(minillm.__file__).resolve().parent
    for folder in (here, *here.parents, package.parent):
        if (folder / "chapters").is_dir() and (folder / "solutions").is_dir():
            return folder
    return None


def notebook_number(path: Path) -> str:
    """"1.2" for 1_skip/2_prefix_cache.ipynb. ValueError for a path that is not named like that."""
    match = re.fullmatch(r"(\d+)_[^/]+/(\d+)_[^/]+\.ipynb", "/".join(path.parts[-2:]))
    if not match:
        raise ValueError(f"{path}: a course notebook is named like 1_skip/2_prefix_cache.ipynb")
    return f"{match[1]}.{match[2]}"


def notebooks(folder: Path) -> list[Path]:
    """The notebooks of chapters/, solutions/ or exercises/ in course order; Jupyter's checkpoints are not among them."""
    found = [p for p in folder.glob("*/*.ipynb") if re.match(r"\d+_", p.parent.name)]
    return sorted(found, key=lambda p: [int(n) for n in notebook_number(p).split(".")])


def find_notebook(folder: Path, number: str) -> Path:
    """The notebook with this number. ValueError names the numbers that exist."""
    by_number = {notebook_number(p): p for p in notebooks(folder)}
    if number not in by_number:
        raise ValueError(f"no notebook {number!r} in {folder}; there are {', '.join(by_number) or 'none'}")
    return by_number[number]
