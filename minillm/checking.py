"""What options, shapes and arguments are held to: a ValueError names the value and the limit."""

from __future__ import annotations


def check_whole(name: str, value: object, at_least: int = 1) -> None:
    """ValueError unless value is an int (not a bool) of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} must be a whole number of at least {at_least}, got {value!r}")


def check_count(**values: int | None) -> None:
    """ValueError unless each is a whole number of at least 1, or None."""
    for name, value in values.items():
        if value is not None:
            check_whole(name, value)


def check_positive(name: str, value: object) -> None:
    """ValueError unless value is a finite number above 0."""
    # not 1e300 or more either: what is multiplied by it would not be finite
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r:.60}")


def check_share(name: str, value: object) -> None:
    """ValueError unless 0 < value <= 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_parts(name: str, thing: object, parts: tuple[str, ...], otherwise: str) -> None:
    """ValueError unless the thing has all these methods."""
    lacks = [part for part in parts if not callable(getattr(thing, part, None))]
    if lacks:
        raise ValueError(f"{name} must be {otherwise}, got {thing!r:.60}, which lacks {', '.join(lacks)}")
