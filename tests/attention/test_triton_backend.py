"""Which backend an engine gets, and what the Triton one says where it cannot run."""

from __future__ import annotations

import sys

import pytest
import torch

from minillm import LLM, kernels
from minillm.attention import choice, triton_backend
from minillm.attention.choice import make_backend
from minillm.attention.torch_backend import TorchAttention
from minillm.attention.triton_backend import unsupported
from minillm.cache.kv_store import PlainKVStore
from minillm.config import EngineConfig
from minillm.model.config import ModelConfig

from ..strategies import tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def config_of(**changes) -> ModelConfig:
    shape = dict(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, max_position=64
    )
    return ModelConfig(**{**shape, **changes})


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(kernels, "missing", lambda: None)


class Stand:
    """Stands for the Triton backend, which needs a GPU to be made."""

    def __init__(self, *arguments) -> None:
        self.arguments = arguments


def test_on_a_cpu_auto_is_torch_and_triton_says_what_to_do() -> None:
    assert isinstance(LLM(tiny_model(), num_blocks=4).engine.runner.backend, TorchAttention)
    with pytest.raises(ValueError, match="needs a GPU, and this model is on cpu.*'torch'.*TRITON_INTERPRET=1"):
        LLM(tiny_model(), attention_backend="triton", dtype="float32", num_blocks=4)


@pytest.mark.parametrize(
    "changes, dtype, device, named",
    [
        ({}, torch.float64, GPU, "got dtype='float64'"),
        ({"head_dim": 258}, torch.float16, GPU, "head_dim 258 is above the kernels' 256"),
        ({"num_heads": 17}, torch.float16, GPU, "17 query heads per KV head are above the kernels' 16"),
        ({}, torch.float32, CPU, "needs a GPU"),
    ],
)
def test_what_the_kernels_cannot_do_is_named(changes: dict, dtype: torch.dtype, device: torch.device, named: str) -> None:
    assert named in str(unsupported(config_of(**changes), dtype, device))
    with pytest.raises(ValueError, match="attention_backend='triton'"):
        make_backend(EngineConfig(attention_backend="triton"), config_of(**changes), dtype, device)


def test_in_the_interpreter_bfloat16_is_refused_and_float32_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "use dtype='float32'" in str(unsupported(config_of(), torch.bfloat16, CPU))
    assert unsupported(config_of(), torch.float32, CPU) is None


@pytest.mark.parametrize("platform, named", [("linux", "pip install"), ("darwin", "no build for darwin"), ("win32", "WSL2")])
def test_a_missing_triton_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch, platform: str, named: str) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(sys, "platform", platform)
    assert named in str(kernels.missing())


def test_on_a_gpu_auto_is_triton_where_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "TritonAttention", Stand)
    config = config_of(sliding_window=9)

    def chosen(dtype: torch.dtype = torch.bfloat16, **options):
        return make_backend(EngineConfig(**options), config, dtype, GPU)

    made = chosen(attention_window=5, attention_sinks=2)
    assert isinstance(made, Stand) and made.arguments[3:] == (5, 2)
    assert isinstance(chosen(attention_backend="triton"), Stand)
    assert isinstance(chosen(torch.float64), TorchAttention) and isinstance(chosen(attention_backend="torch"), TorchAttention)
    for options in ({"compile": True}, {"cuda_graphs": True}, {"kv_store": PlainKVStore.allocate}, {"kv_dtype": "int8"}):
        assert isinstance(chosen(**options), TorchAttention)
        with pytest.raises(ValueError, match=f"attention_backend='triton' cannot serve.*{next(iter(options))}"):
            chosen(attention_backend="triton", **options)


def test_the_kernels_limits_are_the_ones_that_are_checked() -> None:
    assert triton_backend.MAX_HEAD_DIM == 256 and torch.float64 not in triton_backend.DTYPES
