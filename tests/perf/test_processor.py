"""What a CPU can multiply follows from its name and from what torch says of it."""

from __future__ import annotations

import pytest
import torch

from minillm.perf import processor


@pytest.mark.parametrize("machine, units, signs", [("x86_64", True, True), ("x86_64", False, False), ("aarch64", False, True)])
def test_x86_multiplies_two_bytes_with_signs_only_in_matrix_units(
    machine: str, units: bool, signs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.platform, "machine", lambda: machine)
    monkeypatch.setattr(processor, "has_matrix_units", lambda: units)
    assert processor.multiplies_signs.__wrapped__() is signs


def test_a_torch_that_cannot_be_asked_has_no_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert processor.has_matrix_units()
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert not processor.has_matrix_units()
