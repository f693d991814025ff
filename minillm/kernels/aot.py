"""Compile every kernel for GPUs that are not here, and read from the result what it would cost there: `minillm kernels`.

What is compiled are the launches that the engine's own functions ask for (launches.py): what is reported is what would run.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterable, Sequence

import torch

from minillm import kernels
from minillm.kernels.launches import Launch, cases, recording
from minillm.perf.units import KIB

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
}


@dataclass(frozen=True)
class Target:
    """A chip. registers: 32-bit registers of a processor (NVIDIA: SM), or per lane of one of its four SIMDs (AMD). shared: bytes
    that a processor has for all its programs. warps: that it keeps resident at most. From NVIDIA's CUDA C++ Programming Guide
    (compute capabilities) and AMD's CDNA3 instruction set guide."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    registers: int
    shared: int
    warps: int
    wide: bool = False  # see flash_prefill.prefill_tile


TARGETS = (
    Target("sm_80", "cuda", 80, 32, 65_536, 164 * KIB, 64),  # A100
    Target("sm_90", "cuda", 90, 32, 65_536, 228 * KIB, 64, wide=True),  # H100, H200
    Target("sm_100", "cuda", 100, 32, 65_536, 228 * KIB, 64, wide=True),  # B200
    Target("gfx942", "hip", "gfx942", 64, 512, 64 * KIB, 32),  # MI300
)
BY_NAME = {target.name: target for target in TARGETS}


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one kernel for one target. error: why it did not compile, everything else is then 0.

    registers: per thread. spills: bytes per thread (NVIDIA) or registers (AMD) that did not fit and go through memory. shared:
    bytes per program. tensor_cores: the matrix instruction in use, "" if none. occupancy: share of a processor's warps that
    registers and shared memory let be resident.
    """

    kernel: str
    case: str
    target: str
    warps: int = 0
    registers: int = 0
    spills: int = 0
    shared: int = 0
    tensor_cores: str = ""
    occupancy: float = 0.0
    error: str = ""

    @property
    def good(self) -> bool:
        return not self.error and not self.spills


def compile_launch(launch: Launch, case: str, target: Target) -> Compiled:
    """Compile one recorded launch as Triton would specialise it for these arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(i,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    name = launch.kernel.__name__.removesuffix("_kernel")
    try:
        source = ASTSource(launch.kernel, signature, constants, attributes)
        made = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=launch.options)
    except Exception as error:  # the compiler's own errors have no common type
        return Compiled(name, case, target.name, error=f"{type(error).__name__}: {error}".split("\n")[0])
    warps, shared = int(made.metadata.num_warps), int(made.metadata.shared)
    if target.backend == "cuda":
        registers, spills = nvidia_resources(made.asm["cubin"])
        code = made.asm["ptx"]
        cores = next((one for one in ("tcgen05.mma", "wgmma.mma_async", "mma.sync") if one in code), "")
    else:
        registers, spills = amd_resources(made.asm["amdgcn"])
        cores = "v_mfma" if "v_mfma" in made.asm["amdgcn"] else ""
    fits = occupancy(target, registers, shared, warps)
    return Compiled(name, case, target.name, warps, registers, spills, shared, cores, fits)


def nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, which is where spilled ones go, read by the cuobjdump in Triton's package."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text[:200]!r}")
    return int(found[1]), int(found[2])


def amd_resources(code: str) -> tuple[int, int]:
    """Vector registers of a lane and how many were spilled, from the notes in the assembly text."""
    numbers = {key: [int(n) for n in re.findall(rf"\.{key}:\s+(\d+)", code)] for key in ("vgpr_count", "vgpr_spill_count")}
    if not all(numbers.values()):
        raise RuntimeError("the AMD assembly has no register counts")
    return max(numbers["vgpr_count"]), max(numbers["vgpr_spill_count"])


def occupancy(target: Target, registers: int, shared: int, warps: int) -> float:
    """Resident warps over the most that the processor can hold, as registers and shared memory allow. NVIDIA hands registers
    out in units of 256 a warp and keeps 1 KiB of shared memory per program for itself; AMD in units of 8 per lane."""
    if target.backend == "cuda":
        per_warp = -(-max(registers, 1) * target.warp_size // 256) * 256
        programs = min(target.registers // (per_warp * warps), target.warps // warps, 32)
        programs = min(programs, target.shared // (shared + KIB))
    else:
        waves = 4 * min(target.warps // 4, target.registers // (-(-max(registers, 1) // 8) * 8))
        programs = min(waves // warps, target.shared // shared if shared else waves)
    return programs * warps / target.warps


def compile_all(targets: Iterable[Target] = TARGETS, only: str = "") -> list[Compiled]:
    """Every kernel of every case for every target; only: a part of the kernel's name. RuntimeError where Triton cannot
    compile."""
    if (reason := kernels.missing()) is not None:
        raise RuntimeError(reason)
    if kernels.interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: in this process kernels are interpreted, not compiled; unset it")
    out = []
    for target in targets:
        for case, call in cases(target.wide).items():
            with recording() as launches:
                call()
            out += [compile_launch(launch, case, target) for launch in launches if only in launch.kernel.__name__]
    return out


def render(results: Sequence[Compiled]) -> str:
    """A table, one line per kernel, case and target."""
    head = ("kernel", "case", "target", "warps", "registers", "spills", "shared", "tensor cores", "occupancy")
    rows: list[tuple[str, ...]] = [head]
    for r in results:
        facts = (str(r.warps), str(r.registers), str(r.spills), f"{r.shared:,}", r.tensor_cores or "-", f"{r.occupancy:.0%}")
        rows.append((r.kernel, r.case, r.target, *(facts if not r.error else (r.error[:60], *[""] * 5))))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def add_kernels_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", action="append", choices=sorted(BY_NAME), help="one of the targets; may be given several times"
    )
    parser.add_argument("--kernel", default="", help="only kernels whose name has this in it")
    parser.add_argument("--json", metavar="FILE", help="also write the table to a file")


def run_kernels(args: argparse.Namespace) -> int:
    """Print the table; 1 if a kernel spills or does not compile."""
    results = compile_all([BY_NAME[name] for name in args.target] if args.target else TARGETS, args.kernel)
    if not results:
        raise ValueError(f"no kernel has {args.kernel!r} in its name")
    print(render(results))
    if args.json:
        import triton

        table = {"triton": triton.__version__, "kernels": list(map(asdict, results))}
        Path(args.json).write_text(json.dumps(table, indent=1) + "\n")
    bad = [r for r in results if not r.good]
    for r in bad:
        print(f"{r.kernel} ({r.case}) on {r.target}: {r.error or f'spills {r.spills}'}")
    print(f"{len(results) - len(bad)} of {len(results)} compile without a spill")
    return 1 if bad else 0
