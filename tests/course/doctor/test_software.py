"""Python, packages, widgets and model: each fault is named, with a remedy."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import minillm.model.fetch
from minillm.course.doctor import software

Install = Callable[..., None]
Report = Callable[..., tuple[int, str]]
LineWith = Callable[[str, str], str]


def test_python_below_the_declared_one_fails(report: Report, line_with: LineWith, install: Install) -> None:
    install("minillm", "0.1.0", python=">=3.99")
    code, text = report(software.check_python)
    assert code == 1 and ">=3.99" in line_with(text, "python") and "do: make clean" in text


def test_package_within_its_range_is_fine_and_is_imported(report: Report, install: Install, tmp_path: Path) -> None:
    install("minillm", "0.1.0", requires=("calm>=2",))
    install("calm", "2.1", source=f"open({str(tmp_path / 'imported')!r}, 'w')")
    code, text = report(software.check_packages)
    assert code == 0 and "1 packages within their ranges" in text and (tmp_path / "imported").exists()


def test_wrong_version_fails_with_both_numbers(report: Report, line_with: LineWith, install: Install) -> None:
    install("minillm", "0.1.0", requires=("torch<2.14,>=2.11",))
    install("torch", "2.1.0+cu118")
    code, text = report(software.check_packages)
    assert code == 1 and "2.1.0+cu118, needs >=2.11, <2.14" in line_with(text, "torch") and "make setup" in text


def test_local_build_and_prerelease_of_an_allowed_version_are_fine(report: Report, install: Install) -> None:
    install("minillm", "0.1.0", requires=("calm<3,>=2", "eager<3,>=2"))
    install("calm", "2.13.0+cpu", source="")
    install("eager", "2.9rc1", source="")
    assert report(software.check_packages)[0] == 0


def test_missing_package_fails(report: Report, line_with: LineWith, install: Install) -> None:
    install("minillm", "0.1.0", requires=("gone_package>=1",))
    code, text = report(software.check_packages)
    assert code == 1 and "not installed, needs >=1" in line_with(text, "gone_package")


@pytest.mark.parametrize("source, said", [
    ("raise OSError('libcuda.so.1: cannot open')", "OSError: libcuda.so.1"),
    ("raise SystemExit('bad build')", "SystemExit: bad build"),
    ("class Odd(BaseException): pass\nraise Odd", "Odd"),
    ("def half(:", "SyntaxError"),
])
def test_package_whose_import_raises_something_odd_fails_by_name(
    report: Report, line_with: LineWith, install: Install, source: str, said: str
) -> None:
    name = f"odd_{abs(hash(source))}"  # a module that failed once is not cached, but its finder's listing may be
    install("minillm", "0.1.0", requires=(f"{name}>=1",))
    install(name, "1.0", source=source)
    code, text = report(software.check_packages)
    assert code == 1 and f"1.0 does not import: {said}" in line_with(text, name)


def test_requirement_for_another_platform_is_not_missed(report: Report, install: Install) -> None:
    install("minillm", "0.1.0", requires=("elsewhere>=1; sys_platform == 'amiga'",))
    assert report(software.check_packages)[0] == 0


def test_extra_of_which_nothing_is_installed_is_a_warning_and_one_in_part_a_failure(
    report: Report, line_with: LineWith, install: Install
) -> None:
    install("minillm", "0.1.0", requires=('gone_a>=1; extra == "course"', 'here_b>=1; extra == "course"'))
    assert report(software.check_packages)[0] == 0
    install("here_b", "1.0", source="")
    code, text = report(software.check_packages)
    assert code == 1 and "not installed" in line_with(text, "gone_a")


def test_minillm_that_is_not_installed_fails(report: Report, line_with: LineWith, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    code, text = report(software.check_python)
    assert code == 1 and "not installed" in line_with(text, "minillm")


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lab extension of this environment, with versions that fit; JupyterLab looks nowhere else."""
    folder = tmp_path / "prefix/share/jupyter/labextensions"
    package = folder / software.WIDGET_EXTENSION
    package.mkdir(parents=True)
    package.joinpath("package.json").write_text(json.dumps({"name": software.WIDGET_EXTENSION}))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *_: [str(tmp_path / "nowhere"), str(folder)])
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    set_versions(monkeypatch)
    return package


def set_versions(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    versions = {"jupyterlab": "4.6.6", "ipywidgets": "8.1.9", "jupyterlab_widgets": "3.0.17", **changed}
    monkeypatch.setattr(software, "_version", versions.get)


def test_widgets_that_fit_are_fine(report: Report, extension: Path) -> None:
    code, text = report(software.check_widgets)
    assert code == 0 and text.startswith("OK    widgets") and "WARN" not in text


@pytest.mark.parametrize("name, version", [
    ("ipywidgets", None), ("jupyterlab_widgets", None),
    ("ipywidgets", "7.8.1"), ("jupyterlab_widgets", "1.1.7"), ("jupyterlab", "3.6.8"),
])
def test_widgets_that_are_missing_or_do_not_fit_their_jupyterlab_fail(
    report: Report, extension: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str | None
) -> None:
    set_versions(monkeypatch, **{name: version})
    code, text = report(software.check_widgets)
    assert code == 1 and f"{name} {version or 'missing'}" in text and "jupyterlab 4, ipywidgets 8, jupyterlab_widgets 3" in text


def test_missing_lab_extension_fails_though_all_packages_are_there(report: Report, line_with: LineWith, extension: Path) -> None:
    shutil.rmtree(extension)
    code, text = report(software.check_widgets)
    assert code == 1 and software.WIDGET_EXTENSION in line_with(text, "widgets")


def test_lab_extension_of_another_installation_is_a_warning(
    report: Report, extension: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(extension / "elsewhere"))
    code, text = report(software.check_widgets)
    assert code == 0 and text.startswith("WARN  widgets") and str(extension) in text


def test_another_jupyterlab_first_on_the_path_is_a_warning(
    report: Report, line_with: LineWith, extension: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_: "/opt/other/bin/jupyter-lab")
    code, text = report(software.check_widgets)
    assert code == 0 and "/opt/other/bin/jupyter-lab" in line_with(text, "jupyter lab") and "make lab" in text


def test_machine_without_jupyterlab_has_no_widget_lines(report: Report, extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_versions(monkeypatch, jupyterlab=None)
    assert report(software.check_widgets)[1].count("\n") == 1


@pytest.mark.parametrize("state, code", [("ok", 0), ("missing", 1), ("damaged", 1)])
def test_missing_or_damaged_model_fails_and_names_the_command(
    report: Report, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    monkeypatch.setattr(minillm.model.fetch, "status", lambda: (state, Path("/models/file.gguf")))
    got, text = report(software.check_model)
    assert got == code and "/models/file.gguf" in text
    assert ("do: python -m minillm.model.fetch" in text) == (code == 1)
