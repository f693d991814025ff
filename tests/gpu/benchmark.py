"""Times the kernels on this GPU against torch and the measured bandwidth, and writes assets/gpu.json: python
tests/gpu/benchmark.py

Work is recorded in a CUDA graph and replayed, so that launching from Python is not what is measured; inputs are rotated past
the L2 cache. All numbers are medians of replays in one run, and ratios are of medians from the same run.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F

from minillm import kernels

TARGET = Path(__file__).resolve().parents[2] / "assets" / "gpu.json"
BF16 = torch.bfloat16
REPLAYS = 20


def seconds(calls: list[Callable[[], object]]) -> float:
    """Median seconds of one call; the calls do the same on different memory, and are recorded one after another."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()  # compiles, and lets libraries set up what cannot be recorded
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes per second of copying 1 GiB: read and written."""
    source = torch.empty(2**29, dtype=torch.float16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds([lambda: target.copy_(source)] * 4)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def decode(roof: float) -> dict[str, float]:
    """Batch 32, context 4096, 32 query and 8 KV heads of 128: the share of the bandwidth that reading the keys reaches."""
    from minillm.kernels import paged_decode as kernel

    rows, context, heads, kv_heads, dim, block = 32, 4096, 32, 8, 128, 16
    blocks = rows * context // block
    kv = torch.randn(blocks * block, 2, kv_heads, dim, dtype=BF16, device="cuda")  # 537 MB, past any L2
    tables = torch.randperm(blocks, device="cuda").int().view(rows, -1)
    q = torch.randn(rows, heads, dim, dtype=BF16, device="cuda")
    one, lengths, order = int32(*[1] * rows), int32(*[context] * rows), int32(*range(rows))
    out, tile = torch.empty_like(q), kernel.decode_tile(dim, BF16)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    splits = kernel.choose_splits(rows, kv_heads, context, processors)

    def call() -> None:
        kernel.paged_decode(q, kv, tables, order, one, lengths, order, out, block_size=block, tile=tile, num_splits=splits)

    taken = seconds([call] * 4)
    work = kernel.work(rows * context, rows * context, rows, heads, kv_heads, dim, 2, "bfloat16", splits)
    return {"seconds": taken, "splits": splits, "share_of_bandwidth": work.total_bytes / taken / roof, "bar": 0.75}


def prefill(dim: int) -> dict[str, float]:
    """4096 tokens, causal: speed over that of SDPA's flash backend on the same, contiguous, keys."""
    from minillm.kernels import flash_prefill as kernel

    n, heads, kv_heads, block = 4096, 32, 8, 16
    kv = torch.randn(n, 2, kv_heads, dim, dtype=BF16, device="cuda")
    q = torch.randn(n, heads, dim, dtype=BF16, device="cuda")
    tile, out, group = kernel.prefill_tile(dim, BF16, kernel.is_wide(q.device)), torch.empty_like(q), heads // kv_heads
    firsts = int32(*reversed(range(0, n * group, tile.m)))
    rows = torch.zeros_like(firsts)
    tables, length, zero = int32(*range(n // block)).view(1, -1), int32(n), int32(0)

    def ours() -> None:
        kernel.flash_prefill(q, kv, tables, zero, length, length, rows, firsts, out, block_size=block, tile=tile)

    k, v = (kv[:, i].transpose(0, 1)[None].repeat_interleave(group, 1).contiguous() for i in (0, 1))
    theirs_q = q.transpose(0, 1)[None].contiguous()

    def theirs() -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(theirs_q, k, v, is_causal=True)

    torch.testing.assert_close(ours() or out, theirs()[0].transpose(0, 1), rtol=3e-2, atol=3e-2)
    mine, other = seconds([ours] * 4), seconds([theirs] * 4)
    flops = 4 * (n * (n + 1) // 2) * heads * dim
    return {"seconds": mine, "sdpa_seconds": other, "flops_per_second": flops / mine, "speed_over_sdpa": other / mine, "bar": 0.7}


def four_bits(rows: int, roof: float) -> dict[str, float]:
    """8192 × 8192 in groups of 128: speed over cuBLAS bf16, and share of the bandwidth; eight weights in turn, 537 MB in 16
    bits."""
    from minillm.kernels import matmul as kernel

    k = n = 8192
    group, copies = 128, 8
    x = torch.randn(rows, k, dtype=BF16, device="cuda")
    packed = [
        (
            torch.randint(-(2**31), 2**31, (k, n // 8), device="cuda", dtype=torch.int64).int(),
            torch.rand(k // group, n, device="cuda").to(BF16),
            torch.randint(-(2**31), 2**31, (k // group, n // 8), device="cuda", dtype=torch.int64).int(),
        )
        for _ in range(copies)
    ]
    dense = [torch.randn(n, k, dtype=BF16, device="cuda") for _ in range(copies)]
    mine = seconds([lambda w=w: kernel.w4a16_matmul(x, *w, group) for w in packed])
    other = seconds([lambda w=w: F.linear(x, w) for w in dense])
    stored = kernel.work(rows, k, n, group, 2, "bfloat16").total_bytes
    return {
        "seconds": mine, "cublas_seconds": other, "speed_over_cublas": other / mine, "share_of_bandwidth": stored / mine / roof,
        "bar": 2.5, "bar_bandwidth": 0.6,
    }  # fmt: skip


def main() -> int:
    if (reason := kernels.missing()) or not torch.cuda.is_available():
        print(f"skipped: {reason or 'torch sees no GPU here'}")
        return 0
    import triton

    roof = bandwidth()
    results = {
        "gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(), "torch": torch.__version__,
        "triton": triton.__version__, "bandwidth": roof,
        "paged_decode": decode(roof), "flash_prefill_64": prefill(64), "flash_prefill_128": prefill(128),
        **{f"w4a16_{rows}": four_bits(rows, roof) for rows in (1, 4, 16)},
    }  # fmt: skip
    text = json.dumps(results, indent=1)
    print(text)
    TARGET.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
