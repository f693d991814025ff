"""Which attention backend an engine runs, from its options and its model."""

from __future__ import annotations

import torch

from minillm.attention.backend import AttentionBackend
from minillm.attention.torch_backend import TorchAttention
from minillm.attention.triton_backend import TritonAttention, unsupported
from minillm.config import EngineConfig, ModelConfig


def make_backend(options: EngineConfig, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The backend that the options give or name, with the narrower of the model's window and theirs; ValueError on a conflict.

    "auto" is Triton on a GPU, wherever its kernels can serve these options and this model, and torch elsewhere."""
    window, sinks = options.attention_window, options.attention_sinks
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
    if options.attention_backend == "torch":
        return TorchAttention(narrowest, sinks)
    other = needs_torch(options)
    if options.attention_backend == "triton":
        if other:
            raise ValueError(f"attention_backend='triton' cannot serve {other}; use attention_backend='torch'")
        return TritonAttention(config, dtype, device, narrowest, sinks)
    if device.type == "cuda" and not other and unsupported(config, dtype, device) is None:
        return TritonAttention(config, dtype, device, narrowest, sinks)
    return TorchAttention(narrowest, sinks)


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
