"""What is installed is stated once, and what was tested is locked."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())


def requirements() -> list[Requirement]:
    return [Requirement(text) for group in (PROJECT["dependencies"], *EXTRAS.values()) for text in group]


def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line) for line in lines]
    assert all(pins), f"not a plain pin: {[line for line, pin in zip(lines, pins, strict=True) if not pin]}"
    names = {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}
    assert len(names) == len(lines), "a package is pinned twice"
    return names


# --- one place for each dependency


def test_environment_file_holds_python_pip_and_this_package_and_nothing_else() -> None:
    assert set(ENVIRONMENT) == {"name", "channels", "dependencies"} and ENVIRONMENT["name"] == "minillm"
    conda = [entry for entry in ENVIRONMENT["dependencies"] if isinstance(entry, str)]
    by_pip = [entry for entry in ENVIRONMENT["dependencies"] if not isinstance(entry, str)]
    assert [re.split(r"[=<>! ]", entry)[0] for entry in conda] == ["python", "pip"]
    assert by_pip == [{"pip": ["-e .[course,test]"]}]
    assert {"course", "test"} == set(EXTRAS)


def test_environment_file_asks_for_a_python_that_the_package_accepts() -> None:
    python = next(entry for entry in ENVIRONMENT["dependencies"] if str(entry).startswith("python"))
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.split("=")[-1])


def test_each_dependency_is_stated_once() -> None:
    names = [canonicalize_name(requirement.name) for requirement in requirements()]
    assert sorted(names) == sorted(set(names))


def test_triton_is_asked_for_on_linux_only() -> None:
    triton = next(requirement for requirement in requirements() if requirement.name == "triton")
    assert triton.marker is not None
    on = {(os_, cpu): triton.marker.evaluate({"sys_platform": os_, "platform_machine": cpu})
          for os_ in ("linux", "darwin", "win32") for cpu in ("x86_64", "aarch64", "arm64", "AMD64")}
    assert {where for where, wanted in on.items() if wanted} == {("linux", "x86_64"), ("linux", "aarch64")}


# --- the lock


def test_lock_pins_everything_that_is_asked_for_within_its_range() -> None:
    pins = locked()
    assert "minillm" not in pins and "pip" not in pins
    for requirement in requirements():
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow the locked {version}"


def test_locked_triton_is_the_one_that_the_cuda_build_of_the_locked_torch_insists_on() -> None:
    pins = locked()
    # torch's own metadata; its CPU build, which CI installs, would let any other pair through
    insists = {"2.11.0": "3.6.0", "2.13.0": "3.7.1"}
    assert pins["triton"] == insists[pins["torch"]]


def test_lock_says_when_where_and_how_it_was_made() -> None:
    head = "\n".join((ROOT / "constraints.txt").read_text().splitlines()[:2])
    assert re.search(r"\d{4}-\d\d-\d\d: Python 3\.\d+\.\d+, \w+ \w+", head) and "make lock" in head


@pytest.mark.skipif(not Path(sys.prefix, ".set-up").exists(), reason="not the environment that `make setup` makes")
def test_what_runs_here_is_what_was_locked() -> None:
    # only what pip installed: setuptools puts its private copies on sys.path as soon as anything imports it
    found = importlib.metadata.distributions(path=[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    installed = {canonicalize_name(d.metadata["Name"]): Version(d.version).public for d in found}
    assert {name: installed.get(name, pin) for name, pin in locked().items()} == locked()


# --- the package


def imported(folder: Path) -> set[str]:
    """Top-level names that the Python files of a folder import, at any depth."""
    names: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"minillm"}


@pytest.mark.parametrize("folder, groups", [("minillm", ("course",)), ("tests", ("course", "test"))])
def test_what_is_imported_is_declared(folder: str, groups: tuple[str, ...]) -> None:
    texts = [*PROJECT["dependencies"], *(text for group in groups for text in EXTRAS[group])]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    owners = importlib.metadata.packages_distributions()
    peers = imported(ROOT / "minillm/bench/workers")  # the benchmark starts each of them in an environment of its own
    unknown = {name for name in imported(ROOT / folder) - peers
               if not declared & {canonicalize_name(owner) for owner in owners.get(name, [name])}}
    with_jupyterlab = {"IPython", "traitlets", "jupyter_core"}  # parts of it and of its kernel, never there without
    assert not unknown - with_jupyterlab


@pytest.mark.slow
def test_wheel_holds_the_package_with_its_types_and_licence_and_no_tests(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "minillm", source / "minillm", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    shutil.copy(__file__, source / "tests")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = tmp_path.glob("minillm-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"minillm", wheel.name.split("-py3")[0] + ".dist-info"}
    package = {str(file.relative_to(source)) for file in (source / "minillm").rglob("*") if file.is_file()}
    assert package <= set(names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
