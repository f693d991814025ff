"""Arguments are refused by name, value and limit."""

import math

import pytest

from minillm.checking import check_positive, check_share, check_whole


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "3", None])
def test_whole_numbers_are_checked_by_name_and_value(bad):
    with pytest.raises(ValueError, match=r"batch must be a whole number of at least 1, got "):
        check_whole("batch", bad)


@pytest.mark.parametrize("bad", [0, -0.5, math.inf, math.nan, True, "1", 10**400, 1e301])
def test_positive_numbers_are_checked_by_name_and_value(bad):
    with pytest.raises(ValueError, match="bandwidth must be a finite number above 0, got "):
        check_positive("bandwidth", bad)


@pytest.mark.parametrize("bad", [0, 1.01, math.nan, True])
def test_shares_lie_above_zero_and_up_to_one(bad):
    with pytest.raises(ValueError, match="usable must be above 0 and at most 1"):
        check_share("usable", bad)
    check_share("usable", 1)
