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
    """Blocks of the pool; ValueError where they cannot hold what one request is given at once."""
    size = _pool_size(options, bytes_per_token, max_model_len, device)
    reserve = options.strips == "reserve"
    tokens = max_model_len if reserve else options.block_size
    if size.num_blocks * size.block_size < tokens:
        what = f"a reserved strip of {tokens} tokens" if reserve else f"one block of {tokens} tokens"
        raise ValueError(
            f"{size.reason} is {size.num_blocks} blocks of {size.block_size} tokens and less than {what}, "
            f"{tokens * bytes_per_token} bytes"
        )
    return size


def _pool_size(options: EngineConfig, bytes_per_token: int, max_model_len: int, device: torch.device) -> PoolSize:
    block_size = options.block_size
    block_bytes = block_size * bytes_per_token
    if options.num_blocks is not None:
        return PoolSize(block_size, options.num_blocks, f"num_blocks={options.num_blocks}")
    strip = -(-max_model_len // block_size)
    wanted = options.max_num_seqs * strip
    if options.kv_memory is not None:
        return PoolSize(block_size, min(options.kv_memory // block_bytes, wanted), f"kv_memory={options.kv_memory}")
    spare = int(available_memory(device) * DEFAULT_SHARE)
    num_blocks = max(strip if options.strips == "reserve" else 1, min(wanted, spare // block_bytes))
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
