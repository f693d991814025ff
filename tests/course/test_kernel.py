"""The check machinery in a real kernel, where functions live in cells, and under nbval's and nbclient's rules."""

from __future__ import annotations

import os
import subprocess
import sys

import nbformat
import pytest

from minillm.course.mine import load_part
from minillm.course.notebooks import dumps, execute, normalise
from minillm.course.progress import Progress

pytestmark = pytest.mark.slow

CELLS = [
    """from minillm.course.checks import check
from minillm.course.expect import expect_equal
from minillm.course.mine import mine
from minillm.course.session import data_dir, headless
from minillm.course.task import NamedCheck, Seam, Task
TASK = Task("1.1 core", "Toy", (NamedCheck("exact", lambda c: expect_equal(c().add(2), 3)),), ("a", "b", "c"),
            Seam("adder", "adding room", lambda c: {"adder": c()}))""",
    "import math as m\nSTEP = 1",
    "def one(x):\n    return m.floor(x + STEP)",
    "class Adder:\n    '''No method, then one.'''\n    def add(self, x):\n        return one(x)\nclass Empty: pass",
    "check(TASK, Adder)",
    "print(headless(), mine('tiny', tasks=[TASK], engine=lambda model, **o: o['adder'].add(5)))",
    "def late(x): raise NotImplementedError('exercise 1.1 core')",
    "check(TASK, lambda: type('A', (), {'add': late})())",
    "import os\nos.environ['MINILLM_HEADLESS'] = '0'\ncheck(TASK, Adder)",
]


def book(cells):
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c, id=f"c{i}") for i, c in enumerate(cells)])
    made.cells[-2].metadata["tags"] = ["raises-exception"]
    made.cells[-1].metadata["tags"] = ["nbval-ignore-output"]
    return made


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    path = folder / "book.ipynb"
    path.write_text(dumps(normalise(book(CELLS))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLM_PROGRESS_DIR", str(folder / "progress"))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        execute(path, timeout=120)
    return path


def text_of(path, i):
    cell = nbformat.read(path, 4).cells[i]
    return "".join(o.get("text", "") or "\n".join(o.get("traceback", [])) for o in cell.outputs)


def test_the_report_says_whose_code_was_tested(executed):
    """nbval counts every cell as In[1]: without a front end the number is left out."""
    assert "Tested: yours, class Adder, from this notebook" in text_of(executed, 4)
    assert "Tested: yours, class Adder, from cell In[4]" in text_of(executed, 8)


def test_a_class_of_a_notebook_becomes_a_part(executed):
    assert "Your Adder is now the adding room of mine()." in text_of(executed, 4)
    out = text_of(executed, 5)
    assert "adding room: yours (1.1 core, Adder)" in out and "True 6" in out
    from .test_mine import task

    assert load_part(task(), Progress(executed.parent / "progress"))().add(5) == 6


def test_a_red_check_shows_the_report_alone(executed):
    shown = text_of(executed, 7)
    assert shown.startswith("1.1 core: Toy") and "Traceback" not in shown and "minillm/course" not in shown


def test_nbval_finds_the_same_output_again(executed):
    env = {**os.environ, "MINILLM_PROGRESS_DIR": str(executed.parent / "again"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", executed.parent, executed]
    result = subprocess.run(command, env=env, cwd=executed.parent, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout[-3000:]
