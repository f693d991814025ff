"""The whole engine on a GPU: Triton by default, and the same greedy tokens as torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.attention.triton_backend import TritonAttention
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.quant.awq_checkpoint import save_awq
from minillm.quant.config import QuantConfig
from minillm.quant.linear import PlainLinear
from minillm.quant.quantise import quantise_model

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


@pytest.mark.parametrize("group, symmetric", [(32, False), (-1, True)])
def test_four_bits_are_multiplied_by_the_kernel_here_and_answer_as_their_dequantised_weights(
    gpu: torch.device, group: int, symmetric: bool
) -> None:
    from minillm.kernels.matmul import MAX_ROWS

    config, params = QuantConfig("rtn", 4, group, symmetric, head_bits=4), SamplingParams(max_tokens=16, ignore_eos=True)
    llm = LLM(Transformer.random(TINY, seed=3, device=gpu), quantization=config, num_blocks=64)
    assert all("qweight" in layer.mlp.down._buffers for layer in llm.model.layers) and "qweight" in llm.model.head._buffers
    assert f"Triton's 4-bit kernel, from {MAX_ROWS + 1} rows dequantised" in llm.engine.description
    dense = Transformer(TINY, llm.model.dense_weights() | {"lm_head.weight": llm.model.head.dense()[0]}, PlainLinear()).eval()
    plain = LLM(dense, num_blocks=64)  # one prompt has more rows than the kernel takes, the others fewer
    assert max(map(len, PROMPTS)) > MAX_ROWS
    answers = [[o.token_ids for o in one.generate(PROMPTS, params)] for one in (llm, plain)]
    assert answers[0] == answers[1]


def test_torchs_products_are_a_switch_away(gpu: torch.device) -> None:
    model = Transformer.random(TINY, seed=3, device=gpu)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    answers = []
    for kernel in ("auto", "torch"):
        llm = LLM(model, quantization=QuantConfig("rtn", 4, 32, kernel=kernel), num_blocks=64)
        assert ("qweight" in llm.model.layers[0].mlp.down._buffers) == (kernel == "auto")
        answers.append([o.token_ids for o in llm.generate(PROMPTS, params)])
    assert answers[0] == answers[1]


def test_a_checkpoint_in_autoawqs_layout_runs_on_the_kernel(gpu: torch.device, tmp_path: Path) -> None:
    model = quantise_model(Transformer.random(TINY, seed=3), QuantConfig("rtn", 4, 32), dtype=torch.float32)
    folder, params = save_awq(model, tmp_path), SamplingParams(max_tokens=8, ignore_eos=True)
    there = LLM(folder, device="cuda", dtype="float32", num_blocks=64)
    here = LLM(folder, device="cpu", dtype="float32", num_blocks=64)
    assert "qweight" in there.model.layers[0].mlp.down._buffers
    answers = [[o.token_ids for o in one.generate(PROMPTS, params)] for one in (there, here)]
    assert answers[0] == answers[1]


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
