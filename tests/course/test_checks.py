from __future__ import annotations

import functools
import random

import pytest
import torch

from minillm.course import checks
from minillm.course.checks import CheckFailed, check, hint, run_checks
from minillm.course.expect import expect_equal
from minillm.course.task import NamedCheck, Task, find_task

from .toy import TOY, WRONG, reference, solution, starter

HINTS = ("a", "b", "c")


def one(fn, **options) -> Task:
    return Task("1.1 core", "toy", (NamedCheck("exact", fn),), HINTS, **options)


def test_the_solution_is_green_and_is_said_to_be_yours(capsys, store):
    check(TOY, solution, progress=store)
    out = capsys.readouterr().out
    assert "Tested: yours, solution(row), from toy.py, line " in out
    assert out.count("PASS  ") == len(TOY.checks) and "All 8 checks passed." in out
    assert store.read()["checks"]["1.1 core"]["green"]


@pytest.mark.parametrize(("wrong", "red"), WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_a_wrong_answer_is_red_at_the_named_check(wrong, red, store):
    with pytest.raises(CheckFailed) as caught:
        check(TOY, wrong, progress=store)
    assert caught.value.report.failed == red
    assert f"FAIL  {red}" in str(caught.value)
    entry = store.read()["checks"]["1.1 core"]
    assert entry["last"] == red and "green" not in entry


def test_the_report_shows_index_got_expected_hint_and_what_did_not_run():
    text = str(run_checks(TOY, WRONG[3][0]))
    assert "first wrong element [0]: got 0, expected 1 (3 of 3 differ)" in text
    assert 'hint("1.1 core", 1): idea' in text
    assert "Not run yet: random: against cumsum; edges" in text


def test_the_starter_is_red_at_its_first_check_but_only_not_done_yet(store):
    with pytest.raises(CheckFailed) as caught:
        check(TOY, starter, progress=store)
    report = caught.value.report
    assert report.pending and report.failed == "shape" and "TODO  shape\n      not done yet: exercise 1.1 core" in str(report)
    assert store.read()["checks"]["1.1 core"]["attempts"] == 0


def test_an_error_in_the_answer_is_shown_with_its_line():
    report = run_checks(TOY, WRONG[5][0])
    assert "your code raised IndexError" in report.reason and "row[0]" in report.reason


def test_an_answer_that_the_check_cannot_use_is_red_without_a_traceback():
    report = run_checks(one(lambda f: f().shape), lambda: None)
    assert "the check could not use what your code gave: AttributeError" in report.reason


@pytest.mark.parametrize(
    "candidate",
    [
        reference,
        functools.partial(reference),
        functools.wraps(reference)(lambda row: reference(row)),
        type("Plain", (), {"__call__": reference})().__call__,
    ],
)
def test_the_reference_is_refused_as_an_answer(candidate):
    report = run_checks(TOY, candidate)
    assert report.failed == "shape" and "is the course's own code" in report.reason and report.tested == "nothing"


def test_code_of_minillm_is_refused_as_an_answer():
    for ours in (expect_equal, Task, functools.partial(expect_equal, 1), TOY):
        assert "is the course's own code" in run_checks(TOY, ours).reason


def test_a_subclass_that_adds_nothing_is_refused():
    class Reference:
        def run(self) -> int:
            return 1

    class Mine(Reference):
        pass

    task = one(lambda c: expect_equal(c().run(), 1), references=(Reference,))
    assert "nothing of yours" in run_checks(task, Mine).reason
    assert "is the course's own code" in run_checks(task, Reference).reason
    assert "is the course's own code" in run_checks(task, Reference()).reason


def test_a_result_instead_of_a_function_is_refused_with_advice():
    for result in (torch.ones(2), None, 3, [1]):
        assert "without calling it" in run_checks(TOY, result).reason
    for builtin in (len, torch.cumsum):
        assert "nothing of yours in" in run_checks(TOY, builtin).reason


def test_an_answer_that_calls_the_reference_is_refused_wherever_it_hides():
    def helper(row):
        return reference(row)

    def answer(row):
        return helper(row)

    assert "calls the course's own reference" in run_checks(TOY, answer).reason


def test_the_check_itself_may_call_the_reference():
    def compare(f):
        expect_equal(f(torch.ones(2)), reference(torch.ones(2)))

    assert run_checks(one(compare, references=(reference,)), solution).green


def test_a_check_that_runs_the_reference_instead_of_the_answer_is_red():
    def careless(f):
        expect_equal(reference(torch.ones(2)), torch.tensor([1.0, 2.0]))

    report = run_checks(one(careless), solution)
    assert not report.green and "never ran your code" in report.reason


def test_equal_code_of_two_people_is_told_apart():
    def make():
        def answer(row):
            return row.cumsum(0)

        return answer

    mine, theirs = make(), eval("lambda row: row.cumsum(0)")
    task = one(lambda f: expect_equal(f(torch.ones(2)), torch.tensor([1.0, 2.0])), references=(theirs,))
    assert run_checks(task, mine).green


def test_classes_instances_and_methods_count_as_the_learners_code():
    class Adder:
        def __init__(self):
            self.total = 0

        def add(self, n):
            self.total += n
            return self.total

    task = one(lambda c: expect_equal(c().add(2), 2))
    assert run_checks(task, Adder).green
    assert run_checks(one(lambda a: expect_equal(a.add(2), 2)), Adder()).green
    assert run_checks(one(lambda add: expect_equal(add(2), 2)), Adder().add).green


def test_checks_draw_the_same_numbers_and_leave_the_learners_alone():
    seen = []
    task = one(lambda f: (seen.append((torch.rand(1).item(), random.random())), f(torch.ones(1)))[0])
    torch.manual_seed(7)
    random.seed(7)
    expected = (torch.rand(1).item(), random.random())
    torch.manual_seed(7)
    random.seed(7)
    run_checks(task, solution)
    run_checks(task, solution)
    assert seen[0] == seen[1]
    assert (torch.rand(1).item(), random.random()) == expected


def test_a_task_must_name_its_checks_in_the_courses_order():
    ok = NamedCheck("exact", print)
    with pytest.raises(ValueError, match="must begin with one of shape, exact"):
        NamedCheck("looks right", print)
    with pytest.raises(ValueError, match="in the order"):
        Task("1.1 core", "t", (ok, NamedCheck("shape", print)), HINTS)
    with pytest.raises(ValueError, match="must differ"):
        Task("1.1 core", "t", (ok, ok), HINTS)
    with pytest.raises(ValueError, match="needs 3 hints"):
        Task("1.1 core", "t", (ok,), ("one",))
    with pytest.raises(ValueError, match="like '1.1 core'"):
        Task("1.1 main", "t", (ok,), HINTS)
    with pytest.raises(ValueError, match="has no checks"):
        Task("1.1 core", "t", (), HINTS)
    with pytest.raises(ValueError, match="hint must be 1, 2 or 3"):
        NamedCheck("exact", print, hint=4)


def test_an_unknown_task_names_those_that_exist():
    for id in ("99.1 core", "core"):
        with pytest.raises(ValueError, match=f"no task '{id}'; there are"):
            find_task(id)


def test_hints_are_numbered_and_remembered(capsys, store):
    hint(TOY, 2, progress=store)
    hint(TOY, 1, progress=store)
    assert "1.1 core, hint 2 of 3 (shapes)\n[n] in, [n] out." in capsys.readouterr().out
    assert store.read()["checks"]["1.1 core"]["hints"] == [1, 2]
    for n in (0, 4, 99, True, 1.0, "1"):
        with pytest.raises(ValueError, match="hint must be 1 to 3"):
            hint(TOY, n, progress=store)


def test_jupyter_shows_the_report_and_no_traceback(store):
    with pytest.raises(CheckFailed) as caught:
        check(TOY, starter, progress=store)
    shown = caught.value._render_traceback_()
    assert shown[0] == "1.1 core: Prefix sums" and not any("Traceback" in line for line in shown)


def test_a_red_run_after_a_green_one_keeps_the_mark_and_says_what_failed(store):
    check(TOY, solution, progress=store)
    with pytest.raises(CheckFailed):
        check(TOY, WRONG[3][0], progress=store)
    entry = store.read()["checks"]["1.1 core"]
    assert entry["green"] and entry["last"] == "exact: three by hand" and entry["attempts"] == 2


def test_a_folder_that_cannot_be_written_does_not_hide_the_result(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    check(TOY, solution, progress=checks.Progress(tmp_path / "file" / "inside"))
    out = capsys.readouterr().out
    assert "All 8 checks passed." in out and "Not recorded: cannot keep progress" in out


class BadMessage(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(("error", "said"), [(SystemExit(3), "SystemExit: 3"), (BadMessage(), "BadMessage: (its message cannot")])
def test_whatever_an_answer_raises_is_a_red_check_and_recorded(error, said, store):
    def answer(row):
        raise error

    with pytest.raises(CheckFailed) as caught:
        check(TOY, answer, progress=store)
    assert f"your code raised {said}" in caught.value.report.reason and "raise error" in caught.value.report.reason
    assert store.read()["checks"]["1.1 core"] == {"attempts": 1, "last": "shape"}


def test_an_interrupt_by_the_learner_is_not_a_red_check(store):
    def answer(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(TOY, answer, progress=store)


@pytest.mark.parametrize("id", [1.1, None, b"1.1 core", ["1.1 core"]])
def test_a_task_that_is_not_a_text_names_those_that_exist(id, store):
    for call in (lambda: check(id, solution, progress=store), lambda: hint(id, 1, progress=store)):
        with pytest.raises(ValueError, match="no task .*; there are 0.1 core"):
            call()
    assert not store.folder.exists()


def test_a_check_without_an_answer_says_what_is_missing():
    with pytest.raises(ValueError, match="the candidate is missing: hand in your function or class"):
        check("0.1 core")


def test_a_hint_is_shown_even_where_nothing_can_be_kept(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    hint(TOY, 1, progress=checks.Progress(tmp_path / "file" / "inside"))
    out = capsys.readouterr().out
    assert "hint 1 of 3 (idea)\nEach sum" in out and "Not recorded: cannot keep progress" in out


def test_a_class_counts_with_what_it_inherits_from_the_learners_own_classes():
    class Base:
        def add(self, n):
            return n + 1

    class Answer(Base):
        pass

    task = one(lambda c: expect_equal(c().add(2), 3))
    assert run_checks(task, Answer).green


def test_a_class_that_inherits_from_a_reference_is_refused():
    class Reference:
        def run(self) -> int:
            return 1

    class Mine(Reference):
        def other(self) -> int:
            return 2

    task = one(lambda c: expect_equal(c().run(), 1), references=(Reference,))
    assert "inherits from the course's own Reference" in run_checks(task, Mine).reason


class AnswersToEveryName:
    def __getattr__(self, name):
        return self

    def __call__(self, n):
        return n + 1


class WrapsAnew:
    @property
    def __wrapped__(self):
        return WrapsAnew()

    def __call__(self, n):
        return n + 1


def wraps_itself(n):
    return n + 1


wraps_itself.__wrapped__ = wraps_itself


@pytest.mark.parametrize("answer", [AnswersToEveryName(), WrapsAnew(), wraps_itself], ids=lambda a: type(a).__name__)
def test_an_answer_that_leads_back_to_itself_is_tested_all_the_same(answer):
    assert run_checks(one(lambda f: expect_equal(f(2), 3)), answer).green
