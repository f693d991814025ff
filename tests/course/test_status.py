from __future__ import annotations

import argparse

import pytest

from minillm.course import mine
from minillm.course import status as status_module
from minillm.course.checks import CheckFailed, check
from minillm.course.predictions import predict, reveal
from minillm.course.progress import finish
from minillm.course.status import add_course_arguments, run_course, status

from .toy import TOY, WRONG, solution


@pytest.fixture
def course(tmp_path, monkeypatch):
    for name in ("0_bottleneck/1_roofline", "1_skip/1_kv_cache", "1_skip/2_prefix_cache"):
        for part in ("chapters", "solutions"):
            path = tmp_path / part / f"{name}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    monkeypatch.setattr(status_module, "all_tasks", lambda: (TOY,))
    monkeypatch.setattr(mine, "all_tasks", lambda: (TOY,))
    return tmp_path


def test_a_newcomer_is_told_what_to_do_first(store, course):
    text = status(store, course)
    assert "Notebooks: 0 of 3 read" in text and "Next: chapters/0_bottleneck/1_roofline.ipynb" in text
    assert "  1.1  kv cache      -     core open" in text and "  0.1  roofline" in text
    assert "Your engine: 0 of 1 room is yours\n  adder  minillm" in text and "Predictions" not in text


def test_the_state_is_shown_after_some_work(store, course, front_end, capsys):
    finish("0.1", store)
    for id, guess, measured in (("0.1 ridge", 40, 20), ("1.1 speed-up", 10, 90)):
        p = predict(id, "?", "FLOP/B", reference=1, progress=store)
        p.commit(guess)
        reveal(p, measured)
    predict("1.1 open", "?", "s", reference=1, progress=store).commit(3)
    with pytest.raises(CheckFailed):
        check(TOY, WRONG[3][0], progress=store)
    text = status(store, course)
    assert "core red at 'exact: three by hand'" in text
    check(TOY, solution, progress=store)
    text = status(store, course)
    assert "Notebooks: 1 of 3 read" in text and "  0.1  roofline      read" in text and "core green" in text
    assert "Next: chapters/1_skip/1_kv_cache.ipynb" in text
    assert "0.1 ridge: you 40, measured 20 FLOP/B. That is 2 times too high." in text
    assert "1.1 open: 3 s, not measured yet" in text
    assert "Typically off by ×5.5 (chapter 0 ×2, chapter 1 ×9); 1 of 2 within a factor of 2." in text
    assert "Your engine: 1 of 1 room is yours\n  adder  yours (1.1 core, solution)" in text
    assert str(store.path) in text


def test_status_without_a_course_folder_still_works(store, monkeypatch):
    monkeypatch.setattr(status_module, "course_root", lambda: None)
    monkeypatch.setattr(status_module, "all_tasks", lambda: ())
    monkeypatch.setattr(mine, "all_tasks", lambda: ())
    assert "Nothing read yet" in status(store)
    with store.change() as data:
        data["checks"]["3.1 core"] = {"green": "x"}
    assert "  3.1    -     core green" in status(store)


def run(*argv):
    parser = argparse.ArgumentParser()
    add_course_arguments(parser.add_subparsers())
    args = parser.parse_args(["course", *argv])
    return args.run(args)


def test_the_command_line_prints_the_status_and_tells_errors_plainly(course, monkeypatch, capsys):
    monkeypatch.chdir(course)
    assert run("status") == 0 and "Notebooks: 0 of 3 read" in capsys.readouterr().out
    assert run("reset", "7.7") == 1
    assert capsys.readouterr().err == f"minillm course reset: no notebook '7.7' in {course}/solutions; there are 0.1, 1.1, 1.2\n"
    with pytest.raises(SystemExit):
        run()
    assert run_course(argparse.Namespace(course_command="status")) == 0


def test_entries_that_are_no_notebook_or_task_are_passed_over(store, course):
    with store.change() as data:
        data["notebooks"].update({"zzz": "x", "0.1": "x"})
        data["checks"]["core"] = {"green": "x"}
    text = status(store, course)
    assert "Notebooks: 1 of 3 read" in text and "zzz" not in text
