"""Kernels compile for GPUs that are not here, without a spill, and what the compiler says is read right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minillm import kernels
from minillm.kernels import interpreted

if kernels.missing() or interpreted():
    pytest.skip(kernels.missing() or "kernels are interpreted in this process", allow_module_level=True)

from minillm.cli import main
from minillm.kernels import aot
from minillm.kernels.aot import BY_NAME, TARGETS, Compiled, amd_resources, compile_all, occupancy, render
from minillm.kernels.launches import MODULES, cases, recording


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_kernel_compiles_without_a_spill(target: aot.Target) -> None:
    results = compile_all([target])
    assert [r for r in results if not r.good] == []
    assert {r.kernel for r in results} == {
        "flash_prefill", "paged_decode", "merge", "rms_norm", "rope_store", "swiglu", "w4a16", "sum_parts", "dequantise",
        "int8", "round_rows",
    }  # fmt: skip
    products = [r for r in results if r.kernel in ("flash_prefill", "paged_decode", "w4a16", "int8")]
    assert len(products) >= 12 and all(r.tensor_cores for r in products), "a product does not use the matrix units"
    assert all(r.occupancy > 0 and r.registers > 0 for r in results)


def test_every_kernel_of_every_module_is_a_case() -> None:
    import importlib

    from triton.runtime.jit import JITFunction

    found = {
        value.__name__
        for module in MODULES
        for name, value in vars(importlib.import_module(f"minillm.kernels.{module}")).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }
    launched = set()
    for call in cases(wide=False).values():
        with recording() as launches:
            call()
        launched |= {launch.kernel.__name__ for launch in launches}
    assert launched == found


def test_recording_puts_the_kernels_back() -> None:
    from minillm.kernels import fused

    before = fused.swiglu_kernel
    with pytest.raises(RuntimeError), recording():
        assert fused.swiglu_kernel is not before
        raise RuntimeError
    assert fused.swiglu_kernel is before


def test_a_tile_that_is_too_large_is_seen_to_spill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from minillm.kernels import flash_prefill

    huge = flash_prefill.Tile(128, 128, 4, 2)
    monkeypatch.setattr(flash_prefill, "prefill_tile", lambda *shape: huge)
    monkeypatch.setattr(aot, "cases", lambda wide, every=cases: {"D=64": every(wide)["D=64"]})
    assert main(["kernels", "--target", "sm_80", "--kernel", "flash"]) == 1
    assert "flash_prefill (D=64) on sm_80: spills" in capsys.readouterr().out


def test_a_kernel_that_does_not_compile_is_reported_with_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from minillm.kernels import flash_prefill

    odd = flash_prefill.Tile(48, 32, 4, 2)  # tl.arange takes powers of two
    monkeypatch.setattr(flash_prefill, "prefill_tile", lambda *shape: odd)
    monkeypatch.setattr(aot, "cases", lambda wide, every=cases: {"D=64": every(wide)["D=64"]})
    assert main(["kernels", "--target", "sm_90"]) == 1
    assert "0 of 1 compile without a spill" in capsys.readouterr().out


def test_table_and_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--target", "sm_90", "--kernel", "swiglu", "--json", str(tmp_path / "k.json")]) == 0
    (entry,) = json.loads((tmp_path / "k.json").read_text())["kernels"]
    line = capsys.readouterr().out.splitlines()[1].split()
    assert entry["kernel"] == line[0] == "swiglu" and entry["target"] == "sm_90" and str(entry["registers"]) in line
    assert entry["spills"] == 0 and entry["tensor_cores"] == ""


def test_a_name_that_no_kernel_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--kernel", "nonsense"]) == 2
    assert "no kernel has 'nonsense' in its name" in capsys.readouterr().err


def test_interpreting_and_compiling_in_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_all()


@pytest.mark.parametrize(
    "target, registers, shared, warps, share",
    [
        ("sm_80", 32, 0, 4, 1.0),  # 2048 threads of 32 registers: all of them
        ("sm_80", 255, 0, 4, 8 / 64),  # 256 · 32 · 4 registers a program, two fit
        ("sm_90", 64, 100 * 1024, 4, 8 / 64),  # two programs' shared memory fits
        ("sm_90", 32, 0, 1, 32 / 64),  # no more than 32 programs
        ("gfx942", 128, 0, 4, 16 / 32),  # four waves on each of four SIMDs
        ("gfx942", 64, 40 * 1024, 4, 4 / 32),
    ],
)
def test_occupancy_of_small_cases(target: str, registers: int, shared: int, warps: int, share: float) -> None:
    assert occupancy(BY_NAME[target], registers, shared, warps) == share


def test_amd_counts_are_the_largest_of_the_file() -> None:
    assert amd_resources(".vgpr_count:  12\n.vgpr_spill_count: 0\n.vgpr_count: 40\n.vgpr_spill_count: 3\n") == (40, 3)
    with pytest.raises(RuntimeError, match="no register counts"):
        amd_resources("nothing")


def test_an_error_takes_the_place_of_the_numbers_in_the_table() -> None:
    text = render([Compiled("a", "b", "sm_80", error="CompilationError: no"), Compiled("c", "d", "sm_90", 4, 30, 0, 2048)])
    assert "CompilationError: no" in text.splitlines()[1] and "2,048" in text.splitlines()[2]


def test_everything_else_is_imported_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import minillm.llm, minillm.cli, minillm.attention.triton_backend, minillm.kernels\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
