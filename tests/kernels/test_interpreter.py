"""Runs the tests in ``interpreted/`` with Triton's interpreter on, in a process of their own: it is chosen when Triton is
imported, and other tests in this one may have done that. Three files at a time, as there are two cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minillm import kernels

HERE = Path(__file__).parent
FILES = (
    "test_attention.py", "test_engine.py", "test_fused.py",
    "test_matmul.py", "test_int8_matmul.py", "test_four_bit_model.py",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(kernels.missing() is not None, reason=str(kernels.missing()))
def test_kernels_equal_their_references_in_the_interpreter() -> None:
    assert {file.name for file in (HERE / "interpreted").glob("test_*.py")} == set(FILES)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for batch in (FILES[:3], FILES[3:]):
        runs = [
            subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "interpreted" / file)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip
            for file in batch
        ]
        outputs = [run.communicate()[0] for run in runs]
        for run, output, file in zip(runs, outputs, batch, strict=True):
            assert run.returncode == 0 and " passed" in output, f"{file}:\n{output[-6000:]}"
