"""A JupyterLab on loopback and a real Chromium: tests open a notebook, run it and use it as a learner does."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import nbformat
import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
WAIT_MS = 60_000  # a busy machine; an idle one needs a tenth


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


def need(found: Any, what: str) -> None:
    """Skip with a reason where the browser is missing; in CI that is a failure."""
    if not found and os.environ.get("CI"):
        pytest.fail(f"{what}; CI needs it")
    if not found:
        pytest.skip(what)


@dataclass
class Server:
    url: str
    token: str
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "lab.log").read_text(encoding="utf-8", errors="replace")

    def end_kernels(self) -> None:
        """Each holds a model or several: those of all lessons together are more than a small machine has room for."""
        for session in json.loads(self._ask("GET", "")):
            self._ask("DELETE", f"/{session['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/api/sessions{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    need(CHROMIUM, "no Chromium here (apt-get install chromium, or set CHROMIUM)")
    folder = tmp_path_factory.mktemp("lab")
    news = folder / ".settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')  # no pop-up in the pictures
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    # The kernel must not take itself for a test run, and must not touch anybody's progress or settings.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "JUPYTER", "MINILLM_HEADLESS"))}
    env.update(
        MINILLM_PROGRESS_DIR=str(folder / ".progress"), IPYTHONDIR=str(folder / ".ipython"),
        PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **{f"JUPYTER_{k}_DIR": str(folder / f".{k.lower()}") for k in ("CONFIG", "DATA", "RUNTIME")},
        **{f"JUPYTERLAB_{k}_DIR": str(folder / f".{k.lower()}") for k in ("SETTINGS", "WORKSPACES")},
    )  # fmt: skip
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.extension_manager=readonly",
    ]  # fmt: skip
    with open(folder / "lab.log", "w") as log:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    made = Server(f"http://127.0.0.1:{port}", token, folder)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{made.url}/api/status?token={token}", timeout=1)
                break
            if process.poll() is not None:
                pytest.fail(f"JupyterLab ended:\n{made.log}")
            time.sleep(0.1)
        else:
            pytest.fail(f"JupyterLab did not start:\n{made.log}")
        yield made
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # our own process group
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    need(CHROMIUM, "no Chromium here (apt-get install chromium, or set CHROMIUM)")
    need(importlib.util.find_spec("playwright"), "no playwright here (pip install playwright; it needs no browser of its own)")
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        profile = str(tmp_path_factory.mktemp("profile"))
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=FLAGS, viewport={"width": 1280, "height": 1000},
        )  # fmt: skip
        context.set_default_timeout(WAIT_MS)
        sync_api.expect.set_options(timeout=WAIT_MS)
        yield context
        context.close()


class Notebook:
    """One notebook, open in JupyterLab."""

    def __init__(self, page: Any, server: Server, name: str) -> None:
        self.page, self.path = page, server.folder / name
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(f"{server.url}/lab/tree/{name}?reset&token={server.token}")
        page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook").wait_for()

    def idle(self) -> None:
        """Wait for the kernel. The toolbar's indicator says idle before there is one; the status bar does not."""
        self.page.locator("#jp-main-statusbar").get_by_text(re.compile(r"\| Idle")).wait_for()

    def run_all(self) -> None:
        self.idle()
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.locator('.lm-Menu [data-command="runmenu:run-all"]').click()

    def cell(self, text: str) -> Any:
        """The code cell that contains this text, scrolled into view: cells far below are put into the page only then."""
        found = self.page.locator(".jp-CodeCell", has_text=text).first
        for _ in range(60):
            self.page.locator(".jp-NotebookPanel .jp-WindowedPanel-outer").first.evaluate("e => e.scrollBy(0, 600)")
            if found.count():
                break
            self.page.wait_for_timeout(100)
        found.scroll_into_view_if_needed()
        return found

    def press(self, panel: Any, key: str, slider: int = 0, times: int = 1) -> None:
        """Move a slider of a panel by a key, as often as asked."""
        handle = panel.locator(".noUi-handle").nth(slider)
        handle.scroll_into_view_if_needed()
        handle.focus()
        for _ in range(times):
            self.page.keyboard.press(key)

    def found(self, locator: Any, pattern: str, timeout_ms: int) -> str:
        """What matches in the text of a locator, once it does, on the screen or off it: there inner_text is empty."""
        deadline = time.monotonic() + timeout_ms / 1000
        while (match := re.search(pattern, locator.text_content(timeout=timeout_ms))) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {pattern!r} in {locator.text_content()!r:.200}")
            self.page.wait_for_timeout(200)
        return match.group()

    def saved(self, executed: bool = True) -> Any:
        """Save, and read the file when every cell has run: cells off the screen are not in the page."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while True:
            self.page.keyboard.press("Control+s")
            self.page.wait_for_timeout(300)
            notebook = nbformat.read(self.path, as_version=4)
            if not executed or all(c.execution_count for c in notebook.cells if c.cell_type == "code"):
                return notebook
            if time.monotonic() > deadline:
                raise TimeoutError("not every cell ran")

    def screenshot(self, name: str) -> Path:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")
        return SCREENSHOTS / f"{name}.png"


@pytest.fixture
def open_notebook(server: Server, browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """``open_notebook("name.ipynb", [sources])`` writes a notebook into the server's folder and opens it; a Path is copied."""
    opened: list[Notebook] = []
    shutil.rmtree(server.folder / ".progress", ignore_errors=True)  # every test is a learner who has seen nothing yet

    def opener(name: str, cells: list[str] | Path) -> Notebook:
        target = server.folder / name
        if isinstance(cells, Path):
            shutil.copy(cells, target)
        else:
            made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
            made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
            nbformat.write(made, target)
        opened.append(Notebook(browser.new_page(), server, name))
        return opened[-1]

    failed_before = request.session.testsfailed
    yield opener
    for notebook in opened:
        if request.session.testsfailed > failed_before:
            notebook.screenshot(f"{request.node.name}_failed")
        notebook.page.close()
    server.end_kernels()
