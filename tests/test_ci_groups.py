"""CI's test groups: what they run, what they count, when they stop."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def groups() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("groups", ROOT / ".ci/groups.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["groups"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["groups"]


def run_groups(groups: ModuleType, root: Path, *arguments: str) -> tuple[int, str]:
    status = groups.main(list(arguments), root=root)
    return status, (root / "build/tests/summary.txt").read_text().strip()


def write_test(root: Path, name: str, body: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(body)


@pytest.mark.slow
def test_counts_are_summed_over_groups_and_errors_count_as_failed(groups: ModuleType, tmp_path: Path) -> None:
    write_test(tmp_path, "tests/test_a.py", "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip()\n")
    write_test(tmp_path, "tests/test_c.py", "import no_such_package\n")
    write_test(tmp_path, "tests/browser/test_d.py", "def test_d(): assert 1 == 2\n")
    assert run_groups(groups, tmp_path) == (1, "1 passed, 2 failed, 1 skipped")


@pytest.mark.slow
def test_group_without_files_is_not_run_and_a_green_run_exits_with_0(
    groups: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_test(tmp_path, "tests/test_a.py", "def test_a(): pass\n")
    (tmp_path / "tests/browser").mkdir()
    assert run_groups(groups, tmp_path) == (0, "1 passed, 0 failed, 0 skipped")
    out = capfd.readouterr().out
    assert re.search(r"browser +no files yet", out) and out.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"


def test_nothing_ran_is_a_failure(groups: ModuleType, tmp_path: Path) -> None:
    assert run_groups(groups, tmp_path) == (1, "0 passed, 0 failed, 0 skipped")


@pytest.mark.slow
def test_notebook_with_a_wrong_saved_output_fails_its_group(groups: ModuleType, tmp_path: Path) -> None:
    nb = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})
    for source, saved in (("print(1 + 1)", "2\n"), ("print(2 + 2)", "5\n")):
        output = nbformat.v4.new_output("stream", name="stdout", text=saved)
        nb.cells.append(nbformat.v4.new_code_cell(source, execution_count=len(nb.cells) + 1, outputs=[output]))
    (tmp_path / "chapters").mkdir()
    nbformat.write(nb, tmp_path / "chapters/one.ipynb")
    assert run_groups(groups, tmp_path, "notebooks") == (1, "1 passed, 1 failed, 0 skipped")


@pytest.mark.slow
def test_group_that_hangs_is_ended_and_counts_as_failed(
    groups: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_test(tmp_path, "tests/browser/test_a.py", "import time\ndef test_a(): time.sleep(60)\n")
    monkeypatch.setattr(groups, "GROUPS", (groups.Group("browser", ("tests/browser",), budget=2),))
    assert run_groups(groups, tmp_path) == (1, "0 passed, 1 failed, 0 skipped")


@pytest.mark.slow
def test_fast_run_leaves_out_slow_tests_and_those_that_need_the_model(groups: ModuleType, tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    body = "import pytest\ndef test_a(): pass\n@pytest.mark.slow\ndef test_b(): pass\n@pytest.mark.model\ndef test_c(): pass\n"
    write_test(tmp_path, "tests/test_a.py", body)
    write_test(tmp_path, "tests/browser/test_d.py", "def test_d(): pass\n")
    assert run_groups(groups, tmp_path, "--fast") == (0, "1 passed, 0 failed, 0 skipped")


def test_all_groups_together_end_within_cis_40_minutes(groups: ModuleType) -> None:
    set_up_and_lint = 300
    assert set_up_and_lint + groups.PATIENCE * sum(group.budget for group in groups.GROUPS) <= 2400


def test_every_folder_of_tests_with_files_belongs_to_exactly_one_group(groups: ModuleType) -> None:
    own = [path for group in groups.GROUPS for path in group.paths if path.startswith("tests/")]
    assert len(own) == len(set(own))
    assert {f"tests/{name}" for name in groups.OTHERS} - {"tests/gpu"} == set(own)
