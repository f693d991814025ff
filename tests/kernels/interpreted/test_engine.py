"""The whole engine on the kernels, end to end, against the torch backend."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [2, 7], [1, 8, 2, 8, 1]]


def tiny(**changes) -> Transformer:
    shape = dict(
        vocab_size=32, hidden_size=48, intermediate_size=40, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=16,
        max_position=64, tie_embeddings=True,
    )  # fmt: skip
    return Transformer.random(ModelConfig(**{**shape, **changes}), seed=4)


@pytest.mark.parametrize(
    "changes, options",
    [
        ({}, {}),
        ({}, {"max_num_batched_tokens": 7, "block_size": 4, "prefix_cache": "radix"}),
        ({"qk_norm": True, "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True}, {"kv_cache": "contiguous"}),
        ({"sliding_window": 6}, {"attention_sinks": 2, "block_size": 4}),
        ({}, {"kv_cache": "none"}),
        ({}, {"batching": "static"}),
    ],
    ids=["plain", "chunks and prefixes", "norms and bias", "window and sinks", "no cache", "padded"],
)
def test_greedy_tokens_are_those_of_the_torch_backend(changes: dict, options: dict) -> None:
    model, params = tiny(**changes), SamplingParams(max_tokens=3, ignore_eos=True)
    answers = [
        [o.token_ids for o in LLM(model, attention_backend=name, **options).generate(PROMPTS, params)]
        for name in ("torch", "triton")
    ]
    assert answers[0] == answers[1]


def test_logits_of_a_mixed_step_agree_and_the_meter_counts_the_kernels_work() -> None:
    model = tiny(num_heads=4, num_kv_heads=2)
    logits, works = {}, {}
    for name in ("torch", "triton"):
        runner = LLM(model, attention_backend=name, num_blocks=20, block_size=4).engine.runner
        runner.forward(ForwardBatch.build([Row(PROMPTS[0], 0, range(1, 6)), Row(PROMPTS[2], 0, (7, 8))], 4))
        rows = [Row([7], 20, range(1, 7)), Row(PROMPTS[0], 5, (7, 8, 9, 10, 11, 12, 13)), Row([3], 0, [14])]
        batch = ForwardBatch.build(rows, 4)
        with torch.inference_mode():
            logits[name], works[name] = runner.forward(batch)
    torch.testing.assert_close(logits["triton"], logits["torch"], rtol=1e-5, atol=1e-5)
    plain, fused = works["torch"], works["triton"]
    assert fused.flops == plain.flops and fused.kv_read_bytes == plain.kv_read_bytes
    assert fused.weight_bytes == plain.weight_bytes and fused.kv_write_bytes == plain.kv_write_bytes
    assert fused.activation_bytes < plain.activation_bytes and fused.launches < plain.launches


def test_bfloat16_is_refused_in_the_interpreter() -> None:
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly; use dtype='float32'"):
        LLM(tiny(), attention_backend="triton", dtype="bfloat16")
