"""From a model and options to the parts of an engine. Nothing here runs a step; what does not fit together is refused here."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from minillm.attention.backend import AttentionBackend
from minillm.attention.choice import make_backend
from minillm.attention.sparse import SparseAttention
from minillm.attention.torch_backend import TorchAttention
from minillm.attention.window import Window
from minillm.cache.block_pool import BlockPool
from minillm.cache.choice import make_prefix_cache, plain_store
from minillm.cache.kv_store import KVStore, PlainKVStore
from minillm.cache.manager import CacheManager, reservation
from minillm.cache.quantised_kv import QuantisedKVStore, bytes_per_element
from minillm.cache.sizing import PoolSize, pool_size
from minillm.cache.tier_setup import calibrate, with_tiers
from minillm.config import EngineConfig
from minillm.engine.compiled import CompiledDecode, CompileUnavailable
from minillm.engine.graphs import DecodeGraphs
from minillm.engine.runner import ModelRunner
from minillm.model.transformer import Transformer
from minillm.spec.choice import make_speculation
from minillm.spec.speculation import Speculation
from minillm.spec.verify import accept_or_replace

log = logging.getLogger("minillm")


@dataclass(frozen=True)
class Parts:
    """What an engine is made of, beside its own loop. speculation: None where nobody drafts."""

    max_model_len: int
    pool_size: PoolSize
    store: KVStore
    cache: CacheManager
    runner: ModelRunner
    speculation: Speculation | None


def assemble(model: Transformer, options: EngineConfig) -> Parts:
    """Build the parts. ValueError where options and model do not go together, or the pool does not fit into memory."""
    config = model.config
    max_model_len = options.max_model_len or config.max_position
    if max_model_len > config.max_position:
        raise ValueError(f"max_model_len {max_model_len} is above the model's {config.max_position} positions")
    keep_kv = options.kv_cache != "none"
    if not keep_kv and options.prefix_cache != "none":
        raise ValueError("kv_cache='none' keeps no KV that a prefix cache could serve; leave prefix_cache='none'")
    backend = make_backend(options, config, model.dtype, model.device)
    view = getattr(backend, "view", Window())  # a backend that says nothing may read every key

    element = bytes_per_element(options.kv_dtype, model.dtype, config.head_dim)
    layers = config.num_layers if keep_kv else 1
    token_bytes = round(config.kv_width * element * layers)
    if isinstance(backend, SparseAttention):
        if backend.sees.block_size != options.block_size:
            raise ValueError(f"a SparseAttention of blocks of {backend.sees.block_size} in an engine of {options.block_size}")
        token_bytes += backend.summary_bytes_per_token(layers, model.dtype)
    size = pool_size(options, token_bytes, max_model_len, model.device)
    store = make_store(options, model, size, shared=not keep_kv)
    if isinstance(backend, SparseAttention):
        store = backend.summarised(store, config, model.dtype, model.device, shared=not keep_kv)
    prefix = with_tiers(make_prefix_cache(options, size.block_size), options, model, store, backend, size.block_size)
    reserve = reservation(options.strips, max_model_len)
    cache = CacheManager(BlockPool(size.num_blocks), prefix, size.block_size, view, reserve)

    if config.moe is not None:
        _check_experts(options, config.name)
    compiled = compile_step(options, model, store, backend) if options.compile else None
    graphs = DecodeGraphs.of(options, max_model_len, model, store, backend, compiled)
    speculation = make_speculation(options, model, store.num_slots, size.block_size, view)
    wants_states = speculation is not None and speculation.wants_states
    rule = options.accept_rule or accept_or_replace
    runner = ModelRunner(model, store, backend, size.block_size, compiled, graphs, wants_states, rule)
    if cache.tiers is not None:
        calibrate(cache.tiers, runner.forward, config, min(options.max_num_batched_tokens, max_model_len), size.num_blocks)
    return Parts(max_model_len, size, store, cache, runner, speculation)


def _check_experts(options: EngineConfig, name: str) -> None:
    for option in ("compile", "cuda_graphs"):
        value = getattr(options, option)
        if value is not False:
            raise ValueError(
                f"{option}={value!r:.60} fixes a step before it runs, and who gets the tokens of {name}'s experts is decided "
                f"while it runs: leave {option}=False"
            )


def make_store(options: EngineConfig, model: Transformer, size: PoolSize, shared: bool) -> KVStore:
    """The plain store, a quantised one, or what options.kv_store makes; one that lacks a part of the protocol is a ValueError."""
    config, dtype, device = model.config, model.dtype, model.device
    num_slots = (size.num_blocks + 1) * size.block_size  # block 0 belongs to nobody
    if options.kv_store == "plain":
        try:
            if options.kv_dtype != "auto":
                return QuantisedKVStore.allocate(options.kv_dtype, config, num_slots, dtype, device, shared)
            return plain_store(config, num_slots, dtype, device, shared)
        except (RuntimeError, TypeError, OverflowError) as error:
            what = f"{size.num_blocks} blocks of {size.block_size} tokens ({size.reason})"
            raise ValueError(f"a KV pool of {what} does not fit into this machine's memory") from error
    try:
        store: KVStore = options.kv_store(config, num_slots, dtype, device)
    except TypeError as error:
        raise ValueError(f"kv_store is called with (config, num_slots, dtype, device): {error}") from error
    lacks = [name for name in ("write", "read", "num_slots", "bytes_per_token") if not hasattr(store, name)]
    if lacks:
        raise ValueError(f"what kv_store makes, {type(store).__name__}, is no KVStore: it lacks {', '.join(lacks)}")
    if store.num_slots != num_slots:
        raise ValueError(f"kv_store was asked for {num_slots} slots and made {store.num_slots!r}")
    return store


def compile_step(options: EngineConfig, model: Transformer, store: KVStore, backend: AttentionBackend) -> CompiledDecode | None:
    """The compiled decode step; None, with a warning, where this machine cannot compile one."""
    if type(backend) is not TorchAttention or type(store) is not PlainKVStore:
        raise ValueError(
            "compile=True compiles the torch attention backend over the plain KV store; "
            "leave attention_backend='auto' and kv_store='plain', and kv_dtype='auto'"
        )
    try:
        traced = model.traced()
    except ValueError as error:
        raise ValueError(f"compile=True cannot compile these weights: {error}; leave compile=False") from error
    try:
        return CompiledDecode(traced, store, backend)
    except CompileUnavailable as reason:
        log.warning("compile=True is ignored: %s", reason)
        return None
