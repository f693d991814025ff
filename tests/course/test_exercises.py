from __future__ import annotations

import ast

import nbformat
import pytest

from minillm.course.exercises import build, generate, main, reset, strip_source
from minillm.course.notebooks import dumps, normalise

MD, CODE = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
CORE = """def add(x):
    \"\"\"One more.\"\"\"
    ### BEGIN SOLUTION core
    y = x + 1
    return y
    ### END SOLUTION
"""
BREAK = """def sub(x):
    ### BEGIN SOLUTION break
    return x - 1
    ### BEGIN FAULT
    # y = x
    # if y:
    #     y -= 2
    #
    # return y
    ### END FAULT
    ### END SOLUTION
"""
CHECK = """check("1.1 core", add)
### BEGIN HIDDEN TESTS
check("1.1 core", add, secret=True)
### END HIDDEN TESTS"""


NBGRADER = {"grade": False, "locked": False, "schema_version": 3, "solution": False, "task": False}


def solution():
    code = [CODE(CORE, id="core"), CODE(BREAK, id="fault"), CODE(CHECK, id="check")]
    cells = [MD("# Exercise 1.1", id="card"), *code, MD("Why it works", id="why")]
    cells[4].metadata["tags"] = ["solution-only"]
    cells[3].metadata["nbgrader"] = {**NBGRADER, "grade": True, "grade_id": "core", "locked": True, "points": 2}
    cells[1].metadata["scrolled"] = True
    cells[1].execution_count, cells[3].execution_count = 1, 2
    cells[3].outputs = [nbformat.v4.new_output("stream", text="All green")]
    return nbformat.v4.new_notebook(cells=cells)


@pytest.fixture
def course(tmp_path):
    for part in ("chapters", "solutions", "exercises"):
        (tmp_path / part / "1_skip").mkdir(parents=True)
    (tmp_path / "solutions/1_skip/1_kv_cache.ipynb").write_text(dumps(normalise(solution())))
    return tmp_path


def exercise(course):
    return course / "exercises/1_skip/1_kv_cache.ipynb"


def test_the_learner_gets_stubs_faults_and_checks_and_nothing_of_the_solution(course):
    made = nbformat.reads(generate(course / "solutions/1_skip/1_kv_cache.ipynb"), 4)
    assert [c.id for c in made.cells] == ["card", "core", "fault", "check"]
    core, fault, check = (c.source for c in made.cells[1:])
    assert core == 'def add(x):\n    """One more."""\n    # YOUR CODE HERE\n    raise NotImplementedError("exercise 1.1 core")'
    assert fault == "def sub(x):\n    y = x\n    if y:\n        y -= 2\n\n    return y"
    assert check == 'check("1.1 core", add)'
    assert made.cells[3].metadata["nbgrader"]["points"] == 2 and "scrolled" not in made.cells[1].metadata
    assert all(c.execution_count is None and c.outputs == [] for c in made.cells if c.cell_type == "code")


def test_building_twice_gives_the_same_bytes_and_the_check_agrees(course, capsys):
    assert build(course) == ["exercises/1_skip/1_kv_cache.ipynb: written"]
    first = exercise(course).read_bytes()
    assert build(course) == [] and exercise(course).read_bytes() == first
    assert main(["--check", "--root", str(course)]) == 0
    assert "agrees" in capsys.readouterr().out


def test_drift_is_found_shown_and_not_repaired_by_the_check(course, capsys):
    build(course)
    exercise(course).write_text(exercise(course).read_text().replace("One more", "One less"))
    assert main(["--check", "--root", str(course)]) == 1
    out = capsys.readouterr().out
    assert "differs from its solution" in out and "One less" in out and "One more" in out
    assert "One less" in exercise(course).read_text()


def test_a_changed_solution_is_drift(course):
    build(course)
    path = course / "solutions/1_skip/1_kv_cache.ipynb"
    path.write_text(path.read_text().replace("# Exercise 1.1", "# Exercise 1.1, revised"))
    assert len(build(course, check=True)) == 1
    path.write_text(path.read_text().replace("y = x + 1", "y = 1 + x"))
    build(course)
    path.write_text(path.read_text().replace("y = 1 + x", "y = x - -1"))
    assert build(course, check=True) == [], "what the learner does not see may change"


def test_an_exercise_without_a_solution_is_found_and_removed_but_kept_aside(course, progress_folder):
    build(course)
    stale = exercise(course).with_name("9_old.ipynb")
    stale.write_text(exercise(course).read_text())
    assert build(course, check=True) == ["exercises/1_skip/9_old.ipynb: has no solution"] and stale.exists()
    build(course)
    assert not stale.exists() and len(list((progress_folder / "backups").iterdir())) == 1


