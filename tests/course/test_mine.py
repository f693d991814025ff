from __future__ import annotations

import linecache
import sys
import types
from typing import Any

import pytest

from minillm.course.checks import check
from minillm.course.expect import expect_equal
from minillm.course.mine import load_part, mine, my_options, rooms, save_part
from minillm.course.source import SourceError, bundle, definition, location
from minillm.course.task import NamedCheck, Seam, Task

HINTS = ("a", "b", "c")


@pytest.fixture
def cell(monkeypatch):
    """Run text as a notebook's cell does: one namespace, source known to linecache only."""
    book = types.ModuleType("notebook_of_a_learner")
    monkeypatch.setitem(sys.modules, book.__name__, book)
    count = 0

    def run(text: str) -> Any:
        nonlocal count
        count += 1
        name = f"/tmp/ipykernel_1/{count}.py"
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name))
        exec(compile(text, name, "exec"), vars(book))
        return book

    return run


def task(id: str = "1.1 core", seam: str = "adder", room: str = "adding room") -> Task:
    return Task(
        id,
        "toy",
        (NamedCheck("exact", lambda f: expect_equal(f(2), 3)),),
        HINTS,
        Seam(seam, room, lambda f: {seam: f}),
    )


def run_elsewhere(candidate: Any, name: str) -> Any:
    module = sys.modules["elsewhere"] = types.ModuleType("elsewhere")
    exec(compile(bundle(candidate), "elsewhere.py", "exec"), vars(module))
    return getattr(module, name)


def test_a_function_is_kept_with_its_imports_constants_and_helpers(cell):
    book = cell("import math as m\nfrom os.path import join as j\nSTEP = 2\nTABLE = {'a': [1, 2.5]}\nprint('noise')")
    cell("def half(x):\n    return x / 2\n\ndef unused():\n    return undefined_name\n")
    cell(
        "def add(x, y=STEP):\n    z = half(m.sqrt(x))\n    return z + y + TABLE['a'][1] + len(j('a', 'b'))\nadd(1)\n"
    )
    assert run_elsewhere(book.add, "add")(16) == 2 + 2 + 2.5 + 3
    assert "unused" not in bundle(book.add) and "noise" not in bundle(book.add)


def test_local_names_that_a_notebook_variable_shares_are_not_mistaken_for_it(cell):
    book = cell("k = object()\nrow = object()\n")
    cell("def add(k):\n    row = [k for k in range(k)]\n    def inner(q):\n        return q + len(row)\n    return inner(k)\n")
    assert run_elsewhere(book.add, "add")(3) == 6


def test_a_class_is_kept_with_base_decorators_and_annotations(cell):
    book = cell(
        "import functools\nfrom dataclasses import dataclass\nfrom typing import Any\n"
        "def named(c):\n    c.label = 'mine'\n    return c\n"
        "class Base:\n    def twice(self): return 2 * self.n\n"
        "@named\n@dataclass\nclass Cache(Base):\n    n: Any = 4\n"
        "    @functools.cached_property\n    def size(self): return self.n\n    @staticmethod\n    def make(n): return Cache(n)\n"
    )
    made = run_elsewhere(book.Cache, "Cache")
    assert made.make(3).twice() == 6 and made().size == 4 and made.label == "mine"


def test_the_newest_definition_counts_and_helpers_may_call_each_other(cell):
    cell("def even(n):\n    return 'old'\n")
    book = cell(
        "def even(n):\n    return n == 0 or odd(n - 1)\ndef odd(n):\n    return n != 0 and even(n - 1)\ncheck_me = even\n"
    )
    assert run_elsewhere(book.even, "even")(10) is True
    assert "old" not in definition(book.even)


def test_an_alias_of_a_helper_works(cell):
    book = cell("def helper(x):\n    return x\nh = helper\ndef add(x):\n    return h(x) + 1\n")
    assert run_elsewhere(book.add, "add")(1) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "model = object()\ndef add(x):\n    return model\n",
            "uses the notebook's variable model .a object.; make it an argument",
        ),
        (
            "def make():\n    y = 1\n    def add(x):\n        return x + y\n    return add\nadd = make()\n",
            "define it at the top level",
        ),
        ("add = lambda x: x + 1\n", "a lambda cannot be kept"),
        ("def add(x):\n    return mising(x)\n", "uses mising, which is not defined"),
        ("class A:\n    def __call__(self, x): return x\nadd = A()\n", "hand in its class or a function"),
    ],
)
def test_what_cannot_be_kept_is_named_with_advice(cell, text, says):
    with pytest.raises(SourceError, match=says):
        bundle(cell(text).add)


