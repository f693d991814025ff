"""A 4-bit model on the Triton kernel, end to end: what a GPU runs, interpreted, against torch's products with the same codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, ModelConfig, SamplingParams, Transformer
from minillm.engine.batch import ForwardBatch, Row
from minillm.kernels import matmul
from minillm.kernels.matmul import MAX_ROWS
from minillm.quant.awq_checkpoint import load_awq, save_awq
from minillm.quant.config import QuantConfig
from minillm.quant.grid import Codes, quantise
from minillm.quant.group_linear import GroupLinear
from minillm.quant.linear import Linear
from minillm.quant.quantise import QuantMethods, quantise_model

CONFIG = ModelConfig(
    vocab_size=32, hidden_size=48, intermediate_size=96, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=16, max_position=96,
    tie_embeddings=True, mlp_bias=True,
)  # fmt: skip
PROMPTS = [[(7 * i + r) % 31 for i in range(n)] for r, n in enumerate((1, 5, 20))]
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)


def in_four_bits(kernel: Any, group: int = 16, symmetric: bool = False, head_bits: int | None = 8) -> Transformer:
    model = Transformer.random(CONFIG, seed=4, dtype=torch.float32)
    return quantise_model(model, QuantConfig("rtn", 4, group, symmetric, head_bits, kernel=kernel))


def logits(model: Transformer, lengths: list[int]) -> torch.Tensor:
    runner = LLM(model, num_blocks=60, block_size=4).engine.runner
    rows, first = [], 1
    for n in lengths:
        blocks = -(-n // 4)
        rows.append(Row([i % 31 for i in range(n)], 0, range(first, first + blocks)))
        first += blocks
    with torch.inference_mode():
        return runner.forward(ForwardBatch.build(rows, 4))[0]


@pytest.mark.parametrize("group, symmetric, head_bits", [(16, False, 8), (48, True, 4), (-1, False, None)])
def test_greedy_tokens_are_those_of_torchs_products(group: int, symmetric: bool, head_bits: int | None) -> None:
    answers = []
    for kernel in ("torch", "triton"):
        model = in_four_bits(kernel, group, symmetric, head_bits)
        layer = model.layers[0]
        assert ("qweight" in layer.mlp.down._buffers) == (kernel == "triton")
        assert ("qweight" in model.head._buffers) == (kernel == "triton" and head_bits == 4)
        answers.append([o.token_ids for o in LLM(model, num_blocks=60, block_size=4).generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]


def test_both_backends_together_are_what_a_gpu_runs() -> None:
    model, params = in_four_bits("triton"), SamplingParams(max_tokens=2, ignore_eos=True)
    llm = LLM(model, attention_backend="triton", num_blocks=60, block_size=4)
    answer = llm.generate(PROMPTS, params)
    expected = LLM(in_four_bits("torch"), num_blocks=60, block_size=4).generate(PROMPTS, params)
    assert [o.token_ids for o in answer] == [o.token_ids for o in expected]
    assert "Triton's 4-bit kernel, from 65 rows dequantised for torch's product" in llm.engine.description


@pytest.mark.parametrize("lengths", [[1], [3, 14], [40, 24], [40, 25]], ids=["1 row", "17 rows", "64 rows", "65 rows"])
def test_logits_agree_and_the_rows_choose_the_way(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("w4a16_kernel", "dequantise_kernel"):
        kernel = getattr(matmul, name)
        monkeypatch.setattr(matmul, name, Watched(kernel, lambda name=name: calls.append(name)))
    expected, got = (logits(in_four_bits(kernel), lengths) for kernel in ("torch", "triton"))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert set(calls) == {"dequantise_kernel" if sum(lengths) > MAX_ROWS else "w4a16_kernel"} and len(calls) == 4


class Watched:
    """A kernel that says when it is launched."""

    def __init__(self, kernel: Any, say: Any):
        self.kernel, self.say = kernel, say

    def __getitem__(self, grid: Any) -> Any:
        self.say()
        return self.kernel[grid]


def test_codes_come_back_and_the_work_is_the_kernels() -> None:
    weight, bias = torch.randn(24, 1024), torch.randn(24)
    for group, symmetric in ((16, False), (-1, True), (512, False), (128, True)):
        layer = Linear(weight, bias, GroupLinear(4, group, symmetric, kernel="triton"))
        found, expected = layer.method.codes(layer._buffers), quantise(weight, 4, group, symmetric)
        for name in ("codes", "scales", "zeros"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), (group, name)
        groups = layer._buffers["scales"].shape[0]
        assert groups == 1024 // (min(group, 256) if group > 0 else 256), "a long group is cut for the kernel"
        stored = 24 * 1024 // 2 + groups * 12 + groups * 24 * 2
        few, many = layer.work(3), layer.work(MAX_ROWS + 1)
        assert few.weight_bytes == many.weight_bytes == stored + bias.nbytes == layer.nbytes()
        parts = 2 * 2 * 3 * 24 * 4  # two parts of K in float32, written and read again
        assert few.activation_bytes == 3 * 1048 * 4 + parts and few.launches == 2
        assert many.activation_bytes == (MAX_ROWS + 1) * 1048 * 4 + 2 * weight.nbytes and many.launches == 2


def test_a_checkpoint_whose_scales_have_sixteen_bits_of_their_own_is_multiplied_exactly(tmp_path: Path) -> None:
    """AutoAWQ's scales are float16: rounding them to bfloat16 would move every weight."""
    generator = torch.Generator().manual_seed(0)
    plain, codes = in_four_bits("torch", head_bits=None), {}
    weights = plain.dense_weights()
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            found = quantise(weight, 4, 16, False)
            scales = (found.scales * (1 + torch.rand(found.scales.shape, generator=generator) / 50)).half().float()
            codes[name.removesuffix(".weight")] = Codes(found.codes, scales, found.zeros, 4)
    config = QuantConfig("awq", 4, 16, head_bits=None, kernel="triton")
    model = Transformer(CONFIG, weights, QuantMethods(config, torch.float32, "cpu", codes)).eval()
    loaded = load_awq(save_awq(model, tmp_path), kernel="triton")
    down = loaded.layers[0].mlp.down
    assert "qweight" in down._buffers and torch.equal(down.dense()[0], codes["model.layers.0.mlp.down_proj"].dequantise())
    other = load_awq(tmp_path, kernel="torch")
    torch.testing.assert_close(logits(loaded, [9, 3]), logits(other, [9, 3]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "dtype, bits, group, shape, reason",
    [
        (torch.float64, 4, 16, (32, 48), "computes in float32, float16 and bfloat16, got float64"),
        (torch.bfloat16, 4, 16, (32, 48), "interpreter computes bfloat16 wrongly"),
        (torch.float32, 3, 16, (32, 48), "got 3 bits, groups of 16, 32 out_features"),
        (torch.float32, 4, 24, (32, 48), "got 4 bits, groups of 24"),
        (torch.float32, 4, 16, (36, 48), "36 out_features"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(dtype, bits, group, shape, reason) -> None:
    with pytest.raises(ValueError, match=f"kernel='triton' of one: .*{reason}"):
        Linear(torch.randn(shape).to(dtype), None, GroupLinear(bits, group, False, kernel="triton", name="one"))
