from __future__ import annotations

from pathlib import Path

import pytest

from minillm.course import session


class Kernel:
    def __init__(self, content):
        self.content = content

    def get_parent(self, channel):
        if isinstance(self.content, Exception):
            raise self.content
        return {"content": self.content}


@pytest.fixture
def outside_pytest(monkeypatch):
    """Call it inside the test: pytest sets its variable again after the fixtures."""

    def leave():
        for name in ("PYTEST_VERSION", "PYTEST_CURRENT_TEST", "MINILLM_HEADLESS", "MINILLM_PROGRESS_DIR"):
            monkeypatch.delenv(name, raising=False)

    return leave


@pytest.mark.parametrize(
    ("content", "headless"),
    [
        ({"allow_stdin": True}, False),
        ({"allow_stdin": False}, True),
        ({"comm_id": "a slider moved"}, False),
        (LookupError(), False),
    ],
)
def test_a_kernel_is_headless_when_the_sender_of_the_cell_cannot_answer(outside_pytest, monkeypatch, content, headless):
    outside_pytest()
    monkeypatch.setattr(session, "kernel", lambda: Kernel(content))
    assert session.headless() is headless


def test_no_kernel_and_a_test_run_are_headless(outside_pytest, monkeypatch):
    outside_pytest()
    assert session.headless()
    monkeypatch.setattr(session, "kernel", lambda: Kernel({"allow_stdin": True}))
    monkeypatch.setenv("PYTEST_VERSION", "9")
    assert session.headless()
    monkeypatch.setenv("MINILLM_HEADLESS", "0")
    assert not session.headless()
    monkeypatch.setenv("MINILLM_HEADLESS", "1")
    monkeypatch.delenv("PYTEST_VERSION")
    assert session.headless()


def test_a_headless_kernel_never_writes_into_the_learners_folder(outside_pytest, monkeypatch, tmp_path):
    outside_pytest()
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    assert session.data_dir() == tmp_path
    monkeypatch.setattr(session, "kernel", lambda: Kernel({"allow_stdin": False}))
    assert session.data_dir() != tmp_path and session.data_dir() == session.data_dir()
    monkeypatch.setenv("MINILLM_PROGRESS_DIR", str(tmp_path / "explicit"))
    assert session.data_dir() == tmp_path / "explicit"


def test_a_test_run_never_writes_into_the_learners_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("MINILLM_PROGRESS_DIR")
    monkeypatch.delenv("MINILLM_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path not in session.data_dir().parents
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    assert session.data_dir() == tmp_path


def test_the_default_folder_follows_the_desktop_rule(outside_pytest, monkeypatch, tmp_path):
    outside_pytest()
    monkeypatch.delenv("MINILLM_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert session.data_dir() == tmp_path / ".local" / "share" / "minillm"
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/invalid")
    assert session.data_dir() == tmp_path / ".local" / "share" / "minillm"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert session.data_dir() == tmp_path / "data" / "minillm"


def test_notebooks_are_numbered_by_their_folders_and_names(tmp_path):
    for name in (
        "10_last/1_a.ipynb",
        "1_skip/2_b.ipynb",
        "1_skip/1_a.ipynb",
        "1_skip/.ipynb_checkpoints/1_a.ipynb",
        "notes/x.ipynb",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [session.notebook_number(p) for p in session.notebooks(tmp_path)] == ["1.1", "1.2", "10.1"]
    assert session.find_notebook(tmp_path, "1.2").name == "2_b.ipynb"
    with pytest.raises(ValueError, match="there are 1.1, 1.2, 10.1"):
        session.find_notebook(tmp_path, "9.9")
    with pytest.raises(ValueError, match="named like"):
        session.notebook_number(Path("skip/a.ipynb"))


def test_the_course_is_found_from_inside_and_not_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "chapters" / "1_skip").mkdir(parents=True)
    (tmp_path / "solutions").mkdir()
    assert session.course_root(tmp_path / "chapters" / "1_skip") == tmp_path
    monkeypatch.setattr(session.minillm, "__file__", str(tmp_path / "nowhere" / "minillm" / "__init__.py"))
    assert session.course_root(tmp_path.parent) is None


def test_importing_the_checks_and_the_status_needs_no_jupyter():
    import subprocess
    import sys

    code = (
        "import sys; import minillm.course.checks, minillm.course.status, minillm.course.predictions, minillm.course.mine\n"
        "bad = {'ipywidgets', 'IPython', 'nbformat', 'nbclient', 'matplotlib'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
