from __future__ import annotations

import json
import multiprocessing
import warnings
from pathlib import Path

import filelock
import pytest

from minillm.course import progress as progress_module
from minillm.course.progress import Progress, ProgressError, finish


def test_a_change_is_kept_and_read_by_another_session(store):
    with store.change() as data:
        data["notebooks"]["0.1"] = "today"
    assert Progress(store.folder).read()["notebooks"] == {"0.1": "today"}


def test_reading_before_anything_is_kept_makes_no_folder(store):
    assert store.read() == {"predictions": {}, "checks": {}, "notebooks": {}, "parts": {}}
    assert not store.folder.exists()


def test_an_exception_inside_a_change_changes_nothing(store):
    with store.change() as data:
        data["notebooks"]["0.1"] = "a"
    with pytest.raises(KeyError), store.change() as data:
        data["notebooks"].clear()
        raise KeyError
    assert store.read()["notebooks"] == {"0.1": "a"}


BROKEN = [
    b"", b"{", b'{"checks": {', b"[1]", b'{"checks": []}', b"\xff\xfe", b"null",
    b'{"checks": {"1.1 core": 3}}', b'{"checks": {"1.1 core": {"attempts": "two"}}}',
    b'{"checks": {"1.1 core": {"hints": ["a"]}}}',
    b'{"parts": {"1.1 core": {"name": "f"}}}', b'{"predictions": {"0.1 ridge": 40}}',
    b'{"predictions": {"0.1 ridge": {"value": "4"}}}',
    b'{"badges": ' + b"[" * 100 + b"]" * 100 + b"}", b"[" * 200_000, b'{"notebooks": {"0.1": "\\ud800"}}',
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda text: repr(text[:50]))
def test_a_broken_file_is_kept_aside_and_a_fresh_one_begins(store, broken):
    store.folder.mkdir()
    store.path.write_bytes(broken)
    with pytest.warns(UserWarning, match=r"progress.json.broken and a fresh one"), store.change() as data:
        data["notebooks"]["0.1"] = "a"
    assert store.path.with_name("progress.json.broken").read_bytes() == broken
    store.path.write_bytes(b"second")
    with pytest.warns(UserWarning, match=r"broken-2"):
        store.read()
    assert store.path.with_name("progress.json.broken").read_bytes() == broken
    assert store.path.with_name("progress.json.broken-2").read_bytes() == b"second"


def test_what_a_newer_version_wrote_survives(store):
    store.folder.mkdir()
    store.path.write_text('{"version": 7, "badges": [1], "notebooks": {"0.1": "a"}}')
    with store.change() as data:
        data["notebooks"]["0.2"] = "b"
    kept = json.loads(store.path.read_text())
    assert kept["badges"] == [1] and kept["version"] == 7 and kept["notebooks"] == {"0.1": "a", "0.2": "b"}


def test_a_crash_while_writing_leaves_the_old_content(store, monkeypatch):
    with store.change() as data:
        data["notebooks"]["0.1"] = "a"
    monkeypatch.setattr(progress_module.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"), store.change() as data:
        data["notebooks"]["0.2"] = "b"
    assert store.read()["notebooks"] == {"0.1": "a"}
    assert sorted(p.name for p in store.folder.iterdir()) in (["progress.json"], ["progress.json", "progress.lock"])


def _count_up(folder: Path, times: int) -> None:
    for _ in range(times):
        with Progress(folder).change() as data:
            data["notebooks"]["n"] = data["notebooks"].get("n", 0) + 1


def test_two_notebooks_at_once_lose_nothing(store):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count_up, args=(store.folder, 40)) for _ in range(3)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.read()["notebooks"]["n"] == 120


def test_a_folder_that_cannot_be_written_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ProgressError, match="set MINILLM_HOME to a folder that you can write"),
        Progress(tmp_path / "file" / "x").change(),
    ):
        pass


def test_a_lock_held_by_another_program_is_reported(store, monkeypatch):
    monkeypatch.setattr(progress_module, "LOCK_SECONDS", 0.2)
    store.folder.mkdir()
    with filelock.FileLock(store.path.with_suffix(".lock")), pytest.raises(ProgressError, match="in use by another program"):
        store.read()


def test_finishing_a_notebook_keeps_the_first_time(store, capsys):
    finish("0.1", store)
    first = store.read()["notebooks"]["0.1"]
    finish("0.1", store)
    assert store.read()["notebooks"] == {"0.1": first}
    assert "Notebook 0.1 is marked as read." in capsys.readouterr().out


def test_a_folder_in_the_files_place_is_kept_aside(store):
    (store.path / "inside").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"\(a folder\); it is kept as"), store.change() as data:
        data["notebooks"]["0.1"] = "a"
    assert store.path.is_file() and (store.path.with_name("progress.json.broken") / "inside").is_dir()


@pytest.mark.parametrize("number", ["zzz", "1", "1.1 core", 1.1, None])
def test_finishing_what_is_no_notebook_is_refused(store, number):
    with pytest.raises(ValueError, match="number such as '1.1', got"):
        finish(number, store)
    assert not store.folder.exists()
