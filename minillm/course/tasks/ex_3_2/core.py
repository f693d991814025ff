"""3.2 core: write a linear layer whose weight has 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_raises, expect_shape, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_3_2.common import PROMPTS, TINY
from minillm.model.transformer import Transformer
from minillm.quant.grid import Codes, dequantise, pack_bits, quantise, unpack_bits
from minillm.quant.group_linear import GroupLinear
from minillm.quant.linear import PlainLinear

SLACK = 1.03
"""A scale may be kept in 16 bits, which moves the grid a little."""


def _packed(cls: Any, weight: Tensor, group: int, bias: Tensor | None = None) -> tuple[Any, dict[str, Any]]:
    method = cls(group)
    packed = method.pack(weight, bias)
    if not isinstance(packed, dict) or not all(t is None or isinstance(t, Tensor) for t in packed.values()):
        raise Mismatch(f"pack gives a dict of tensors, got {packed!r:.80}")
    return method, packed


def _back(cls: Any, weight: Tensor, group: int) -> Tensor:
    method, packed = _packed(cls, weight, group)
    back = method.unpack(packed)
    expect_shape(back, list(weight.shape), weight.dtype, "unpack(pack(weight))")
    return back


def _within_half_a_step(cls: Any, weight: Tensor, group: int, what: str) -> None:
    back = _back(cls, weight, group)
    if not bool(torch.isfinite(back).all()):
        raise Mismatch(f"{what}: the unpacked weight holds {float(back[~torch.isfinite(back)][0])}, expected finite numbers")
    grouped = weight.double().unflatten(1, (-1, group))
    step = (grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)) / 15
    error = (back.double() - weight.double()).abs().unflatten(1, (-1, group)).amax(-1)
    bad = (error > step * SLACK / 2 + 1e-6).nonzero()
    if len(bad):
        row, g = bad[0].tolist()
        got, most = float(error[row, g]), float(step[row, g]) / 2
        raise Mismatch(f"{what}: row {row}, group {g} is off by {got:.4g}, expected at most half a step, {most:.4g}")


def _core_shapes(cls: Any) -> None:
    for out, width, group, dtype in ((6, 64, 32, torch.float32), (3, 32, 16, torch.bfloat16), (6, 64, 32, torch.float64)):
        weight, bias, x = (torch.randn(*shape, dtype=dtype) for shape in ((out, width), (out,), (5, width)))
        method, packed = _packed(cls, weight, group, bias)
        expect_shape(method.unpack(packed), [out, width], dtype, f"unpack, packed from {dtype}")
        expect_shape(method.apply(packed, x), [5, out], dtype, f"apply to 5 rows of {dtype}")


def _core_by_hand(cls: Any) -> None:
    """Sixteen numbers half apart are a grid already."""
    grid = torch.arange(-4, 12) * 0.5
    weight = torch.stack([grid, grid.flip(0), 2 * grid, -grid])
    expect_equal(_back(cls, weight, 16), weight, atol=1e-6, what="a row that is on the grid")


def _core_half_step(cls: Any) -> None:
    for scale in (1.0, 0.02, 30.0):
        weight = torch.randn(8, 96) * scale
        _within_half_a_step(cls, weight, 32, f"random weights of size {scale:g}")


def _core_product(cls: Any) -> None:
    weight, bias, x = torch.randn(10, 64), torch.randn(10), torch.randn(7, 64)
    for given in (bias, None):
        method, packed = _packed(cls, weight, 32, given)
        expected = x @ method.unpack(packed).T + (0 if given is None else given)
        expect_equal(method.apply(packed, x), expected, atol=1e-4, what=f"apply {'without' if given is None else 'with'} a bias")


def _core_one_sided(cls: Any) -> None:
    _within_half_a_step(cls, 5 + torch.rand(4, 32), 32, "weights in [5, 6]")
    _within_half_a_step(cls, -5 - torch.rand(4, 32), 32, "weights in [-6, -5]")


def _core_constant(cls: Any) -> None:
    weight = torch.zeros(4, 32)
    weight[1], weight[2], weight[3] = 2.0, -3.0, 1e-4
    _within_half_a_step(cls, weight, 32, "groups of equal weights, the first all 0")


def _core_largest(cls: Any) -> None:
    """Every second weight has code 15, so that high and low halves of a byte are full."""
    weight = torch.zeros(2, 32)
    weight[0, ::2], weight[1, 1::2] = 1.5, 1.5
    expect_equal(_back(cls, weight, 32), weight, atol=2e-3, what="codes 0 and 15 side by side")


def _core_groups_apart(cls: Any) -> None:
    weight = torch.randn(4, 64) * 0.01
    weight[:, 32:] *= 1000
    _within_half_a_step(cls, weight, 32, "a small group beside a large one")


def _core_odd(cls: Any) -> None:
    expect_raises(ValueError, lambda: cls(32).pack(torch.randn(4, 48), None), "48 inputs in groups of 32")
    try:
        cls(32).pack(torch.randn(4, 48), None)
    except ValueError as error:
        if "48" not in str(error) or "32" not in str(error):
            raise Mismatch(f"the ValueError must name 48 and 32, it says {str(error)!r}") from error


def _core_no_rows(cls: Any) -> None:
    method, packed = _packed(cls, torch.randn(6, 32), 32)
    expect_shape(method.apply(packed, torch.zeros(0, 32)), [0, 6], torch.float32, "apply to no rows")


def _core_state(cls: Any) -> None:
    weight, bias, x = torch.randn(6, 64), torch.randn(6), torch.randn(3, 64)
    with unchanged(weight=weight, bias=bias, x=x):
        method, packed = _packed(cls, weight, 32, bias)
        first = method.apply(packed, x)
        method.pack(torch.randn(4, 32, dtype=torch.float64), None)  # one object serves all layers
        second = method.apply(packed, x)
    expect_equal(second, first, what="the first layer's product after another layer was packed")
    expect_shape(method.unpack(packed), [6, 64], torch.float32, "the first layer unpacked, after one of float64 was packed")


def _core_engine(cls: Any) -> None:
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)

    def tokens(model: Transformer, **options: Any) -> tuple[LLM, list[tuple[int, ...]]]:
        llm = LLM(model, dtype="float64", block_size=4, num_blocks=24, **options)
        return llm, [o.token_ids for o in llm.generate(list(PROMPTS), greedy)]

    plain = Transformer.random(TINY, dtype=torch.float64)
    llm, got = tokens(plain, quantization=cls(32))
    dense = Transformer(TINY, llm.model.dense_weights(), PlainLinear()).eval()
    expect_equal(got, tokens(dense)[1], what="tokens on your layers, against a model of your unpacked weights")
    before = plain.dense_weights()["model.layers.0.mlp.down_proj.weight"]
    after = llm.model.dense_weights()["model.layers.0.mlp.down_proj.weight"]
    if torch.equal(before, after):
        raise Mismatch("the engine's weights are those of before: nothing was rounded")


def _core_bytes(cls: Any) -> None:
    out, width, group = 64, 256, 32
    _, packed = _packed(cls, torch.randn(out, width), group)
    held = sum(t.untyped_storage().nbytes() for t in packed.values() if t is not None)
    expect_at_most(held, out * width // 2 + out * (width // group) * 8, "bytes held by 64 × 256 weights in groups of 32")


CORE = Task(
    "3.2 core",
    "Write a linear layer in 4 bits",
    (
        NamedCheck("shape: what pack, unpack and apply give", _core_shapes, hint=2),
        NamedCheck("exact: numbers that are on a grid", _core_by_hand, hint=1),
        NamedCheck("random: at most half a step off", _core_half_step, hint=1),
        NamedCheck("random: apply multiplies by what unpack gives", _core_product, hint=3),
        NamedCheck("edges: groups on one side of 0", _core_one_sided, hint=1),
        NamedCheck("edges: constant groups", _core_constant, hint=3),
        NamedCheck("edges: the largest code in both halves of a byte", _core_largest, hint=3),
        NamedCheck("edges: a small group beside a large one", _core_groups_apart, hint=2),
        NamedCheck("edges: inputs that are no multiple of the group", _core_odd, hint=2),
        NamedCheck("edges: no rows", _core_no_rows, hint=3),
        NamedCheck("state: inputs unchanged, layers apart", _core_state, hint=2),
        NamedCheck("engine: the tokens of your unpacked weights", _core_engine, hint=3),
        NamedCheck("budget: bytes held", _core_bytes, hint=3),
    ),
    (
        "A group has a scale and a zero point: code = round(w / scale + zero), w ≈ (code - zero) * scale. Stretch the group's\n"
        "range so that it contains 0; then zero lies between 0 and 15, also where all weights are on one side.",
        "weight [out, in] → groups [out, in / group, group]; scale, zero [out, in / group, 1]; codes uint8 [out, in].\n"
        "Two codes share a byte: [out, in / 2]. What pack returns is all that apply and unpack\n"
        "may rely on: one object serves all layers.",
        "low = groups.amin(-1).clamp(max=0); high = groups.amax(-1).clamp(min=0); scale = (high - low) / 15,\n"
        "and 1 where that is 0; zero = round(-low / scale); pack: codes[:, ::2] | codes[:, 1::2] << 4;\n"
        "unpack: byte & 15, byte >> 4, interleaved.",
    ),
    Seam("quantization", "linear layers", lambda cls: {"quantization": cls()}),
    (GroupLinear, PlainLinear, quantise, dequantise, Codes, pack_bits, unpack_bits),
)
