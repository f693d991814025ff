"""The whole engine on a GPU: Triton by default, and the same greedy tokens as torch."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.attention.triton_backend import TritonAttention
from minillm.config import ModelConfig
from minillm.model.transformer import Transformer

PROMPTS = [[(7 * i + r) % 61 for i in range(n)] for r, n in enumerate((1, 5, 16, 33, 100))]
TINY = ModelConfig(
    vocab_size=64, hidden_size=96, intermediate_size=128, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=64, max_position=512
)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24, "prefix_cache": "radix"}, {"attention_window": 20}])
def test_greedy_tokens_are_those_of_the_torch_backend(gpu: torch.device, options: dict) -> None:
    model, params = Transformer.random(TINY, seed=3, device=gpu), SamplingParams(max_tokens=16, ignore_eos=True)
    answers = []
    for backend in ("torch", "triton"):
        llm = LLM(model, attention_backend=backend, num_blocks=64, **options)
        answers.append([o.token_ids for o in llm.generate(PROMPTS, params)])
    assert answers[0] == answers[1]


def test_auto_is_triton_here(gpu: torch.device) -> None:
    model = Transformer.random(TINY, dtype=torch.bfloat16, device=gpu)
    llm = LLM(model, num_blocks=64)
    assert isinstance(llm.engine.runner.backend, TritonAttention)
    assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))) == len(PROMPTS)


@pytest.mark.model
def test_the_default_model_answers_alike(gpu: torch.device) -> None:
    params = SamplingParams(max_tokens=16)
    texts = [
        LLM("smollm2-135m", dtype="float32", attention_backend=name, max_model_len=256, num_blocks=64)
        .generate("The capital of France is", params)[0]
        .text
        for name in ("torch", "triton")
    ]
    assert texts[0] == texts[1] and "Paris" in texts[0]
