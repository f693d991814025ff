"""4-bit products against the dense weight that the same codes, zeros and scales spell out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.kernels.matmul import MAX_ROWS, choose_splits, dequantise, matmul_tile, w4a16_matmul, work

NIBBLE_OF_COLUMN = [0, 4, 1, 5, 2, 6, 3, 7]


def pack(codes: Tensor) -> Tensor:
    """codes [rows, columns] 0 … 15 → [rows, columns / 8] int32 in AutoAWQ's order, one nibble at a time."""
    rows, columns = codes.shape
    words = [[0] * (columns // 8) for _ in range(rows)]
    for r in range(rows):
        for c in range(columns):
            words[r][c // 8] |= int(codes[r, c]) << 4 * NIBBLE_OF_COLUMN[c % 8]
    return torch.tensor([[w - 2**32 if w >= 2**31 else w for w in row] for row in words], dtype=torch.int32)


def make(k: int, n: int, group: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qweight, scales, qzeros, and the dense weight [k, n]."""
    generator = torch.Generator().manual_seed(k + n)
    length = k if group == -1 else group
    codes, zeros = (torch.randint(0, 16, (rows, n), generator=generator) for rows in (k, k // length))
    scales = (torch.rand(k // length, n, generator=generator) + 0.1).to(dtype)
    dense = (codes - zeros.repeat_interleave(length, 0)) * scales.repeat_interleave(length, 0)
    return pack(codes), scales, pack(zeros), dense


SHAPES = [(32, 8, 16), (64, 24, 32), (96, 136, 48), (128, 40, 64), (256, 16, 128), (80, 40, -1), (192, 32, 96)]


@pytest.mark.parametrize("k, n, group", SHAPES)
def test_unpacked_weight_is_exact(k: int, n: int, group: int) -> None:
    qweight, scales, qzeros, dense = make(k, n, group)
    assert torch.equal(dequantise(qweight, scales, qzeros, group), dense)


@pytest.mark.parametrize("k, n, group", SHAPES)
@pytest.mark.parametrize("rows", [1, 17])
def test_product_is_that_of_the_dense_weight(k: int, n: int, group: int, rows: int) -> None:
    qweight, scales, qzeros, dense = make(k, n, group)
    x, bias = torch.randn(rows, k), torch.randn(n)
    expected = x.double() @ dense.double()
    torch.testing.assert_close(w4a16_matmul(x, qweight, scales, qzeros, group).double(), expected, rtol=1e-5, atol=1e-3)
    for splits in (1, 2, 3):
        got = w4a16_matmul(x, qweight, scales, qzeros, group, bias, num_splits=splits)
        torch.testing.assert_close(got.double(), expected + bias, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rows", [0, 16, 33, MAX_ROWS, MAX_ROWS + 1])
def test_any_number_of_rows(rows: int) -> None:
    qweight, scales, qzeros, dense = make(64, 24, 32)
    x = torch.randn(rows, 64)
    got = w4a16_matmul(x, qweight, scales, qzeros, 32, torch.ones(24))
    torch.testing.assert_close(got, x @ dense + 1, rtol=1e-4, atol=1e-3)


def test_half_precision_and_rows_that_are_not_contiguous() -> None:
    qweight, scales, qzeros, dense = make(64, 24, 32, torch.float16)
    wide = torch.randn(3, 200).half()
    for x in (wide[:, 3:67], wide[:, 128:192], torch.randn(64, 3).half().T):
        expected = x.double() @ dense.double()
        torch.testing.assert_close(w4a16_matmul(x, qweight, scales, qzeros, 32).double(), expected, rtol=4e-3, atol=4e-2)


def test_each_column_comes_from_its_own_nibble_also_where_the_word_is_negative() -> None:
    codes = torch.zeros(16, 8, dtype=torch.int64)
    codes[0] = torch.arange(8, 16)  # every nibble's top bit is set
    qweight = pack(codes)
    assert qweight[0, 0] < 0
    one, zero = torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.int32)
    assert dequantise(qweight, one, zero, -1)[0].tolist() == list(range(8, 16))
    x = torch.zeros(1, 16)
    x[0, 0] = 1
    assert w4a16_matmul(x, qweight, one, zero, -1)[0].tolist() == list(range(8, 16))


@pytest.mark.parametrize("group, named", [(24, "24"), (8, "8"), (0, "0"), (128, "128"), (-2, "-2")])
def test_a_group_that_does_not_fit_is_refused(group: int, named: str) -> None:
    qweight, scales, qzeros, _ = make(64, 24, 32)
    with pytest.raises(ValueError, match=f"multiple of 16 that divides the 64 inputs, got {named}"):
        w4a16_matmul(torch.randn(1, 64), qweight, scales, qzeros, group)


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    qweight, scales, qzeros, _ = make(64, 24, 32)
    x = torch.randn(1, 64)
    for arguments, named in (
        ((x, qweight, scales[:1], qzeros), "scales must be"),
        ((x, qweight, scales, qzeros[:, :1]), "qzeros must be"),
        ((x[:, :60], qweight, scales, qzeros), r"x must be \[rows, 64\]"),
    ):
        with pytest.raises(ValueError, match=named):
            w4a16_matmul(*arguments, 32)


def test_a_few_rows_are_split_until_the_processors_are_busy() -> None:
    tile = matmul_tile(1, 128)
    assert choose_splits(1, 8192, 8192, 128, tile, 132) == 5
    assert choose_splits(1, 50_000, 8192, 128, tile, 132) == 1
    assert choose_splits(1, 128, 1024, 128, tile, 132) == 2  # parts of at least 512


def test_work_counts_a_quarter_of_the_bytes_and_all_of_the_arithmetic() -> None:
    counted = work(1, 8192, 8192, 128, 2, "bfloat16")
    assert counted.flops == {"bfloat16": 2 * 8192 * 8192} and counted.launches == 1
    assert counted.weight_bytes == 8192 * 8192 // 2 + 64 * 8192 // 2 + 64 * 8192 * 2
    assert work(0, 64, 64, 16, 2, "float16").total_bytes == 0
    many = work(MAX_ROWS + 1, 8192, 8192, 128, 2, "bfloat16")
    assert many.activation_bytes > 2 * 8192 * 8192 * 2
