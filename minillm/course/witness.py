"""Who did the work: watches which functions run while a check calls an answer."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any, Iterable


def unwrap(obj: Any) -> Any:
    """The function or class behind a bound method, a partial or a decorator that kept ``__wrapped__``."""
    while True:
        if isinstance(obj, functools.partial):
            obj = obj.func
        elif isinstance(obj, types.MethodType):
            obj = obj.__func__
        elif not isinstance(obj, type) and hasattr(obj, "__wrapped__"):
            obj = obj.__wrapped__
        else:
            return obj


def codes(obj: Any) -> list[types.CodeType]:
    """Code objects written for a function, for a class (its own methods, not the inherited ones) or for an instance's class."""
    found: list[types.CodeType] = []
    layers = [obj, unwrap(obj)] if unwrap(obj) is not obj else [obj]
    for layer in layers:
        if isinstance(layer, types.FunctionType):
            found.append(layer.__code__)
        elif isinstance(layer, type):
            for member in vars(layer).values():
                for part in (member, *(getattr(member, a, None) for a in ("fget", "fset", "__func__", "func"))):
                    part = unwrap(part)
                    if isinstance(part, types.FunctionType):
                        found.append(part.__code__)
        elif isinstance(fn := getattr(layer, "fn", None), types.FunctionType):  # a Triton kernel keeps its function in .fn
            found.append(fn.__code__)
        elif not isinstance(layer, (types.MethodType, functools.partial, types.BuiltinFunctionType)):
            found.extend(codes(type(layer)))
    return found


class Witness:
    """Context manager: counts calls of the candidate, and notes the first reference that the candidate itself called.

    Uses the interpreter's profile hook on this thread. Code objects are compared by identity: equal bytecode in two
    notebooks is still two answers.
    """

    def __init__(self, candidate: Any, references: Iterable[Any] = ()) -> None:
        self.calls = 0
        self.borrowed: str | None = None
        self._mine = {id(code) for code in codes(candidate)}
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
