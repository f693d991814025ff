"""The Makefile's set-up, run with a stand-in for Python that writes down what it is asked to do and does nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAND_IN = """#!/bin/sh
printf '%s\\n' "$*" >> "$LOG"
case "$*" in
  '-c import sys'*) exec "$REAL" "$@" ;;
  '-m venv'*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
  *'pip install'*) exit "${PIP_STATUS:-0}" ;;
esac
"""


class Make:
    """A copy of the Makefile in a folder of its own, with a Python that does nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        self.python = folder / "python-stand-in"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run make; afterwards ``asked`` are the arguments of every Python that it started."""
        self.log.write_text("")
        # A make that started these tests must not hand its own settings down.
        env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "VENV", "PYTHON")}
        env |= {"LOG": str(self.log), "REAL": sys.executable, **environment}
        command = ["make", f"PYTHON={self.python}", *arguments]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=60)

    @property
    def asked(self) -> str:
        return self.log.read_text()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return Make(tmp_path)


def test_setup_makes_the_environment_installs_under_the_lock_and_fetches_the_model(make: Make) -> None:
    assert make("setup").returncode == 0
    assert "-m venv --clear .venv" in make.asked
    assert "-m pip install -c constraints.txt -e .[course,test]" in make.asked
    assert make.asked.splitlines()[-1] == "-m minillm.model.fetch"


def test_second_setup_installs_nothing_but_looks_after_the_model(make: Make) -> None:
    make("setup")
    assert make("setup").returncode == 0
    assert "pip install" not in make.asked and "venv" not in make.asked
    assert make.asked.splitlines()[-1] == "-m minillm.model.fetch"


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_into_the_same_environment(make: Make, name: str) -> None:
    make("setup")
    with (make.folder / name).open("a") as file:
        file.write("# changed\n")
    make("setup")
    assert "pip install" in make.asked and "venv" not in make.asked


def test_half_made_environment_is_made_anew(make: Make) -> None:
    failed = make("setup", PIP_STATUS="1")
    assert failed.returncode != 0 and "minillm.model.fetch" not in make.asked
    assert make("setup").returncode == 0
    assert "-m venv --clear .venv" in make.asked and "pip install" in make.asked


def test_environment_whose_update_failed_is_made_anew(make: Make) -> None:
    make("setup")
    with (make.folder / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert make("setup", PIP_STATUS="1").returncode != 0
    assert make("setup").returncode == 0
    assert "-m venv --clear .venv" in make.asked and "pip install" in make.asked


def test_environment_that_lost_its_python_is_made_anew(make: Make) -> None:
    make("setup")
    (make.folder / ".venv/bin/python").unlink()
    assert make("setup").returncode == 0
    assert "-m venv --clear .venv" in make.asked and "pip install" in make.asked


def test_moved_folder_gets_a_new_environment_because_scripts_hold_its_path(make: Make) -> None:
    make("setup")
    moved = make.folder / "moved"
    moved.mkdir()
    shutil.copytree(make.folder / ".venv", moved / ".venv")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.move(make.folder / name, moved)
    make.folder = moved
    make("setup")
    assert "-m venv --clear .venv" in make.asked


def test_torch_index_is_used_for_torch_alone_and_before_the_rest(make: Make) -> None:
    make("setup", "TORCH_INDEX=https://wheels.example/cpu")
    lines = [line for line in make.asked.splitlines() if "pip install" in line]
    assert lines == [
        "-m pip install --no-deps -c constraints.txt --index-url https://wheels.example/cpu torch",
        "-m pip install -c constraints.txt -e .[course,test]",
    ]


def test_python_that_is_too_old_is_refused_with_its_version_and_a_remedy(make: Make) -> None:
    old = make.folder / "python-old"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.version_info = (3, 9, 6); exec(sys.argv[1])" "$2"\n')
    old.chmod(0o755)
    result = make(f"PYTHON={old}", "setup")
    assert result.returncode != 0 and not (make.folder / ".venv").exists()
    assert "needs Python 3.11 or newer" in result.stderr and "3.9" in result.stderr and "make setup PYTHON=" in result.stderr


def test_missing_python_is_named(make: Make) -> None:
    result = make("PYTHON=python-of-nobody", "setup")
    assert result.returncode != 0 and "'python-of-nobody'" in result.stderr and "make setup PYTHON=" in result.stderr


@pytest.mark.parametrize("uid, allowed", [("0", True), ("1000", False)])
def test_only_root_starts_jupyterlab_as_root(make: Make, uid: str, allowed: bool) -> None:
    fake = make.folder / "bin"
    fake.mkdir()
    (fake / "id").write_text(f"#!/bin/sh\necho {uid}\n")
    (fake / "id").chmod(0o755)
    (make.folder / "assets").mkdir()
    shutil.copy(ROOT / "assets/jupyterlab.json", make.folder / "assets")
    result = make("lab", "PORT=9123", PATH=f"{fake}:{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr
    lab = make.asked.splitlines()[-1]
    assert ("--allow-root" in lab) == allowed
    assert "--port=9123" in lab and "default_url=/lab/tree/chapters/README.md" in lab and f"root_dir={make.folder}" in lab
    settings = json.loads((make.folder / ".venv/share/jupyter/lab/settings/overrides.json").read_text())
    assert settings["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"


def test_make_alone_lists_the_commands_and_starts_nothing(make: Make) -> None:
    result = make()
    assert result.returncode == 0 and make.asked == ""
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    listed = re.findall(r"^make ([\w-]+)", result.stdout, re.MULTILINE)
    assert set(targets) - {"help", "install"} == set(listed)
