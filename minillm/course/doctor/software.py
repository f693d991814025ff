"""Python, packages, widgets and the model: what set-up should have left here."""

from __future__ import annotations

import importlib
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.course.doctor.finding import SET_UP, Finding, one_line

if TYPE_CHECKING:
    from packaging.requirements import Requirement

HEADLINES = ("torch", "transformers", "triton", "jupyterlab", "ipywidgets", "ipykernel")
# The lab extension draws the widgets; each major version of it fits one of ipywidgets and one of JupyterLab.
WIDGET_STACK = {"jupyterlab": 4, "ipywidgets": 8, "jupyterlab_widgets": 3}
WIDGET_EXTENSION = "@jupyter-widgets/jupyterlab-manager"


def check_python() -> Iterator[Finding]:
    version = platform.python_version()
    detail = f"{version} at {sys.executable}"
    try:
        needed = metadata.metadata("minillm")["Requires-Python"]
    except metadata.PackageNotFoundError:
        yield Finding("OK", "python", detail)
        yield Finding("FAIL", "minillm", "not installed in this Python", SET_UP)
        return
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(needed).contains(version, prereleases=True):
        yield Finding("OK", "python", detail)
    else:
        yield Finding("FAIL", "python", f"{detail}, but minillm needs {needed}", "make clean, then make setup PYTHON=python3.12")


def check_packages() -> Iterator[Finding]:
    """Versions against the ranges that minillm declares, and whether each package can be imported.

    An extra of which nothing is installed was not asked for; one that is there in part is a broken set-up.
    """
    for extra, requirements in declared_requirements().items():
        installed = {r.name: _version(r.name) for r in requirements}
        if extra and not any(installed.values()):
            yield Finding("WARN", f"[{extra}]", "not installed", SET_UP)
            continue
        quiet = 0
        for requirement in requirements:
            finding = _check_package(requirement, installed[requirement.name], may_import=extra != "test")
            if finding.status != "OK" or requirement.name in HEADLINES:
                yield finding
            else:
                quiet += 1
        if quiet:
            yield Finding("OK", f"[{extra}]" if extra else "others", f"{quiet} packages within their ranges")


def _check_package(requirement: Requirement, version: str | None, may_import: bool) -> Finding:
    name, needed = requirement.name, ", ".join(sorted(map(str, requirement.specifier), reverse=True)) or "any version"
    if version is None:
        return Finding("FAIL", name, f"not installed, needs {needed}", SET_UP)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("FAIL", name, f"{version}, needs {needed}", SET_UP)
    if may_import:
        try:
            importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken package may raise anything, SystemExit included
            return Finding("FAIL", name, f"{version} does not import: {one_line(error)}", "make clean, then make setup")
    return Finding("OK", name, f"{version} ({needed})")


def declared_requirements() -> dict[str, list[Requirement]]:
    """What minillm declares for this platform, by extra; "" is what everyone needs. Empty if minillm is not installed."""
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(text) for text in metadata.requires("minillm") or ()]
    except metadata.PackageNotFoundError:
        return {}
    groups: dict[str, list[Requirement]] = {}
    seen: set[str] = set()
    for extra in ("", "course", "test"):
        for requirement in declared:
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            if applies and str(requirement) not in seen:
                seen.add(str(requirement))
                groups.setdefault(extra, []).append(requirement)
    return groups


def check_widgets() -> Iterator[Finding]:
    """The sliders: Python packages and lab extension must fit each other, and be those of this environment."""
    versions = {name: _version(name) for name in WIDGET_STACK}
    if versions["jupyterlab"] is None:
        return  # no course here; check_packages has said so
    stack = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    fits = all(version and int(version.split(".")[0]) == WIDGET_STACK[name] for name, version in versions.items())
    if not fits:
        wanted = ", ".join(f"{name} {major}" for name, major in WIDGET_STACK.items())
        yield Finding("FAIL", "widgets", f"{stack}; these fit together: {wanted}", SET_UP)
        return
    extension = _widget_extension()
    if extension is None:
        remedy = "python -m pip install --force-reinstall --no-deps jupyterlab_widgets"
        yield Finding("FAIL", "widgets", f"{stack}, but JupyterLab finds no {WIDGET_EXTENSION}", remedy)
    elif not extension.is_relative_to(sys.prefix):
        remedy = f"remove {extension} if sliders stay blank"
        yield Finding("WARN", "widgets", f"{stack}, but JupyterLab takes the extension of another installation", remedy)
    else:
        yield Finding("OK", "widgets", stack)
    other = shutil.which("jupyter-lab")
    if other and not Path(other).is_relative_to(sys.prefix):
        yield Finding("WARN", "jupyter lab", f"on your path is another one: {other}", "start the course with `make lab`")


def _widget_extension() -> Path | None:
    """The folder from which JupyterLab takes the widgets' front end: the first on its search path."""
    from jupyter_core.paths import jupyter_path

    for folder in jupyter_path("labextensions"):
        package = Path(folder, WIDGET_EXTENSION, "package.json")
        try:
            json.loads(package.read_text(encoding="utf-8"))
            return package.parent
        except (OSError, ValueError):
            continue
    return None


def check_model() -> Iterator[Finding]:
    from minillm.model.fetch import status

    state, path = status()
    if state == "ok":
        yield Finding("OK", "model", str(path))
    else:
        yield Finding("FAIL", "model", f"{state}: {path}", "python -m minillm.model.fetch")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
