"""What options and shapes are held to: a ValueError names the value and the limit."""

from __future__ import annotations

from minillm.perf.units import check_whole


def check_positive(**values: int | float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
            raise ValueError(f"{name} must be a positive, finite number, got {value!r:.60}")


def check_parts(name: str, thing: object, parts: tuple[str, ...], otherwise: str) -> None:
    lacks = [part for part in parts if not callable(getattr(thing, part, None))]
    if lacks:
        raise ValueError(f"{name} must be {otherwise}, got {thing!r:.60}, which lacks {', '.join(lacks)}")


def check_count(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None:
            check_whole(name, value)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
