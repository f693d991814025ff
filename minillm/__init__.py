"""minillm: a small, real LLM inference engine, and the course that builds it up."""

from minillm.config import EngineConfig, ModelConfig, RopeConfig
from minillm.engine.engine import Engine
from minillm.engine.request import RequestOutput
from minillm.llm import LLM
from minillm.model.transformer import Transformer
from minillm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Engine", "EngineConfig", "ModelConfig", "RequestOutput", "RopeConfig", "SamplingParams", "Transformer"]
