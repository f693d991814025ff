"""What a machine can do: data sheets of well-known cards, and this machine measured in a few seconds."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

import psutil
import torch

from minillm.checking import check_positive, check_whole
from minillm.config import DTYPES
from minillm.model.presets import preset
from minillm.paths import cache_dir
from minillm.perf import probes
from minillm.perf.processor import has_matrix_units, says_yes
from minillm.perf.units import KIB, format_bytes, format_rate

# The working set that a decoding step of the default model streams: all weights, 16 bits each.
WORKING_SET = 2 * preset("smollm2-135m").num_params
CURVE_SIZES = [256 * KIB * 2**i for i in range(12)]  # 256 KiB .. 512 MiB
MEASURED_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Hardware:
    """Peaks of one device. bandwidth: bytes/s; flops: dense FLOP/s by torch dtype name; memory: bytes; source: who says so."""

    name: str
    bandwidth: float
    flops: Mapping[str, float]
    memory: float
    source: str

    def __post_init__(self) -> None:
        check_positive("bandwidth", self.bandwidth)
        check_positive("memory", self.memory)
        if not self.flops:
            raise ValueError(f"flops of {self.name} must name at least one dtype")
        for dtype, rate in self.flops.items():
            check_positive(f"flops[{dtype!r}]", rate)

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s in one precision; ValueError lists the precisions known for this device."""
        if dtype not in self.flops:
            raise ValueError(f"no FLOP/s of {self.name} for {dtype!r}; it has {', '.join(self.flops)}")
        return self.flops[dtype]

    def ridge(self, dtype: str) -> float:
        """FLOP per byte where the roof bends (Williams et al. 2009): work of lower intensity is bound by bandwidth."""
        return self.rate(dtype) / self.bandwidth

    def times(self, cards: int) -> "Hardware":
        """Several such devices sharing the work evenly; what they say to each other is not counted."""
        check_whole("cards", cards)
        if cards == 1:
            return self
        flops = {dtype: cards * rate for dtype, rate in self.flops.items()}
        name = f"{cards} x {self.name}"
        return Hardware(name, cards * self.bandwidth, flops, cards * self.memory, self.source)

    def summary(self) -> str:
        """One line: bandwidth, memory and, for each precision, FLOP/s and ridge."""
        rates = ", ".join(f"{d} {format_rate(r, 'FLOP/s')} (ridge {self.ridge(d):.0f} FLOP/B)" for d, r in self.flops.items())
        return f"{self.name}: {format_rate(self.bandwidth, 'B/s')}, {format_bytes(self.memory)}; {rates}"


@dataclass(frozen=True)
class Machine(Hardware):
    """A measured device. label: model, cores, threads, torch version, date; threads: CPU threads that torch used;
    working_set: bytes at which `bandwidth` was measured; curve: (working set in bytes, bytes/s) pairs over its caches;
    quiet: whether the processors were free for the measurement. If not, the label says so and the rates are too low."""

    label: str
    threads: int
    working_set: int
    curve: tuple[tuple[int, float], ...]
    quiet: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("threads", self.threads)
        check_whole("working_set", self.working_set)
        for size, bandwidth in self.curve:
            check_whole("working set on the curve", size)
            check_positive("bandwidth on the curve", bandwidth)


# Dense rates: the headline figures of these data sheets assume 2:4 sparsity and are twice as high.
_HOPPER = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12, "float8_e4m3fn": 1978.9e12, "int8": 1978.9e12}
_AMPERE = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "int8": 624e12}
_H20 = {"bfloat16": 148e12, "float16": 148e12, "float32": 44e12, "int8": 296e12}
CARDS: dict[str, Hardware] = {
    "h100": Hardware("H100 SXM", 3.35e12, _HOPPER, 80e9, "NVIDIA H100 SXM data sheet, dense rates (secondary copy)"),
    "h200": Hardware("H200 SXM", 4.8e12, _HOPPER, 141e9, "NVIDIA H200 SXM data sheet, dense rates (secondary copy)"),
    "h20": Hardware("H20", 4.0e12, _H20, 96e9, "NVIDIA H20 specification as published by resellers (secondary copy)"),
    "a100": Hardware("A100 SXM 80GB", 2.039e12, _AMPERE, 80e9, "NVIDIA A100 80GB SXM data sheet, dense rates (secondary copy)"),
}


