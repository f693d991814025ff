"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): round column after column, and let the columns to come make up for the error."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.quant.calibrate import Seen
from minillm.quant.grid import Codes, choose_grid, group_size, quantise, to_codes

DAMPING = 0.01
LEAF = 8
"""Columns that are rounded one by one; errors of more are spread by matrix products."""


def gptq(weight: Tensor, seen: Seen, bits: int, group: int, symmetric: bool, name: str = "the weight") -> Codes:
    """weight [out, in] → codes whose products with the inputs seen are close to the weight's.

    The loss of a row with error e is eᵀ H e, where H is the Gram matrix of the inputs. When column j has been rounded, the best
    change of the columns after it is -error_j / U_jj · U_j, with U the upper Cholesky factor of H⁻¹. Where the result loses to
    rounding to nearest on the inputs seen (the update is greedy, that can happen), rounding to nearest is returned.
    """
    size = group_size(weight.shape[1], group, name)
    nearest = quantise(weight, bits, group, symmetric, name)
    factor = _inverse_factor(seen.gram)
    columns = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32).T.contiguous()  # [in, out]
    factor = factor.to(columns.dtype)
    codes = torch.empty_like(columns, dtype=torch.uint8)
    scales, zeros = [], []
    for start in range(0, len(columns), size):
        scale, zero = choose_grid(columns[start : start + size].T, bits, symmetric)
        scales.append(scale)
        zeros.append(zero)
        stop = start + size
        errors = _round_columns(columns, codes, scale.squeeze(1), zero.squeeze(1), factor, start, stop, bits)
        columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    found = Codes(codes.T.contiguous(), torch.cat(scales, 1), torch.cat(zeros, 1), bits)
    better = seen.loss(weight, found.dequantise(weight.dtype)) <= seen.loss(weight, nearest.dequantise(weight.dtype))
    return found if better else nearest


def _inverse_factor(gram: Tensor) -> Tensor:
    """U, upper triangular, with UᵀU the inverse of the damped Gram matrix H; float64. A channel that never fires gets weight 1.

    With H = RRᵀ, R upper triangular, U is R's inverse; R is the Cholesky factor of H read backwards."""
    hessian = gram.double().clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += DAMPING * diagonal.mean()
    backwards = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(backwards, torch.eye(len(gram), dtype=torch.float64, device=gram.device), upper=True)


def _round_columns(
    columns: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, first: int, last: int, bits: int
) -> Tensor:
    """Round columns first … last - 1, each after the errors before it. Returns errors [last - first, out]."""
    if last - first > LEAF:
        middle = (first + last) // 2
        left = _round_columns(columns, codes, scale, zero, factor, first, middle, bits)
        columns[middle:last].addmm_(factor[first:middle, middle:last].T, left, alpha=-1)
        return torch.cat([left, _round_columns(columns, codes, scale, zero, factor, middle, last, bits)])
    errors = torch.empty_like(columns[first:last])
    for j in range(first, last):
        codes[j] = to_codes(columns[j], scale, zero, bits)
        rounded = (codes[j].to(columns.dtype) - zero) * scale
        error = (columns[j] - rounded) / factor[j, j]
        columns[j + 1 : last].addr_(factor[j, j + 1 : last], error, alpha=-1)
        errors[j - first] = error
    return errors
