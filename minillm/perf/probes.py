"""The two measurements behind a machine's roofline: how fast it reads memory and how fast it multiplies matrices."""

from __future__ import annotations

import time
from typing import Iterator

import torch
import torch.nn.functional as F

from minillm.perf.timing import measure

# A CPU multiplies what a 512-token prompt meets in the default model (fused gate and up projection, 576 -> 2 x 1536);
# a GPU would finish that before its launch is paid for and gets the same layer of an 8-billion-parameter model.
CPU_SHAPE = (512, 576, 3072)  # tokens, in, out
GPU_SHAPE = (4096, 4096, 28_672)
ROUNDS = 6
PATIENCE_S = 4.0  # no further round after this: on a busy machine a round can take long


def read_bandwidth(buffer: torch.Tensor, working_set: int) -> float:
    """Bytes per second when the first `working_set` bytes of a float32 buffer are read again and again.

    Each thread (GPU: multiprocessor) reads its own share, as in a matrix product whose weights are split among them. The best
    run of two readers counts: a sum over a view that repeats the buffer, which starts one operator for many passes and so
    shows small caches, and a dot product, which is the quicker one in main memory.
    """
    parts, enough = _parallel_parts(buffer.device)
    share = working_set // buffer.element_size() // parts
    data = buffer[: parts * share]
    passes = max(1, enough // working_set)
    repeated = data.view(parts, 1, share).expand(parts, passes, share)
    summed = measure(lambda: repeated.sum(-1), warmup=1, repeats=3, device=buffer.device).best / passes
    dotted = measure(lambda: torch.dot(data, data), warmup=1, repeats=3, device=buffer.device).best
    return data.nbytes / min(summed, dotted)


def bandwidth_curve(sizes: list[int], device: torch.device) -> dict[int, float]:
    """Bytes per second by working set in bytes: a staircase whose steps are the caches.

    The sizes take turns, so that a passing disturbance spoils one visit to a size and not all of them.
    """
    buffer = torch.ones(max(sizes) // 4, dtype=torch.float32, device=device)
    curve = dict.fromkeys(sorted(sizes), 0.0)
    for _ in _rounds():
        for size in curve:
            curve[size] = max(curve[size], read_bandwidth(buffer, size))
    return curve


def matmul_rates(dtypes: list[torch.dtype], device: torch.device) -> dict[torch.dtype, float]:
    """FLOP/s by dtype of a linear layer in the shape of a prefill, each sustained over 20 ms at a time; dtypes take turns."""
    rates = dict.fromkeys(dtypes, 0.0)
    for _ in _rounds():
        for dtype in dtypes:
            rates[dtype] = max(rates[dtype], _matmul_rate(dtype, device))
    return rates


def _rounds() -> Iterator[int]:
    """0, 1, 2 ... until ROUNDS or until patience runs out, but at least once."""
    start = time.perf_counter()
    for i in range(ROUNDS):
        yield i
        if time.perf_counter() - start > PATIENCE_S:
            return


def _matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    tokens, k, n = GPU_SHAPE if device.type == "cuda" else CPU_SHAPE
    weight = torch.randn(n, k, device=device).to(dtype)  # [out, in]
    x = torch.randn(tokens, k, device=device).to(dtype)  # [tokens, in]
    if device.type == "cpu":
        few = x[: tokens // 16]
        if measure(lambda: F.linear(few, weight), warmup=1, repeats=1).best > 0.03:
            x = few  # a dtype that this CPU only emulates: the full shape would take seconds
    once = measure(lambda: F.linear(x, weight), warmup=1, repeats=1, device=device).best
    calls = max(1, round(0.02 / once))

    def stretch() -> None:
        for _ in range(calls):
            F.linear(x, weight)

    seconds = measure(stretch, warmup=0, repeats=2, device=device).best / calls
    return 2 * x.shape[0] * k * n / seconds


def _parallel_parts(device: torch.device) -> tuple[int, int]:
    """How many workers read at once, and how many bytes one timed call should read so that its start does not matter."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count, 4 * 2**30
    return torch.get_num_threads(), 64 * 2**20
