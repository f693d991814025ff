"""8-bit products and the rounding of tokens against whole numbers and the engine's own rounding."""

from __future__ import annotations

import pytest
import torch

from minillm.kernels.int8_matmul import int8_matmul, int8_tile, round_rows, work
from minillm.quant.w8a8 import SMALLEST, W8A8Linear, quantise_rows


def codes(rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    made = torch.randint(-127, 128, (rows, width), generator=generator, dtype=torch.int8)
    made[0] = 127
    return made


@pytest.mark.parametrize("rows", [0, 1, 15, 17, 65, 130])
@pytest.mark.parametrize("k, n", [(64, 16), (100, 37), (129, 130), (1, 1), (300, 64)])
def test_products_are_exact_at_any_shape(rows: int, k: int, n: int) -> None:
    x, w, channel = codes(max(rows, 1), k)[:rows], codes(n, k), torch.rand(n) + 0.5
    got = int8_matmul(x, w, channel, torch.float32)
    assert torch.equal(got, (x.long() @ w.long().t()).float() * channel)


def test_rows_that_are_not_contiguous_and_half_precision() -> None:
    wide, w, channel = codes(5, 200), codes(24, 64), torch.full((24,), 2.0**-8)
    for x in (wide[:, 3:67], wide[::2, 128:192], codes(64, 5).t()):
        expected = (x.long() @ w.long().t()).float() * channel
        torch.testing.assert_close(int8_matmul(x, w, channel, torch.float16), expected.half())


def test_sums_beyond_what_a_float_holds_are_exact() -> None:
    x, w = torch.full((1, 4096), 127, dtype=torch.int8), torch.full((2, 4096), 127, dtype=torch.int8)
    x[0, 0] = 126
    assert int8_matmul(x, w, torch.ones(2), torch.float32)[0, 0].item() == pytest.approx(4096 * 127**2 - 127, abs=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("k", [1, 16, 100, 1024, 1500])
def test_tokens_are_rounded_as_the_engine_rounds_them(dtype: torch.dtype, k: int) -> None:
    x = torch.randn(6, k, generator=torch.Generator().manual_seed(k)).to(dtype)
    x[1], x[2] = 0, x[2, 0]
    x[3, k // 2] *= 50
    got, scales = round_rows(x, SMALLEST)
    expected, expected_scales = quantise_rows(x)
    assert torch.equal(scales, expected_scales)
    assert (got.int() - expected.int()).abs().max() <= 1  # a reciprocal may differ in its last bit
    assert (got != expected).float().mean() < 0.01


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_token_that_is_not_finite_has_a_scale_that_is_not(bad: float) -> None:
    x = torch.randn(3, 40)
    x[1, 39] = bad
    got, scales = round_rows(x, SMALLEST)
    assert not scales[1].isfinite() and scales[[0, 2]].isfinite().all()
    assert torch.equal(got[[0, 2]], round_rows(x[[0, 2]], SMALLEST)[0])


def test_tokens_of_a_strided_view() -> None:
    wide = torch.randn(4, 90)
    for x in (wide[:, 7:47], wide[::2], torch.randn(40, 3).t()):
        assert torch.equal(round_rows(x, SMALLEST)[0], round_rows(x.contiguous(), SMALLEST)[0])
    assert round_rows(wide[:0], SMALLEST)[0].shape == (0, 90)


def test_a_layer_runs_on_the_kernel_and_gives_what_the_others_give() -> None:
    x, weight, bias = torch.randn(9, 96), torch.randn(20, 96), torch.randn(20)
    results = []
    for gemm in ("triton", "float"):
        method = W8A8Linear(gemm)
        results.append(method.apply(method.pack(weight, bias), x))
    assert torch.equal(*results)


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, w, channel = codes(2, 64), codes(8, 64), torch.ones(8)
    for arguments, named in (
        ((x[:, :60], w, channel), "do not fit"),
        ((x, w, channel[:7]), "do not fit"),
        ((x.float(), w, channel), "must be int8"),
        ((torch.zeros(1, 133_145, dtype=torch.int8), torch.zeros(1, 133_145, dtype=torch.int8), channel[:1]), "at most 133144"),
    ):
        with pytest.raises(ValueError, match=named):
            int8_matmul(*arguments, torch.float32)


def test_tiles_grow_with_the_rows_and_work_counts_bytes_of_one() -> None:
    assert [int8_tile(rows).m for rows in (1, 16, 17, 64, 65, 4096)] == [16, 16, 64, 64, 128, 128]
    counted = work(4, 64, 32, 2)
    assert counted.flops == {"int8": 2 * 4 * 64 * 32} and counted.weight_bytes == 32 * 68
    assert counted.activation_bytes == 4 * (2 * 64 * 2 + 64 + 4) + 4 * (64 + 32 * 2)
    assert work(0, 64, 32, 2).total_bytes == 0