def card(name: str) -> Hardware:
    """The data sheet of a card by its short name, such as 'h100'; an unknown one raises ValueError listing the known."""
    known = CARDS.get(name.lower()) if isinstance(name, str) else None
    if known is None:
        raise ValueError(f"no data sheet for {name!r}; there are {', '.join(CARDS)}")
    return known


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """'auto' is the GPU that torch sees, else the CPU. A device that is not there raises ValueError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {str(device)!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {str(device)!r}, but torch sees {torch.cuda.device_count()} GPUs")
    return found


def fast_dtype(device: str | torch.device = "auto") -> torch.dtype:
    """The dtype that 'auto' means on a device, from what it says it can do: bfloat16, float16 or float32. Nothing is timed.

    bfloat16 where matrix products in it are native. A GPU older than that gets float16, a CPU float32: an emulated
    16-bit product is slower than a 32-bit one.
    """
    device = resolve_device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    # oneDNN says yes on any AVX-512 machine; only these two instruction sets multiply bfloat16 natively.
    native = says_yes(torch.cpu, "_is_avx512_bf16_supported") or has_matrix_units()
    on_mac = platform.system() == "Darwin"
    return torch.bfloat16 if native and not on_mac and says_yes(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") else torch.float32


def measure_machine(device: str | torch.device = "auto", refresh: bool = False) -> Machine:
    """Bandwidth and FLOP/s of this machine, measured once (a few seconds) and kept in the user's cache folder.

    The file is keyed by processor, cores, threads and torch version, so a change of any of them measures anew, as does
    refresh=True or an unreadable file. A measurement made while other programs kept the processors busy serves only until
    they are free.
    """
    device = resolve_device(device)
    about = _about(device)
    path = cache_dir() / "machines" / (re.sub(r"[^a-z0-9.]+", "-", about.lower()).strip("-") + ".json")
    known = None if refresh else _read(path, about)
    if known is not None and (known.quiet or not _is_quiet(device)):
        return known
    quiet = _is_quiet(device)
    curve = probes.bandwidth_curve([*CURVE_SIZES, WORKING_SET], device)
    rates = probes.matmul_rates([DTYPES[name] for name in MEASURED_DTYPES], device)
    flops = {name: rates[DTYPES[name]] for name in MEASURED_DTYPES}
    label = f"{about}, {datetime.date.today().isoformat()}{'' if quiet else ', while other programs were busy'}"
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"this machine's CPU, {torch.get_num_threads()} threads"
    machine = Machine(
        name=name, bandwidth=curve[WORKING_SET], flops=flops, memory=_memory(device), source=f"measured here: {label}",
        label=label, threads=torch.get_num_threads(), working_set=WORKING_SET, curve=tuple(sorted(curve.items())), quiet=quiet,
    )
    _write(path, machine)
    return machine


def _is_quiet(device: torch.device) -> bool:
    """Whether nearly as many processors are idle as torch uses. Two looks: our own threads may still spin during the first."""
    if device.type == "cuda":
        return True
    wanted = 0.8 * torch.get_num_threads()
    processors = psutil.cpu_count() or 1
    return any((1 - psutil.cpu_percent(interval=0.25) / 100) * processors >= wanted for _ in range(2))


def _about(device: torch.device) -> str:
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        return f"{props.name}, {props.multi_processor_count} multiprocessors, torch {torch.__version__}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_model()}, {cores} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _cpu_model() -> str:
    """The processor's marketing name, else its architecture."""
    try:
        if platform.system() == "Darwin":
            return subprocess.run(
                ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True
            ).stdout.strip()
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return platform.processor() or platform.machine()


def _memory(device: torch.device) -> float:
    """Bytes that a program may use: the GPU's, or the RAM up to the limit of the container."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = psutil.virtual_memory().total
    try:
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group, or "max": no limit
        pass
    return float(total)


def _read(path: Path, about: str) -> Machine | None:
    """The machine kept in a file, or None if the file is missing, broken, of another machine or another version of this class."""
    try:
        raw = json.loads(path.read_text())
        machine = Machine(**{**raw, "curve": tuple((size, bandwidth) for size, bandwidth in raw["curve"])})
        return machine if machine.label.startswith(about) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(path: Path, machine: Machine) -> None:
    """Replace the file in one step, so that a second process never reads half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
            json.dump(dataclasses.asdict(machine), part, indent=1)
        os.replace(part.name, path)
    except OSError:
        pass  # a read-only home costs a new measurement next time, nothing else
