"""Builds an engine's tiers, and measures what its load-or-recompute decision needs: its links and its prefill."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Any, Callable

import torch

from minillm.attention.backend import AttentionBackend
from minillm.cache.block_io import BlockIO
from minillm.cache.kv_store import KVStore
from minillm.cache.prefix import PrefixCache
from minillm.cache.tiered import TieredCache, load_always
from minillm.cache.tiers import AROUND, DiskTier, HostTier, Tier
from minillm.config import EngineConfig
from minillm.engine.batch import ForwardBatch, Row
from minillm.identity import class_name, identity
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.paths import cache_dir
from minillm.perf.roofline import prefill_work
from minillm.perf.transfer import Link, PrefillRate, load_or_recompute
from minillm.quant.linear import Linear

FORMAT = 2
NEUTRAL = frozenset(
    (
        "dtype device seed max_model_len max_num_seqs max_num_batched_tokens block_size num_blocks kv_memory kv_cache allocation "
        "batching prefill queue_order prefix_cache host_cache disk_cache disk_folder cache_write tier_policy compile overlap "
        "cuda_graphs speculative draft_model num_draft_tokens adaptive_drafts max_draft_batch accept_rule"
    ).split()
)
"""Options that do not change what the KV of a token is (dtype and block size are in the fingerprint as they came out)."""
PROBE_TOKENS = 128
PROBES = 3


def with_tiers(
    prefix: PrefixCache, options: EngineConfig, model: Transformer, store: KVStore, backend: AttentionBackend, block_size: int
) -> PrefixCache:
    """The prefix cache with the tiers that the options ask for, or as it is where they ask for none.

    A tier too small for one block and a store whose blocks cannot be copied exactly are ValueErrors.
    """
    if options.host_cache is None and options.disk_cache is None:
        return prefix
    io = BlockIO(store, model.config.num_layers, block_size, model.device)
    for name, block in (("host_cache", io.nbytes), ("disk_cache", io.nbytes + AROUND)):
        size = getattr(options, name)
        if isinstance(size, int) and size < block:
            raise ValueError(f"{name} of {size} bytes is less than one block of {block_size} tokens, {block} bytes")
    root, tiers = secrets.token_bytes(32), []
    if options.host_cache is not None:
        tiers.append(HostTier(options.host_cache) if isinstance(options.host_cache, int) else options.host_cache)
    if options.disk_cache is not None:
        # what is on disk outlives the engine: its keys must say whose KV it is
        root = kv_fingerprint(model, options, store, backend, block_size)
        if isinstance(options.disk_cache, int):
            tiers.append(DiskTier(disk_folder(options, root, model.config), options.disk_cache))
        else:
            tiers.append(options.disk_cache)
    policy = {"auto": load_or_recompute, "always": load_always}.get(options.tier_policy, options.tier_policy)
    return TieredCache(prefix, tiers, io, root, options.cache_write, policy)


def disk_folder(options: EngineConfig, root: bytes, config: ModelConfig) -> Path:
    """One folder per model and way of computing its KV, below the one that the options name."""
    base = cache_dir() / "kv" if options.disk_folder is None else Path(options.disk_folder).expanduser()
    return base / f"{config.name.replace('/', '_').replace(os.sep, '_')}-{root.hex()[:16]}"


def kv_fingerprint(
    model: Transformer, options: EngineConfig, store: KVStore, backend: AttentionBackend, block_size: int
) -> bytes:
    """32 bytes that differ where KV would: weights, how they are multiplied, shape, precision, block size, store, and every
    option that is not known to leave KV as it is."""
    chosen = {f.name: identity(getattr(options, f.name)) for f in dataclasses.fields(options) if f.name not in NEUTRAL}
    parts = FORMAT, model.config, model.dtype, block_size, store.bytes_per_token, class_name(store), identity(backend), chosen
    digest = hashlib.sha256(repr(parts).encode())
    # the same weights are not the same product where activations are rounded
    methods = [(name, identity(module.method)) for name, module in model.named_modules() if isinstance(module, Linear)]
    digest.update(repr(methods).encode())
    for name, tensor in sorted(model.dense_weights().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def calibrate(cache: TieredCache, forward: Callable[[ForwardBatch], Any], config: ModelConfig, tokens: int, last: int) -> None:
    """Measure links and prefill before the first request; blocks 1 … last are free, tokens is the most that one step takes."""
    if cache.policy is load_always:
        return
    cache.prefill = measure_prefill(forward, config, cache.io, min(tokens, last * cache.io.block_size, PROBE_TOKENS))
    try:
        for tier in cache.tiers:
            cache.links[tier.name] = measure_link(tier, cache.io, last)
    except Exception as fault:  # of a tier of somebody's own
        cache.switch_off(fault)


def measure_prefill(forward: Callable[[ForwardBatch], Any], config: ModelConfig, io: BlockIO, tokens: int) -> PrefillRate:
    """FLOP/s of a prefill and the seconds that any pass costs, from a short prompt and one of `tokens` tokens."""

    def seconds(n: int) -> float:
        blocks = range(1, -(-n // io.block_size) + 1)
        batch = ForwardBatch.build([Row([0] * n, 0, blocks)], io.block_size, device=io.device)
        times = []
        with torch.inference_mode():
            for _ in range(PROBES):
                started = time.perf_counter()
                forward(batch)
                _wait(io.device)
                times.append(time.perf_counter() - started)
        return min(times)

    short = max(1, tokens // 8)
    small, large = seconds(short), seconds(tokens)
    flops = [prefill_work(config, n).total_flops for n in (short, tokens)]
    if tokens == short or large <= small:
        return PrefillRate(config, flops[1] / large)
    rate = (flops[1] - flops[0]) / (large - small)
    return PrefillRate(config, rate, max(0.0, small - flops[0] / rate))


def measure_link(tier: Tier, io: BlockIO, block: int) -> Link:
    """One block there and back, the best of a few. A file leaves the system's page cache first where that is possible."""
    key = hashlib.sha256(b"probe" + secrets.token_bytes(8)).digest()
    (data,) = io.get([block])
    tier.write([(key, data)], frozenset())
    best = float("inf")
    for _ in range(PROBES):
        if isinstance(tier, DiskTier):
            _leave_page_cache(tier.path(key))
        started = time.perf_counter()
        found = tier.read(key)
        if found is None:  # the tier is off or refuses: it will offer nothing either
            return Link(io.nbytes)
        io.put([block], [found])
        _wait(io.device)
        best = min(best, time.perf_counter() - started)
    forget = getattr(tier, "forget", None)
    if forget is not None:
        forget(key)
    return Link(io.nbytes / best)


def _wait(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _leave_page_cache(path: Path) -> None:
    """So that reading the file again reads the disk. Only Linux can be told; elsewhere the first real loads correct the link."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            advise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
