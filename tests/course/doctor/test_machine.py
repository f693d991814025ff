"""GPU, Triton, compiler, space and roofs: what is there, and why something is not used."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minillm.course.doctor import machine

Install = Callable[..., None]
Report = Callable[..., tuple[int, str]]
LineWith = Callable[[str, str], str]


def fake_torch(available: bool, cuda: str | None, broken: bool = False, mps: bool = False) -> SimpleNamespace:
    def ones(*_: object, **__: object) -> torch.Tensor:
        if broken:
            raise RuntimeError("no kernel image is available for execution on the device\nCompile with ...")
        return torch.ones(1)

    return SimpleNamespace(
        __version__="2.13.0", version=SimpleNamespace(cuda=cuda, hip=None), ones=ones,
        cuda=SimpleNamespace(is_available=lambda: available, get_device_name=lambda _: "A Card", device_count=lambda: 1),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: mps)),
    )


@pytest.mark.parametrize("found, driver, code, status, said", [
    (fake_torch(True, "13.0"), True, 0, "OK", "A Card"),
    (fake_torch(True, "13.0", broken=True), True, 1, "FAIL", "no kernel image"),
    (fake_torch(False, None), True, 0, "WARN", "CPU build"),
    (fake_torch(False, "13.0"), True, 0, "WARN", "cannot use it"),
    (fake_torch(False, None), False, 0, "OK", "no driver found"),
    (fake_torch(False, None, mps=True), False, 0, "OK", "an Apple GPU is not used"),
])
def test_gpu_line_says_what_there_is_and_why_it_is_not_used(
    report: Report, monkeypatch: pytest.MonkeyPatch, found: SimpleNamespace, driver: bool, code: int, status: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", found)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if driver and name == "nvidia-smi" else None)
    got, text = report(machine.check_gpu)
    assert got == code and text.startswith(status) and said in text


@pytest.mark.parametrize("gpu, interpret, mode", [(True, None, "gpu"), (True, "1", "interpreter"), (False, None, "interpreter")])
def test_triton_mode(monkeypatch: pytest.MonkeyPatch, gpu: bool, interpret: str | None, mode: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(gpu, "13.0"))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert machine.triton_mode() == mode


@pytest.mark.parametrize("wanted, status", [(False, "OK"), (True, "WARN")])
def test_no_triton_is_a_warning_only_where_there_should_be_one(
    report: Report, install: Install, monkeypatch: pytest.MonkeyPatch, wanted: bool, status: str
) -> None:
    install("minillm", "0.1.0", requires=("triton>=3",) if wanted else ())
    monkeypatch.setitem(sys.modules, "triton", None)
    code, text = report(machine.check_triton)
    assert code == 0 and text.startswith(status) and "none" in text


def test_no_compiler_is_a_warning(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    code, text = report(machine.check_compiler)
    assert code == 0 and text.startswith("WARN  compiler") and "compile=True" in text


def test_compiler_that_only_asks_to_be_installed_is_none(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "clang++"
    stub.write_text("#!/bin/sh\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert report(machine.check_compiler)[1].startswith("WARN")


def test_full_disk_and_full_memory_are_warnings_with_numbers(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3e8))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=5e8, total=8e9))
    code, text = report(machine.check_space)
    assert code == 0 and text.count("WARN") == 2 and "0.3 GB free" in text and "0.5 of 8.0 GB free" in text


def test_machine_card_gives_bandwidth_and_a_ridge_for_each_dtype(
    report: Report, line_with: LineWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minillm.perf import hardware

    measured = hardware.Machine(
        name="box", bandwidth=20e9, flops={"float32": 200e9, "bfloat16": 500e9}, memory=16e9, source="here",
        label="Some CPU, 2 cores", threads=2, working_set=269_000_000, curve=((269_000_000, 20e9),),
    )
    monkeypatch.setattr(hardware, "measure_machine", lambda *_: measured)
    monkeypatch.setattr(hardware, "resolve_device", lambda *_: SimpleNamespace(type="cpu"))
    code, text = report(machine.check_machine)
    assert code == 0 and "Some CPU, 2 cores" in text and "20 GB/s over 269 MB" in text
    assert "200 GFLOP/s, ridge at 10 FLOP per byte" in line_with(text, "float32")
    assert "500 GFLOP/s, ridge at 25 FLOP per byte" in line_with(text, "bfloat16")
