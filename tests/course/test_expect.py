from __future__ import annotations

import numpy as np
import pytest
import torch

from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_raises, expect_shape, unchanged

T = torch.tensor


@pytest.mark.parametrize(
    ("got", "expected", "says"),
    [
        (T([1.0, 2.0, 9.0]), T([1.0, 2.0, 3.0]), "first wrong element [2]: got 9, expected 3 (1 of 3 differ)"),
        (T([[1, 2], [3, 4]]), T([[1, 2], [0, 0]]), "first wrong element [1, 0]: got 3, expected 0 (2 of 4 differ)"),
        (T([1.0, float("nan")]), T([1.0, 2.0]), "[1]: got nan, expected 2"),
        (T([float("inf")]), T([-float("inf")]), "[0]: got inf, expected -inf"),
        (T([float("inf")]), T([1.0]), "got inf"),
        (None, T([1.0]), "got None (does your function return its result?), expected a float32 tensor of shape [1]"),
        ([1.0], T([1.0]), "got a list of 1, expected a float32 tensor"),
        (np.ones(1), torch.ones(1), "got a float64 numpy array of shape [1]"),
        (torch.ones(2, 3), torch.ones(3, 2), "got shape [2, 3], expected [3, 2]"),
        (torch.ones(1, dtype=torch.float16), torch.ones(1), "got a float16 tensor"),
        (T([2**60 + 1]), T([2**60]), f"got {2**60 + 1}, expected {2**60}"),
        (T(True), T(False), "got True, expected False"),
        (T(3), 3, "got an int64 tensor of shape [], expected the number 3; .item()"),
        (True, 1, "expected the number 1"),
        ("3", 3, "got a str of 1, expected the number 3"),
        ([1, 2], [1, 2, 3], "got 2 elements, expected 3; first missing: [2], 3"),
        ([3], [3, 2], "got 1 element, expected 2; first missing: [1], 2; in all: got [3], expected [3, 2]"),
        ([4], [2], "element [0]: got 4, expected 2; in all: got [4], expected [2]"),
        ([1, 2, 3], [1, 2], "first too many: [2], 3"),
        ((1,), [1], "got a tuple of 1, expected a list of 1"),
        ([1, [2, 5]], [1, [2, 3]], "element [1][1]: got 5, expected 3"),
        ({"a": 1}, {"a": 1, "b": 2}, "key 'b' is missing"),
        ({"a": 1, "c": 0}, {"a": 1}, "key 'c' should not be there"),
        ("abc", "abd", "got 'abc', expected 'abd'"),
        (0, None, "got 0, expected None"),
    ],
)
def test_a_difference_is_named(got, expected, says):
    with pytest.raises(Mismatch) as caught:
        expect_equal(got, expected)
    assert says.replace("an int64", "a int64") in str(caught.value).replace("an int64", "a int64")


@pytest.mark.parametrize(
    "value",
    [
        T([1.0, float("nan"), float("inf")]),
        torch.zeros(0),
        T([1, 2]),
        [1, (2.0, None)],
        {"a": T(1.5)},
        "x",
        None,
        3,
        2.5,
        np.arange(3),
    ],
)
def test_equal_values_pass(value):
    expect_equal(value, value)


def test_tolerance_is_absolute_plus_relative_and_is_shown():
    expect_equal(T([100.5]), T([100.0]), rtol=0.01)
    expect_equal(T([101]), T([100]), atol=1)
    with pytest.raises(Mismatch, match="tolerance 1"):
        expect_equal(T([102.0]), T([100.0]), rtol=0.01)
    with pytest.raises(Mismatch, match="got nan"):
        expect_equal(T([float("nan")]), T([1.0]), atol=1e9)


def test_sixteen_bit_and_gradients_are_compared_exactly():
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    expect_equal(x, torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(Mismatch, match="1.00781"):
        expect_equal(x + 2**-7, torch.ones(2, dtype=torch.bfloat16))


def test_numbers_may_differ_in_kind():
    expect_equal(3.0, 3)
    expect_equal(np.int64(3), 3)


def test_shape_with_a_free_size():
    expect_shape(torch.ones(5, 2), [-1, 2])
    with pytest.raises(Mismatch, match=r"got shape \[5, 2\], expected \[-1, 3\]"):
        expect_shape(torch.ones(5, 2), [-1, 3])
    with pytest.raises(Mismatch, match="got dtype float32, expected int64"):
        expect_shape(torch.ones(1), [1], torch.int64)


def test_changed_inputs_are_caught_in_tensors_lists_and_dicts():
    for value, change in (
        (torch.ones(2), lambda v: v.add_(1)),
        ([1, 2], lambda v: v.append(3)),
        ({"a": [1]}, lambda v: v["a"].append(2)),
        (torch.ones(2), lambda v: v.resize_(1)),
    ):
        with pytest.raises(Mismatch, match="your code changed its input k"), unchanged(k=value):
            change(value)
    with unchanged(torch.ones(2), [1]):
        pass


def test_an_error_inside_unchanged_is_the_error_that_is_seen():
    with pytest.raises(KeyError), unchanged(k=torch.ones(1)):
        raise KeyError("mine")


def test_expected_exceptions():
    expect_raises(ValueError, lambda: int("x"))
    with pytest.raises(Mismatch, match="returned 3, expected it to raise ValueError"):
        expect_raises(ValueError, lambda: 3)
    with pytest.raises(Mismatch, match="raised KeyError"):
        expect_raises(ValueError, lambda: {}["a"])
    with pytest.raises(NotImplementedError):
        expect_raises(ValueError, lambda: (_ for _ in ()).throw(NotImplementedError("exercise")))


def test_budget():
    expect_at_most(10, 10, "passes")
    with pytest.raises(Mismatch, match="bytes: 2,048 used, the budget is 1,024"):
        expect_at_most(2048, 1024, "bytes")
