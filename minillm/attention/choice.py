"""Which attention backend an engine runs, from its options and its model."""

from __future__ import annotations

import torch

from minillm.attention.backend import AttentionBackend
from minillm.attention.indexer import INDEXERS, Indexer
from minillm.attention.latent import LatentAttention
from minillm.attention.sparse import SparseAttention
from minillm.attention.torch_backend import TorchAttention
from minillm.attention.triton_backend import TritonAttention, unsupported
from minillm.attention.window import SparseView
from minillm.config import EngineConfig
from minillm.model.config import ModelConfig

SPARSE_WINDOW = 64
"""Keys up to its own whose blocks every token reads, unless said."""


def make_backend(options: EngineConfig, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The backend that the options give or name, with the narrower of the model's window and theirs; ValueError on a conflict.

    "auto" is Triton on a GPU, wherever its kernels can serve these options and this model, and torch elsewhere."""
    window, sinks = options.attention_window, options.attention_sinks
    if config.mla is None and options.mla != "auto":
        raise ValueError(f"mla={options.mla!r} is for models with latent attention, which {config.name} has not; leave 'auto'")
    if config.mla is not None:
        check_latent(options)
    if options.sparse_blocks is not None:
        return make_sparse(options, config)
    if not isinstance(options.attention_backend, str):
        if window is not None or sinks:
            raise ValueError(
                f"attention_window={window} and attention_sinks={sinks} are those of attention_backend='torch' and 'triton'; "
                "a backend of your own has its own"
            )
        backend: AttentionBackend = options.attention_backend
        return backend
    # what reaches further than the model does is as good as that, and is a number that tensors can hold
    windows = [min(w, config.max_position) for w in (config.sliding_window, window) if w is not None]
    sinks = min(sinks, config.max_position)
    if sinks and not windows:
        raise ValueError(f"attention_sinks={sinks} without a window: every key is seen anyway; set attention_window")
    narrowest = min(windows, default=None)
    if options.attention_backend == "torch" or config.mla is not None:
        return torch_attention(config, narrowest, sinks, options.mla)
    other = needs_torch(options)
    if options.attention_backend == "triton":
        if other:
            raise ValueError(f"attention_backend='triton' cannot serve {other}; use attention_backend='torch'")
        return TritonAttention(config, dtype, device, narrowest, sinks)
    if device.type == "cuda" and not other and unsupported(config, dtype, device) is None:
        return TritonAttention(config, dtype, device, narrowest, sinks)
    return TorchAttention(narrowest, sinks)


def make_sparse(options: EngineConfig, config: ModelConfig) -> SparseAttention:
    """Sparse attention as the options ask for it; ValueError for a model that it cannot serve."""
    if config.sliding_window is not None:
        raise ValueError(
            f"sparse_blocks={options.sparse_blocks} chooses among all keys, and {config.name} has a sliding window of "
            f"{config.sliding_window}: leave sparse_blocks=None"
        )
    # what reaches further than the model does is as good as that
    blocks, window = (min(n, config.max_position) for n in (options.sparse_blocks or 0, options.sparse_window or SPARSE_WINDOW))
    view = SparseView(blocks, window, options.block_size)
    return SparseAttention(config, view, make_indexer(options), options.sparse_share_layers)


def make_indexer(options: EngineConfig) -> Indexer:
    """The indexer that the options name or hold."""
    chosen = options.sparse_indexer
    indexer: Indexer = INDEXERS[chosen]() if isinstance(chosen, str) else chosen
    return indexer


def torch_attention(config: ModelConfig, window: int | None = None, sinks: int = 0, form: str = "auto") -> TorchAttention:
    """The torch backend for a model of this shape. form: of latent attention."""
    return TorchAttention(window, sinks) if config.mla is None else LatentAttention(window, sinks, form)


def check_latent(options: EngineConfig) -> None:
    """ValueError for an option that a model with latent attention cannot serve."""
    backend, named = options.attention_backend, isinstance(options.attention_backend, str)
    refused = {
        "attention_backend='triton'": (named and backend == "triton", "the kernels read keys and values of heads"),
        f"attention_backend={type(backend).__name__}": (
            not named and not hasattr(backend, "latent"), "it lacks latent(...), see minillm.attention.latent.LatentAttention",
        ),
        f"mla={options.mla!r}": (not named and options.mla != "auto", "a backend of your own has its own form"),
        f"sparse_blocks={options.sparse_blocks}": (options.sparse_blocks is not None, "its indexer summarises keys of heads"),
        f"kv_dtype={options.kv_dtype!r}": (options.kv_dtype != "auto", "latents are kept in the model's dtype"),
        "compile=True": (options.compile, "only steps over the plain KV store are compiled"),
    }  # fmt: skip
    for option, (given, reason) in refused.items():
        if given:
            raise ValueError(f"{option} does not go with this model's latent attention: {reason}")


def needs_torch(options: EngineConfig) -> str | None:
    """The option that only the torch backend serves, if one is set: another layout of the KV, or a step recorded with its
    plan."""
    if options.kv_store != "plain":
        return "a kv_store of your own, since the kernels read the plain store's memory"
    if options.kv_dtype != "auto":
        return f"kv_dtype={options.kv_dtype!r}, since the kernels read the plain store's memory"
    for name in ("compile", "cuda_graphs"):
        if getattr(options, name):
            return f"{name}={getattr(options, name)!r:.40}"
    return None
