"""Exercise 2.1 beyond what tests/notebooks proves of every exercise: what the planted fault breaks, and what it does not."""

from __future__ import annotations

import pytest
import torch

from minillm.course.checks import CheckFailed, check
from minillm.course.progress import Progress
from minillm.course.tasks.ex_2_1.broken import BREAK
from minillm.course.tasks.ex_2_1.stretch import STRETCH


@pytest.fixture
def store(tmp_path, monkeypatch) -> Progress:
    monkeypatch.setenv("MINILLM_PROGRESS_DIR", str(tmp_path / "progress"))
    return Progress(tmp_path / "progress")


def planted(x, codes, channel):
    token = (x.abs().amax() / 127).clamp(min=1e-12)
    return torch._int_mm((x / token).round().to(torch.int8), codes.t()).float() * token * channel


def test_the_fault_is_found_by_the_check_that_it_breaks(store):
    with pytest.raises(CheckFailed, match="tokens of all sizes"):
        check(BREAK, planted, progress=store)


def test_the_fault_makes_a_token_depend_on_its_batch_mates():
    codes, channel = torch.randint(-127, 128, (6, 32), dtype=torch.int8), torch.ones(6)
    x = torch.randn(3, 32)
    alone = planted(x[:1], codes, channel)
    x[2] *= 100
    assert (planted(x, codes, channel)[:1] - alone).abs().max() > 0.1 * alone.abs().max()


def test_the_oracle_of_the_stretch_saturates_instead_of_overflowing():
    from minillm.course.tasks.ex_2_1.stretch import _e4m3

    assert _e4m3(torch.tensor([500.0, float("inf"), -1e30, 0.3])).tolist() == [448.0, 448.0, -448.0, 0.3125]
    assert len(STRETCH.checks) == 8
