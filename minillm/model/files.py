"""What every kind of model file has in common: JSON beside it, and a table of tensors that must match the model's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} if there is no such file. Anything else is a ValueError naming the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def check_depth(num_layers: int, num_tensors: int, where: str | Path) -> None:
    """Refuse a number of layers that the file cannot hold, before listing all their tensors: it may be any number."""
    if num_layers > num_tensors:
        raise ValueError(f"{where} holds {num_tensors} tensors, too few for the {num_layers} layers that are stated")


def check_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: str | Path) -> None:
    """Compare names and shapes before anything is read. A missing, misshapen or surplus tensor is a ValueError naming it.

    A surplus tensor is refused because a model that silently leaves a bias or a norm out answers, but wrongly.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise ValueError(f"{where} lacks tensor {_first(missing)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"tensor {name} of {where} has shape {found[name]}, the model's configuration asks for {shape}")
    surplus = [name for name in found if name not in expected]
    if surplus:
        raise ValueError(f"{where} holds tensor {_first(surplus)}, for which the model's configuration has no place")


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
