"""Triton kernels. Nothing here is imported until a kernel is asked for: the rest of minillm runs where there is no Triton."""

from __future__ import annotations

import importlib.util
import os
import sys


def interpreted() -> bool:
    """Whether Triton was told to run kernels as NumPy on the CPU (TRITON_INTERPRET=1, read when the kernels are imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def missing() -> str | None:
    """Why no Triton kernel can be compiled here, and what to do; None where Triton is installed."""
    if importlib.util.find_spec("triton") is not None:
        return None
    if sys.platform != "linux":
        return f"Triton has no build for {sys.platform}; on Windows use WSL2, elsewhere leave attention_backend='torch'"
    return "Triton is not installed: pip install 'triton>=3.6,<3.10'"
