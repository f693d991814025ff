from __future__ import annotations

import os
import sys

import nbformat
import pytest

from minillm.course.notebooks import IGNORED, dumps, judge, main, normalise, problems
from minillm.course.percent import from_notebook, to_notebook

MD, CODE, OUT = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell, nbformat.v4.new_output


def book(*cells):
    return nbformat.v4.new_notebook(cells=list(cells))


def ran(source, *outputs, tags=(), count=1):
    cell = CODE(source, id="c", execution_count=count, outputs=list(outputs))
    if tags:
        cell.metadata["tags"] = list(tags)
    return cell


def stream(text):
    return OUT("stream", text=text)


def image():
    return OUT("display_data", data={"image/png": "aGk=", "text/plain": "<Figure>"})


def test_normal_form_drops_what_differs_between_runs():
    result = OUT(
        "execute_result",
        data={"text/plain": "<A at 0x7f3b2c1d>", "application/vnd.jupyter.widget-view+json": {}},
        execution_count=9,
        metadata={"t": 1},
    )
    cell = ran("x \n", result, tags=["a"], count=9)
    cell.metadata.update(collapsed=True, execution={"iopub.execute_input": "2026"})
    notebook = book(MD("text"), cell, CODE("y", id="d", execution_count=40))
    notebook.metadata = {"kernelspec": {"name": "conda-env-x", "display_name": "x"}, "widgets": {"state": {}}}
    clean = normalise(notebook)
    assert clean.metadata.kernelspec.name == "python3" and "widgets" not in clean.metadata
    assert clean.cells[1].metadata == {"tags": ["a"]} and clean.cells[1].source == "x"
    assert [c.execution_count for c in clean.cells[1:]] == [1, 2]
    output = clean.cells[1].outputs[0]
    assert output.execution_count == 1 and output.data == {"text/plain": "<A at 0x…>"} and output.metadata == {}
    assert dumps(normalise(clean)) == dumps(clean), "normal form is a fixed point"
    assert notebook.cells[1].outputs[0].execution_count == 9, "the argument is not modified"


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (ran("print(1)\nprint(2)", stream("1\n2\n")), "one print outside of loops, this one has 2"),
        (ran("for i in range(2):\n    print(i)", stream("0\n1\n")), "has a print in a loop"),
        (ran("[print(i) for i in x]"), "has a print in a loop"),
        (ran("\n".join(["x = 1"] * 31)), "31 lines, at most 30"),
        (ran("plot()", image()), f"shows a figure or widget: tag it {IGNORED}"),
        (ran("t = time.perf_counter()\nt", stream("1")), "depends on perf_counter and shows something"),
        (ran("predict('0.1 x')", stream("?")), "depends on predict"),
        (ran("!ls"), "not plain Python"),
        (ran("%time x"), "not plain Python"),
        (ran("1/0", OUT("error", ename="ZeroDivisionError", evalue="", traceback=[])), "ends in an error"),
        (CODE("x", id="c"), "not executed"),
        (ran("  \n"), "empty"),
        (MD("  "), "empty"),
        (ran("x", stream("<object at 0x7f0000000000>")), "an object's address"),
        (ran("x", stream(f"{os.path.expanduser('~')}/file")), "path of this machine"),
    ],
)
def test_what_breaks_the_rules_is_named(cell, says):
    assert [p for p in problems(book(cell)) if says in p and p.startswith("cell 1: ")]


@pytest.mark.parametrize(
    "cell",
    [
        ran("print(1)", stream("1\n")),
        ran("def f():\n    print(1)\n    print(2)\nf()"),
        ran("for i in x:\n    print(i)", stream("1\n2\n"), tags=[IGNORED]),
        ran("plot()", image(), tags=[IGNORED]),
        ran("t = time.perf_counter()"),
        ran("1/0", OUT("error", ename="ZeroDivisionError", evalue="", traceback=[]), tags=["raises-exception"]),
        MD("text"),
    ],
)
def test_what_the_rules_allow_passes(cell):
    assert list(problems(book(cell))) == []


def test_an_exercise_may_be_unexecuted():
    assert list(problems(book(CODE("x", id="c")), outputs=False)) == []


PERCENT = """# %% [markdown]
# # Title
#
# - text

# %%
x = 1


def f():
    return "# %% not a cell"

# %% tags=["nbval-ignore-output", "a b"]
print(x)
"""


def test_percent_text_becomes_cells_and_comes_back():
    notebook = to_notebook(PERCENT)
    assert [c.cell_type for c in notebook.cells] == ["markdown", "code", "code"]
    assert notebook.cells[0].source == "# Title\n\n- text"
    assert notebook.cells[2].metadata == {"tags": ["nbval-ignore-output", "a b"]}
    assert from_notebook(notebook) == PERCENT
    nbformat.validate(notebook)


def test_cell_ids_are_stable_and_survive_an_edit_elsewhere():
    old = to_notebook(PERCENT + "\n# %%\nx = 1\n")
    again = to_notebook(PERCENT + "\n# %%\nx = 1\n")
    assert [c.id for c in old.cells] == [c.id for c in again.cells] and len({c.id for c in old.cells}) == 4
    old.cells[2].id = "by-hand"
    edited = to_notebook(PERCENT.replace("# # Title", "# # Better title"), old)
    assert edited.cells[2].id == "by-hand" and edited.cells[1].id == old.cells[1].id
    assert edited.cells[0].id not in {c.id for c in old.cells}


def test_wrong_percent_text_is_an_error_with_its_line():
    with pytest.raises(ValueError, match="line 1: text before the first"):
        to_notebook("x = 1\n# %%\n")
    with pytest.raises(ValueError, match="line 1: tags must be JSON"):
        to_notebook("# %% tags=[nbval]\n")


def test_the_command_normalises_checks_and_converts(tmp_path, capsys):
    script, path = tmp_path / "a.py", tmp_path / "a.ipynb"
    script.write_text(PERCENT)
    assert main(["--from-py", str(script)]) == 0
    assert main(["--check", str(path)]) == 1 and "not executed" in capsys.readouterr().out
    path.write_text(path.read_text().replace('"execution_count": null', '"execution_count": 7'))
    assert main(["--check", str(path)]) == 1 and "not in normal form" in capsys.readouterr().out
    assert main(["--normalise", str(path)]) == 0 and main(["--check", str(path)]) == 0
    script.unlink()
    assert main(["--to-py", str(path)]) == 0 and script.read_text() == PERCENT
    path.write_text("{broken")
    assert main(["--check", str(path)]) == 1


@pytest.mark.slow
def test_executing_twice_gives_the_same_bytes_and_a_failing_cell_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    path = tmp_path / "a.ipynb"
    source = "from minillm.course.plots import bars, png\nfrom minillm.course.session import headless\nassert headless()"
    path.write_text(dumps(normalise(book(CODE(source, id="a"), CODE("print(6 * 7)", id="b")))))
    assert main([str(path)]) == 0
    first = path.read_bytes()
    assert b"42" in first and main([str(path)]) == 0 and path.read_bytes() == first
    assert judge(path) == []
    path.write_text(dumps(normalise(book(CODE("1 / 0", id="a")))))
    assert main([str(path)]) == 1 and "ZeroDivisionError" in capsys.readouterr().out
