"""Matrices of whole numbers, for the tasks of exercise 2.1."""

from __future__ import annotations

import torch
from torch import Tensor


def whole_numbers(rows: int, width: int) -> Tensor:
    """Whole numbers of up to 127, with 127 in every row: codes under a scale of 1."""
    made = torch.randint(-127, 128, (rows, width)).float()
    made[:, 0] = 127
    return made
