"""Numbers as people read them."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_time(seconds: float) -> str:
    """Seconds in the unit that keeps three digits readable: 0.0123 -> '12.3 ms'."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0 s" if seconds == 0 else f"{_three_digits(seconds / 1e-9)} ns"


def format_bytes(n: float) -> str:
    """Bytes in decimal and binary units, because both are in use and differ by 7 %: '140 GB (130 GiB)'."""
    for exponent, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if n >= 1000**exponent:
            binary = "Ki" if prefix == "k" else prefix + "i"
            return f"{_three_digits(n / 1000**exponent)} {prefix}B ({_three_digits(n / 1024**exponent)} {binary}B)"
    return f"{n:g} B"


def format_rate(per_second: float, unit: str) -> str:
    """A rate in decimal units: format_rate(3.35e12, 'B/s') -> '3.35 TB/s'."""
    for exponent, prefix in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if per_second >= 1000**exponent:
            return f"{_three_digits(per_second / 1000**exponent)} {prefix}{unit}"
    return f"{_three_digits(per_second)} {unit}"


def format_count(x: float) -> str:
    """A number of things, three digits or all of its integer part: 1617.2 -> '1,617'."""
    return f"{x:,.0f}" if x >= 1000 else _three_digits(x)


def _three_digits(x: float) -> str:
    return f"{x:.2f}" if x < 9.995 else f"{x:.1f}" if x < 99.95 else f"{x:.0f}"
