"""GPU, Triton, compiler, space, and the two roofs of this machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from minillm.course.doctor.finding import SET_UP, Finding, one_line
from minillm.course.doctor.software import declared_requirements

ENOUGH = 2e9  # bytes of disk and of memory: the default model in 32 bits takes 0.5e9 and its file 0.1e9


def check_gpu() -> Iterator[Finding]:
    """Whether torch sees a GPU and can use it, and if not, why."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    driver = bool(shutil.which("nvidia-smi")) or Path("/proc/driver/nvidia/version").exists()
    build = torch.version.cuda or torch.version.hip
    if available:
        name = torch.cuda.get_device_name(0)
        try:
            (torch.ones(1, device="cuda") + 1).item()
            yield Finding("OK", "gpu", f"{name}, {torch.cuda.device_count()} of them, torch for {build}")
        except RuntimeError as error:
            remedy = "install a torch that supports this GPU, or pass device='cpu'"
            yield Finding("FAIL", "gpu", f"{name} is there but cannot be used: {one_line(error)}", remedy)
    elif driver and not build:
        yield Finding("WARN", "gpu", "there is an NVIDIA driver, but this torch is a CPU build", "make clean, then make setup")
    elif driver:
        reason = one_line(said[0].message) if said else "torch gives no reason"
        yield Finding("WARN", "gpu", f"there is an NVIDIA driver, but torch {torch.__version__} cannot use it: {reason}",
                      "compare the driver's CUDA version (nvidia-smi) with torch's")
    else:
        why = "an Apple GPU is not used" if torch.backends.mps.is_available() else "no driver found"
        yield Finding("OK", "gpu", f"none ({why}); everything runs on the CPU")


def triton_mode() -> Literal["gpu", "interpreter", "none"]:
    """How Triton kernels run here: compiled on a GPU, in the interpreter (slow, for learning and tests), or not at all."""
    try:
        import torch
        import triton  # noqa: F401
    except KeyboardInterrupt:
        raise
    except BaseException:  # a broken package may raise anything
        return "none"
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return "interpreter"
    return "gpu"


def check_triton() -> Iterator[Finding]:
    mode = triton_mode()
    wanted = any(r.name == "triton" for r in declared_requirements().get("", ()))
    if mode == "gpu":
        yield Finding("OK", "triton mode", "kernels are compiled for the GPU")
    elif mode == "interpreter":
        yield Finding("OK", "triton mode", "interpreter: kernels give the right answer, slowly")
    elif wanted:
        yield Finding("WARN", "triton mode", "none, because triton does not import", SET_UP)
    else:
        here = f"{platform.system()} {platform.machine()}"
        yield Finding("OK", "triton mode", f"none on {here}: the lessons that need it show recorded output")


def check_compiler() -> Iterator[Finding]:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        command = shutil.which(name)
        try:  # on a Mac without its command line tools the command exists and only asks for them
            if command and subprocess.run([command, "--version"], capture_output=True, timeout=10).returncode == 0:
                yield Finding("OK", "compiler", command)
                return
        except (OSError, subprocess.SubprocessError):
            continue
    remedy = "xcode-select --install" if sys.platform == "darwin" else "install g++, e.g. sudo apt install g++"
    yield Finding("WARN", "compiler", "no C++ compiler; only compile=True needs one and does without", remedy)


def check_space() -> Iterator[Finding]:
    """Free disk where models and measurements are kept, and free memory."""
    import psutil

    from minillm.paths import cache_dir

    cache = cache_dir()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        yield Finding("WARN", "cache", f"{existing} cannot be written", "set MINILLM_CACHE to a folder of yours")
    enough = free >= ENOUGH
    remedy = f"free some space, or set MINILLM_CACHE to another disk than that of {cache}"
    yield Finding("OK" if enough else "WARN", "disk", f"{free / 1e9:.1f} GB free for {cache}", "" if enough else remedy)
    memory = psutil.virtual_memory()
    enough = memory.available >= ENOUGH
    detail = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    yield Finding("OK" if enough else "WARN", "memory", detail, "" if enough else "close other programs and notebooks")


def check_machine() -> Iterator[Finding]:
    """The two roofs of this machine, measured for a few seconds the first time."""
    from minillm.perf.hardware import fast_dtype, measure_machine, resolve_device

    for device in dict.fromkeys(("cpu", resolve_device().type)):
        machine = measure_machine(device)
        yield Finding("OK", device, machine.label)
        yield Finding("OK", "bandwidth", f"{machine.bandwidth / 1e9:.0f} GB/s over {machine.working_set / 1e6:.0f} MB")
        auto = str(fast_dtype(device)).removeprefix("torch.")
        for dtype, rate in machine.flops.items():
            choice = "; dtype='auto' picks it" if dtype == auto else ""
            detail = f"{rate / 1e9:.0f} GFLOP/s, ridge at {machine.ridge(dtype):.0f} FLOP per byte{choice}"
            yield Finding("OK", dtype, detail)
