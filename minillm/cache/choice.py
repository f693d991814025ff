"""From options to a prefix cache."""

from __future__ import annotations

from minillm.cache.prefix import HashPrefixCache, NoPrefixCache, PrefixCache
from minillm.cache.radix import RadixPrefixCache
from minillm.config import EngineConfig

PREFIX_CACHES = {"hash": HashPrefixCache, "radix": RadixPrefixCache}


def make_prefix_cache(options: EngineConfig, block_size: int) -> PrefixCache:
    """The prefix cache that these options name, or the object that they hold."""
    chosen = options.prefix_cache
    if chosen == "none":
        return NoPrefixCache()
    cache: PrefixCache = PREFIX_CACHES[chosen](block_size) if isinstance(chosen, str) else chosen
    return cache
