"""How large the KV pool is: from a number of blocks, a number of bytes, or what the machine can spare."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from minillm.config import EngineConfig

DEFAULT_SHARE = 0.25
"""Share of the free memory that a pool takes at most when nobody says how much."""


@dataclass(frozen=True)
class PoolSize:
    """block_size in tokens, num_blocks, and a sentence that says how they came about."""

    block_size: int
    num_blocks: int
    reason: str


def pool_size(options: EngineConfig, bytes_per_token: int, max_model_len: int, device: torch.device) -> PoolSize:
    """Blocks of the pool. The contiguous baseline is one block of max_model_len tokens per request: a reserved strip."""
    contiguous = options.kv_cache == "contiguous"
    block_size = max_model_len if contiguous else options.block_size
    block_bytes = block_size * bytes_per_token
    if options.num_blocks is not None:
        tokens = options.num_blocks * options.block_size
        num_blocks = max(1, tokens // block_size) if contiguous else options.num_blocks
        return PoolSize(block_size, num_blocks, f"num_blocks={options.num_blocks}")
    wanted = options.max_num_seqs * -(-max_model_len // block_size)
    if options.kv_memory is not None:
        num_blocks = min(options.kv_memory // block_bytes, wanted)
        if num_blocks < 1:
            raise ValueError(
                f"kv_memory of {options.kv_memory} bytes is less than one block of {block_size} tokens, {block_bytes} bytes"
            )
        return PoolSize(block_size, num_blocks, f"kv_memory={options.kv_memory}")
    spare = int(available_memory(device) * DEFAULT_SHARE)
    num_blocks = max(1, min(wanted, spare // block_bytes))
    if num_blocks == wanted:
        return PoolSize(block_size, num_blocks, f"room for {options.max_num_seqs} requests of {max_model_len} tokens")
    return PoolSize(
        block_size, num_blocks, f"{DEFAULT_SHARE:.0%} of the {available_memory(device) / 2**30:.1f} GiB that are free"
    )


def available_memory(device: torch.device) -> int:
    """Bytes free on the device; for a CPU what the operating system says is available, or half of all where it does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        return page * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):  # macOS has no such name
        return page * os.sysconf("SC_PHYS_PAGES") // 2
