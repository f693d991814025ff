"""Who did the work: watches which functions run while a check calls an answer."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any, Iterable

LAYERS = 100  # wrappers around one function; more is a loop that makes a new object each time


def unwrap(obj: Any) -> Any:
    """The function or class behind a bound method, a partial or a decorator that kept ``__wrapped__``.

    A chain that comes back to an object it has been at ends there.
    """
    passed: list[Any] = []
    while len(passed) < LAYERS and not any(obj is p for p in passed):
        passed.append(obj)
        if isinstance(obj, functools.partial):
            obj = obj.func
        elif isinstance(obj, (types.MethodType, staticmethod, classmethod)):
            obj = obj.__func__
        elif not isinstance(obj, type) and _keeps_wrapped(obj):
            obj = getattr(obj, "__wrapped__", obj)
    return obj


def _keeps_wrapped(obj: Any) -> bool:
    """Whether ``__wrapped__`` is really there: an object whose ``__getattr__`` answers to every name has none."""
    try:
        own = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        own = {}
    return "__wrapped__" in own or any("__wrapped__" in vars(base) for base in type(obj).__mro__)


def codes(obj: Any, references: Iterable[Any] = ()) -> list[types.CodeType]:
    """Code objects written for a function, for a class or for an instance's class.

    A class counts with what it inherits from classes of its own module: a learner may split an answer over several. Bases
    from elsewhere (torch's, the library's) and those among ``references`` are not the learner's.
    """
    theirs = [unwrap(ref) for ref in references]
    found: list[types.CodeType] = []
    layers = [obj, unwrap(obj)] if unwrap(obj) is not obj else [obj]
    for layer in layers:
        if isinstance(layer, types.FunctionType):
            found.append(layer.__code__)
        elif isinstance(layer, type):
            for base in layer.__mro__:
                if base.__module__ == layer.__module__ and not any(base is ref for ref in theirs):
                    found.extend(_methods(base))
        elif isinstance(fn := getattr(layer, "fn", None), types.FunctionType):  # a Triton kernel keeps its function in .fn
            found.append(fn.__code__)
        elif not isinstance(layer, (types.MethodType, functools.partial, types.BuiltinFunctionType)):
            found.extend(codes(type(layer), theirs))
    return found


def _methods(owner: type) -> Iterable[types.CodeType]:
    for member in vars(owner).values():
        for part in (member, *(getattr(member, a, None) for a in ("fget", "fset", "__func__", "func"))):
            part = unwrap(part)
            if isinstance(part, types.FunctionType):
                yield part.__code__


class Witness:
    """Context manager: counts calls of the candidate, and notes the first reference that the candidate itself called.

    Uses the interpreter's profile hook on this thread. Code objects are compared by identity: equal bytecode in two
    notebooks is still two answers.
    """

    def __init__(self, candidate: Any, references: Iterable[Any] = ()) -> None:
        self.calls = 0
        self.borrowed: str | None = None
        self._mine = {id(code) for code in codes(candidate, references)}
        self._theirs = {id(code): getattr(ref, "__name__", str(ref)) for ref in references for code in codes(ref)}
        self._depth = 0
        self._before: Any = None

    def __enter__(self) -> "Witness":
        self._before = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _event(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = id(frame.f_code)
            if code in self._mine:
                self.calls += 1
                self._depth += 1
            elif self._depth and code in self._theirs and self.borrowed is None:
                self.borrowed = self._theirs[code]
        elif event == "return" and id(frame.f_code) in self._mine:
            self._depth -= 1
