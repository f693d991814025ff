"""The learner's own source: where a function or class was written, and a copy of it that runs in a later session."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import symtable
import sys
import types
from pathlib import Path
from typing import Any, Iterator

from minillm.course.session import headless, kernel
from minillm.course.witness import codes, unwrap


class SourceError(ValueError):
    """An answer cannot be copied out of the notebook; the message says why and what to do."""


def name_of(obj: Any) -> str:
    target = unwrap(obj)
    return getattr(target, "__name__", None) or type(target).__name__


def label(obj: Any) -> str:
    """"attend(q, k, v)" for a function, "class MyCache" for a class or an instance of it."""
    target = unwrap(obj)
    if not isinstance(target, types.FunctionType):
        return f"class {name_of(target)}"
    return f"{target.__name__}({', '.join(inspect.signature(target).parameters)})"


def location(obj: Any) -> str:
    """Where the learner wrote it: "cell In[7]", or file and line.

    Without a front end it is "this notebook": nbval counts every cell as the first, so a number would differ between runs.
    """
    written = codes(obj)
    if not written:
        return "an unknown place"
    code = written[0]
    compiler = getattr(getattr(kernel(), "shell", None), "compile", None)
    named = compiler.format_code_name(code.co_filename) if compiler is not None else None
    if named:
        return "this notebook" if headless() else f"cell {named[1]}"
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"


def _cells(obj: Any) -> Iterator[str]:
    """Sources in which ``obj`` may be defined: its own cell or file first, then the notebook's cells, newest first."""
    for filename in dict.fromkeys(code.co_filename for code in codes(obj)):
        if text := "".join(linecache.getlines(filename)):
            yield text
    shell = getattr(kernel(), "shell", None)
    yield from reversed([cell for cell in (shell.user_ns.get("In", []) if shell else []) if isinstance(cell, str)])


def _parse(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError:  # a cell with a shell escape
        return []


def definition(obj: Any) -> str:
    """The text of a function or class that was defined at the top level of a cell or file, decorators included."""
    target, name = unwrap(obj), name_of(obj)
    if not isinstance(target, (types.FunctionType, type)):
        raise SourceError(f"only a function or a class can be kept, and {name} is an object; hand in its class or a function")
    if name == "<lambda>":
        raise SourceError("a lambda cannot be kept; write it as a function with def")
    if getattr(target, "__closure__", None) and not isinstance(target, type):
        raise SourceError(f"{name} uses variables of the function that it was defined in; define it at the top level of a cell")
    for text in _cells(obj):
        found = [s for s in _parse(text) if isinstance(s, (ast.FunctionDef, ast.ClassDef)) and s.name == name]
        if found:
            node = found[-1]
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno]) + "\n"
    raise SourceError(f"the source of {name} was not found; run the cell that defines it again, then the check")


def _free_names(text: str) -> list[str]:
    """Names that a definition looks up in its notebook: globals of its bodies, decorators, bases, defaults, annotations."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            outermost = table.get_type() == "module" and not symbol.is_assigned()
            if symbol.is_referenced() and (symbol.is_global() or outermost):
                yield symbol.get_name()
        for child in table.get_children():
            yield from walk(child)

    return sorted(set(walk(symtable.symtable(text, "<answer>", "exec"))))


def _import_line(name: str, value: Any, home: Any) -> str | None:
    """The import statement that binds ``name``: as the learner wrote it, else derived from the object."""
    for text in _cells(home):
        for node in ast.walk(ast.Module(_parse(text), [])):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    if (alias.asname or alias.name.split(".")[0]) == name:
                        kept: ast.stmt = ast.Import([alias])
                        if isinstance(node, ast.ImportFrom):
                            kept = ast.ImportFrom(node.module, [alias], node.level)
                        return ast.unparse(kept)
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module and module != "__main__" and getattr(sys.modules.get(module), qualname, None) is value:
        return f"from {module} import {qualname} as {name}"
    return None


def _literal(value: Any) -> str | None:
    try:
        text = repr(value)
        return text if ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def bundle(candidate: Any) -> str:
    """A module's text that defines ``candidate`` and everything of the notebook that it uses: imports, constants, helpers.

    SourceError names a notebook variable that cannot be copied (a model, a tensor): it should be an argument.
    """
    imports: dict[str, str] = {}
    constants: dict[str, str] = {}
    pieces: dict[str, str] = {}
    home = getattr(unwrap(candidate), "__module__", "__main__")

    def add(obj: Any) -> None:
        name = name_of(obj)
        if name in pieces:
            return
        text = definition(obj)
        pieces[name] = ""  # reserves the name: helpers may call each other
        written = unwrap(obj)
        module = sys.modules.get(getattr(written, "__module__", "") or "")
        space = written.__globals__ if isinstance(written, types.FunctionType) else vars(module) if module else {}
        for needed in _free_names(text):
            if needed in space and needed != name:
                resolve(needed, space[needed], name, obj)
            elif needed not in space and not hasattr(builtins, needed):
                raise SourceError(f"{name} uses {needed}, which is not defined")
        del pieces[name]
        pieces[name] = text  # after what it needs: decorators and base classes must exist first

    def resolve(needed: str, value: Any, user: str, obj: Any) -> None:
        own = isinstance(unwrap(value), (types.FunctionType, type)) and getattr(unwrap(value), "__module__", None) == home
        if own:
            add(value)
            if name_of(value) != needed:
                pieces[needed] = f"{needed} = {name_of(value)}\n"
        elif line := _import_line(needed, value, obj):
            imports[needed] = line
        elif (text := _literal(value)) is not None:
            constants[needed] = f"{needed} = {text}"
        else:
            kind = type(value).__name__
            raise SourceError(f"{user} uses the notebook's variable {needed} (a {kind}); make it an argument, or part of {user}")

    add(candidate)
    head = ["from __future__ import annotations", *imports.values()]
    blocks = ["\n".join(dict.fromkeys(head)), "\n".join(constants.values()), *pieces.values()]
    return "\n\n".join(block.rstrip("\n") for block in blocks if block) + "\n"
