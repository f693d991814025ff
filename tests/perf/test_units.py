"""Numbers as people read them."""

import pytest

from minillm.perf.units import format_bytes, format_count, format_rate, format_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (4e-9, "4.00 ns"), (2.5e-5, "25.0 µs"), (0.0123, "12.3 ms"), (0.276, "276 ms"), (1.5, "1.50 s"), (90, "90.0 s")],
)
def test_time_keeps_three_digits(seconds, text):
    assert format_time(seconds) == text


def test_gb_and_gib_are_both_printed_and_differ():
    assert format_bytes(140e9) == "140 GB (130 GiB)"
    assert format_bytes(2**31) == "2.15 GB (2.00 GiB)"
    assert format_bytes(23_040) == "23.0 kB (22.5 KiB)"
    assert format_bytes(999) == "999 B"


def test_rates_and_counts_are_decimal():
    assert format_rate(3.35e12, "B/s") == "3.35 TB/s"
    assert format_rate(1.979e15, "FLOP/s") == "1.98 PFLOP/s"
    assert format_rate(5, "B/s") == "5.00 B/s"
    assert format_count(1617.2) == "1,617"
    assert format_count(51.5) == "51.5"
