"""How many rows each expert got in a step: what decides the bytes that a mixture of experts reads."""

from __future__ import annotations

import torch
from torch import Tensor


class ExpertLoads:
    """Notes of one step, made while the model runs. A step that is run again overwrites its notes."""

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}

    def note(self, layer: int, counts: Tensor) -> None:
        """counts [experts]: rows that each expert of that layer got."""
        self._counts[layer] = counts

    def __bool__(self) -> bool:
        return bool(self._counts)

    def counts(self) -> dict[int, list[int]]:
        """{layer: rows of each expert}, fetched from the device at once."""
        if not self._counts:
            return {}
        return dict(zip(self._counts, torch.stack(list(self._counts.values())).tolist(), strict=True))