def test_building_over_a_notebook_that_was_worked_in_keeps_it(course, progress_folder):
    build(course)
    mine = exercise(course).read_text().replace('"execution_count": null', '"execution_count": 1')
    exercise(course).write_text(mine)
    assert "worked in is kept as" in build(course)[0]
    assert [p.read_text() for p in (progress_folder / "backups").iterdir()] == [mine]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "must name core, break or stretch"),
        ("### BEGIN SOLUTION main\nx = 1\n### END SOLUTION", "got 'main'"),
        ("### BEGIN SOLUTION core\nx = 1", "BEGIN SOLUTION has no partner"),
        ("x = 1\n### END SOLUTION", "END SOLUTION has no partner"),
        ("### BEGIN FAULT\n# x = 1\n### END FAULT", "BEGIN FAULT has no partner"),
        ("### BEGIN HIDDEN TESTS\nx = 1", "BEGIN HIDDEN TESTS has no partner"),
        ("### BEGIN SOLUTION break\n### BEGIN FAULT\nx = 1\n### END FAULT\n### END SOLUTION", "commented out, got 'x = 1'"),
        ("### BEGIN SOLUTION break\n### BEGIN FAULT\n# if x\n### END FAULT\n### END SOLUTION", "does not parse"),
        ("if x:\n    ### BEGIN SOLUTION core\n    pass\n    ### END SOLUTION\n  else: pass", "does not parse"),
    ],
)
def test_wrong_markers_are_errors_that_name_the_cell(source, says):
    with pytest.raises(ValueError, match=f"nb, cell 3: .*{says}"):
        strip_source(source, "1.1", "nb, cell 3")


def test_two_regions_in_one_cell_keep_their_indentation():
    method = "    def m(self):\n        ### BEGIN SOLUTION core\n        return 1\n        ### END SOLUTION\n"
    text = strip_source("class A:\n" + method + method, "2.3", "")
    ast.parse(text)
    assert text.count('        raise NotImplementedError("exercise 2.3 core")') == 2 and "return" not in text


def test_an_error_in_a_solution_is_told_without_a_traceback(course, capsys):
    path = course / "solutions/1_skip/1_kv_cache.ipynb"
    path.write_text(path.read_text().replace("SOLUTION core", "SOLUTION heart"))
    assert main(["--root", str(course)]) == 2
    assert "1_kv_cache.ipynb, cell 2: BEGIN SOLUTION must name" in capsys.readouterr().err
    assert main(["--root", str(course / "chapters")]) == 2


def test_reset_gives_back_the_shipped_notebook_and_keeps_the_learners(course, store):
    build(course)
    shipped = exercise(course).read_text()
    exercise(course).write_text("my work")
    with store.change() as data:
        data["checks"] = {"1.1 core": {"green": "x"}, "1.1 break": {}, "1.10 core": {"green": "y"}, "2.1 core": {}}
        data["parts"] = {"1.1 core": {"file": "f", "name": "n"}}
    said = reset("1.1", progress=store, root=course)
    assert exercise(course).read_text() == shipped
    kept = list((store.folder / "backups").iterdir())
    assert [p.read_text() for p in kept] == ["my work"] and str(kept[0]) in said
    assert set(store.read()["checks"]) == {"1.10 core", "2.1 core"} and not store.read()["parts"]
    assert "kept" not in reset("1.1", progress=store, root=course)
    exercise(course).unlink()
    reset("1.1", progress=store, root=course)
    assert exercise(course).read_text() == shipped
    with pytest.raises(ValueError, match="there are 1.1"):
        reset("9.9", progress=store, root=course)


def test_nbgrader_releases_the_same_cells_from_the_same_source(course):
    """nbgrader's own preprocessors accept the markers; its stub is generic and it knows no planted faults."""
    preprocessors = pytest.importorskip("nbgrader.preprocessors", reason="nbgrader is an optional extra for teachers")
    released, resources = solution(), {"nbgrader": {}}
    for cell in released.cells[1:3]:
        cell.metadata["nbgrader"] = {**NBGRADER, "grade_id": cell.id, "solution": True}
    for step in (preprocessors.ClearSolutions(), preprocessors.ClearHiddenTests()):
        released, resources = step.preprocess(released, resources)
    ours = nbformat.reads(generate(course / "solutions/1_skip/1_kv_cache.ipynb"), 4)
    assert released.cells[1].source.rstrip() == ours.cells[1].source.replace('("exercise 1.1 core")', "()")
    assert released.cells[2].source.rstrip() == "def sub(x):\n    # YOUR CODE HERE\n    raise NotImplementedError()"
    assert released.cells[3].source.rstrip() == ours.cells[3].source
