"""Who an object of somebody's is, in words that are the same in another process: for keys of what outlives the engine."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

PLAIN = (str, int, float, tuple, type(None))
KNOWN = ("minillm", "builtins", "torch", "typing", "abc")
"""Where classes come from that nobody edits between two runs."""


def identity(value: Any) -> Any:
    """A value that is the same in another process; of an object, its class and those of its attributes that are such values:
    two windows of one class of attention see other keys, and two factors of one class of product make other sums."""
    if isinstance(value, PLAIN):
        return value
    known = {name: v for name, v in getattr(value, "__dict__", {}).items() if isinstance(v, PLAIN) or dataclasses.is_dataclass(v)}
    sources = [_source(kind) for kind in type(value).__mro__ if kind.__module__.partition(".")[0] not in KNOWN]
    return class_name(value), sources, sorted((name, identity(v)) for name, v in known.items())


def class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _source(kind: type) -> str:
    """The text of somebody's class: it may have been edited since, under the same name."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # typed at a prompt: what it was compiled to
        functions = {name: f.__code__ for name, f in vars(kind).items() if inspect.isfunction(f)}
        return repr([(name, code.co_code, code.co_names) for name, code in sorted(functions.items())])
