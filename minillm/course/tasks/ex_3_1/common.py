"""Attention in float64 and a counter of what is made, for the tasks of exercise 3.1."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last len(q) of len(k) tokens, one query and head at a time, in float64: [new, heads, dim]."""
    new, heads, dim = q.shape
    group, out = heads // k.shape[1], torch.empty(q.shape, dtype=torch.float64)
    for i in range(new):
        seen = len(k) - new + i + 1
        for h in range(heads):
            keys, values = k[:seen, h // group].double(), v[:seen, h // group].double()
            out[i, h] = (keys @ q[i, h].double() / math.sqrt(dim)).softmax(0) @ values
    return out.to(q.dtype)


class Largest(TorchDispatchMode):
    """Notes the most elements that any tensor made while it is active has, and counts operations; views of a given tensor are
    free."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        given = {t.untyped_storage().data_ptr() for a in args for t in (a if isinstance(a, (list, tuple)) else [a])
                 if isinstance(t, Tensor)}  # fmt: skip
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, made.numel())
        return result