def test_a_lost_source_is_reported(cell):
    book = cell("def add(x):\n    return x\n")
    linecache.cache.pop("/tmp/ipykernel_1/1.py")
    with pytest.raises(SourceError, match="run the cell that defines it again"):
        bundle(book.add)


def test_a_green_check_keeps_the_part_and_mine_runs_it_in_a_later_session(cell, store, capsys):
    book = cell("ONE = 1\ndef add(x):\n    return x + ONE\n")
    check(task(), book.add, progress=store)
    assert "Your add is now the adding room of mine()." in capsys.readouterr().out
    book.ONE = 100  # the part is a copy: later changes of the notebook do not reach it
    engine = mine("tiny", progress=store, tasks=[task()], engine=lambda model, **options: (model, options), seed=3)
    assert engine[0] == "tiny" and engine[1]["adder"](2) == 3 and engine[1]["seed"] == 3
    assert "adding room: yours (1.1 core, add)" in capsys.readouterr().out
    assert location(engine[1]["adder"]).startswith("1.1_core.py, line ")


def test_options_given_by_hand_win_over_a_part(cell, store):
    save_part(task(), cell("def add(x):\n    return x + 1\n").add, store)
    assert mine("tiny", progress=store, tasks=[task()], engine=lambda m, **o: o, adder="plain") == {"adder": "plain"}


def test_without_parts_every_room_is_minillms(store, capsys):
    assert mine("tiny", progress=store, tasks=[task()], engine=lambda m, **o: o) == {}
    assert "adding room: minillm" in capsys.readouterr().out
    assert rooms(store, [task()]) == {"adding room": "minillm"}
    with pytest.raises(ValueError, match="no part is kept for 1.1 core"):
        load_part(task(), store)


def test_of_two_tasks_for_one_seam_the_later_counts_and_clashing_seams_are_refused(cell, store):
    first, second, clash = task(), task("2.1 core"), task("3.1 core", "other")
    save_part(first, cell("def add(x):\n    return x + 1\n").add, store)
    save_part(second, cell("def plus(x):\n    return 1 + x\n").plus, store)
    assert my_options(store, [first, second])["adder"].__name__ == "plus"
    assert rooms(store, [first, second]) == {"adding room": "yours (2.1 core, plus)"}
    clash = Task(clash.id, clash.title, clash.checks, HINTS, Seam("other", "other room", lambda f: {"adder": f}))
    save_part(clash, cell("def third(x):\n    return x + 1\n").third, store)
    with pytest.raises(ValueError, match="your parts for adder and other both set the engine's option 'adder'"):
        my_options(store, [first, second, clash])


def test_a_green_answer_that_cannot_be_kept_is_still_green(cell, store, capsys):
    book = cell("thing = object()\ndef add(x):\n    thing\n    return x + 1\n")
    check(task(), book.add, progress=store)
    assert "Green, but not kept for mine(): add uses the notebook's variable thing" in capsys.readouterr().out
    assert store.read()["checks"]["1.1 core"]["green"] and not store.read()["parts"]


def test_an_older_part_stays_when_a_newer_one_does_not_load(cell, store):
    save_part(task(), cell("def add(x):\n    return x + 1\n").add, store)
    book = cell("import sys\nsys.only_here = 1\ndef add(x, y=sys.only_here):\n    return x + y\n")
    del sys.only_here
    with pytest.raises(SourceError, match="does not run outside of this notebook: AttributeError"):
        save_part(task(), book.add, store)
    assert load_part(task(), store)(2) == 3
    assert [p.name for p in (store.folder / "parts").glob("*.py")] == ["1.1_core.py"]


def test_a_part_that_no_longer_loads_says_what_to_do(cell, store):
    save_part(task(), cell("def add(x):\n    return x + 1\n").add, store).write_text("import no_such_module")
    with pytest.raises(SourceError, match="your part of 1.1 core no longer loads .*`minillm course reset 1.1"):
        mine(progress=store, tasks=[task()], engine=lambda m, **o: o)


def test_a_task_without_a_seam_has_no_part(store):
    plain = Task("1.1 core", "toy", task().checks, HINTS)
    with pytest.raises(ValueError, match="has no seam"):
        save_part(plain, print, store)
