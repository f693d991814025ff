"""From options to a prefix cache, and from a model's shape to the store of its KV."""

from __future__ import annotations

import torch

from minillm.cache.kv_store import KVStore, PlainKVStore
from minillm.cache.latent_kv import LatentKVStore
from minillm.cache.prefix import HashPrefixCache, NoPrefixCache, PrefixCache
from minillm.cache.radix import RadixPrefixCache
from minillm.config import EngineConfig
from minillm.model.config import ModelConfig

PREFIX_CACHES = {"hash": HashPrefixCache, "radix": RadixPrefixCache}


def make_prefix_cache(options: EngineConfig, block_size: int) -> PrefixCache:
    """The prefix cache that these options name, or the object that they hold."""
    chosen = options.prefix_cache
    if chosen == "none":
        return NoPrefixCache()
    cache: PrefixCache = PREFIX_CACHES[chosen](block_size) if isinstance(chosen, str) else chosen
    return cache


def plain_store(
    config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu", shared: bool = False
) -> KVStore:
    """What a model of this shape caches, in its own dtype: keys and values, or latents. shared: see PlainKVStore."""
    if config.mla is not None:
        return LatentKVStore.allocate(config.mla, config.num_layers, num_slots, dtype, device, shared)
    return PlainKVStore.allocate(config, num_slots, dtype, device, shared)
