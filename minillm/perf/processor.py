"""What the CPU can multiply, from what torch and the system say of it. Nothing is timed."""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch


def says_yes(module: Any, question: str) -> bool:
    """Private torch queries come and go between versions: one that is missing counts as no."""
    ask = getattr(module, question, None)
    return bool(ask is not None and ask())


def has_matrix_units() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 in units of their own (Intel's AMX), rather than in its vector units."""
    return says_yes(torch.cpu, "_is_amx_tile_supported")


@cache
def multiplies_signs() -> bool:
    """Whether the CPU has a product of two bytes with signs: all but x86 processors without a matrix unit."""
    return platform.machine() not in ("x86_64", "AMD64") or has_matrix_units()
