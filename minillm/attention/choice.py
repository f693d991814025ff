"""Which attention backend an engine runs, from its options and its model."""

from __future__ import annotations

from minillm.attention.backend import AttentionBackend
from minillm.attention.torch_backend import TorchAttention
from minillm.config import EngineConfig


def make_backend(options: EngineConfig, sliding_window: int | None) -> AttentionBackend:
    """The backend that the options give or name, with the narrower of the model's window and theirs; ValueError on a conflict."""
    window, sinks = options.attention_window, options.attention_sinks
    if not isinstance(options.attention_backend, str):
        if window is not None or sinks:
            raise ValueError(
                f"attention_window={window} and attention_sinks={sinks} are those of attention_backend='torch'; "
                "a backend of your own has its own"
            )
        backend: AttentionBackend = options.attention_backend
        return backend
    windows = [w for w in (sliding_window, window) if w is not None]
    if sinks and not windows:
        raise ValueError(f"attention_sinks={sinks} without a window: every key is seen anyway; set attention_window")
    return TorchAttention(min(windows, default=None), sinks)
