"""These tests need a GPU that torch and Triton can use: `make gpu-check` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm import kernels

REASON = kernels.missing() or (
    "TRITON_INTERPRET is set: kernels would be interpreted" if kernels.interpreted()
    else None if torch.cuda.is_available()
    else "torch sees no GPU here"
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REASON:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def gpu() -> torch.device:
    torch.manual_seed(0)
    return torch.device("cuda")
