"""minillm: a small, real LLM inference engine, and the course that builds it up."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm.config import EngineConfig
    from minillm.engine.engine import Engine
    from minillm.engine.request import RequestOutput
    from minillm.llm import LLM
    from minillm.model.config import ModelConfig, RopeConfig
    from minillm.model.transformer import Transformer
    from minillm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Engine", "EngineConfig", "ModelConfig", "RequestOutput", "RopeConfig", "SamplingParams", "Transformer"]

# Names are imported when they are first used, so that `minillm doctor` can speak where torch itself is broken.
_HOMES = {
    "LLM": "minillm.llm",
    "Engine": "minillm.engine.engine",
    "EngineConfig": "minillm.config",
    "ModelConfig": "minillm.model.config",
    "RequestOutput": "minillm.engine.request",
    "RopeConfig": "minillm.model.config",
    "SamplingParams": "minillm.sampling_params",
    "Transformer": "minillm.model.transformer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
