"""Exercise 3.2: a linear layer in 4 bits, the sign of a packed word, and the search for AWQ's scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_raises, expect_shape, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.quant.awq import search_scales
from minillm.quant.calibrate import Seen
from minillm.quant.grid import Codes, dequantise, pack_bits, quantise, unpack_bits
from minillm.quant.group_linear import GroupLinear
from minillm.quant.linear import PlainLinear
from minillm.quant.words import unpack_words

TINY = ModelConfig(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position=64,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 6, 1, 8, 0])
SLACK = 1.03
"""A scale may be kept in 16 bits, which moves the grid a little."""


# 3.2 core: a linear layer in 4 bits -------------------------------------------------------------------------------------------


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


# 3.2 break: a checkpoint's packed words ---------------------------------------------------------------------------------------

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble that holds each of eight channels."""


def _words(codes: list[list[int]]) -> Tensor:
    """Codes [rows, out] as int32 words, by Python's integers."""
    rows = []
    for row in codes:
        words = [sum(row[n + c] << 4 * PLACES[c] for c in range(8)) for n in range(0, len(row), 8)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def _checkpoint(in_features: int, out_features: int, group: int, most: int = 15) -> tuple[tuple[Tensor, ...], Tensor]:
    """(qweight, qzeros, scales) with codes up to ``most``, and the weight [out, in] that they stand for."""
    codes = torch.randint(0, most + 1, (in_features, out_features))
    zeros = torch.randint(0, most + 1, (in_features // group, out_features))
    scales = torch.rand(in_features // group, out_features) * 0.1 + 0.01
    weight = (codes - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)
    return (_words(codes.tolist()), _words(zeros.tolist()), scales), weight.T.contiguous()


def _break_compare(f: Any, in_features: int, out_features: int, group: int, most: int, what: str) -> None:
    stored, weight = _checkpoint(in_features, out_features, group, most)
    expect_equal(f(*stored), weight, atol=1e-5, what=what)


def _break_shape(f: Any) -> None:
    stored, _ = _checkpoint(32, 24, 16, most=7)
    expect_shape(f(*stored), [24, 32], torch.float32, "32 inputs, 24 outputs")


def _break_order(f: Any) -> None:
    """Output channel n of one input has code n; zeros are 0 and scales 1."""
    qweight, qzeros = _words([list(range(8))]), _words([[0] * 8])
    expect_equal(f(qweight, qzeros, torch.ones(1, 8)), torch.arange(8.0)[:, None], what="codes 0 to 7 of eight channels")


def _break_groups(f: Any) -> None:
    _break_compare(f, 64, 16, 16, 7, "four groups with codes up to 7")


def _break_random(f: Any) -> None:
    _break_compare(f, 64, 24, 32, 15, "codes up to 15")


def _break_zero(f: Any) -> None:
    """A zero point of 0 and one of 15, in every channel."""
    for zero in (0, 15):
        qweight, qzeros = _words([[zero] * 8]), _words([[zero] * 8])
        expect_equal(f(qweight, qzeros, torch.ones(1, 8)), torch.zeros(8, 1), what=f"code and zero point {zero}")


def _break_state(f: Any) -> None:
    (qweight, qzeros, scales), _ = _checkpoint(16, 8, 16)
    with unchanged(qweight=qweight, qzeros=qzeros, scales=scales):
        f(qweight, qzeros, scales)


BREAK = Task(
    "3.2 break",
    "Find the fault in a checkpoint reader",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: which nibble is which channel", _break_order, hint=2),
        NamedCheck("random: small codes in four groups", _break_groups, hint=3),
        NamedCheck("random: all codes", _break_random, hint=1),
        NamedCheck("edges: zero points 0 and 15", _break_zero, hint=1),
        NamedCheck("state: inputs unchanged", _break_state),
    ),
    (
        "Compare got and expected where they differ: by how much, and for which channels? What is the number 0xF0000000 as an\n"
        "int32, and what comes in from the left when it is shifted to the right?",
        "qweight int32 [in, out / 8], qzeros int32 [in / group, out / 8], scales [in / group, out] → weight [out, in].\n"
        "Channel c of eight lies in nibble 0, 4, 1, 5, 2, 6, 3, 7 of its word.",
        "nibbles = (words.unsqueeze(-1) >> shifts) & 15: the mask belongs to every nibble, also to the top one.",
    ),
    references=(unpack_words,),
)


# 3.2 stretch: AWQ's scales ----------------------------------------------------------------------------------------------------


def loss(weight: Tensor, x: Tensor, scales: Tensor, group: int) -> float:
    """Mean squared error of x · round(weight · scales) / scales, in 3 bits."""
    rounded = quantise(weight * scales, 3, group, False).dequantise() / scales
    return float((x @ (rounded - weight).T).square().sum(1).mean())


def _outliers(out: int = 24, width: int = 64, rows: int = 64, factor: float = 30.0) -> tuple[Tensor, Tensor]:
    """Weights and inputs; every sixteenth input channel is ``factor`` times as large."""
    x = torch.randn(rows, width)
    x[:, ::16] *= factor
    return torch.randn(out, width) * 0.1, x


def _scales(f: Any, weight: Tensor, x: Tensor, group: int) -> Tensor:
    scales = f(weight, x, group)
    expect_shape(scales, [weight.shape[1]], torch.float32, "scales")
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise Mismatch(f"scales must be finite and above 0, got {scales[~(scales > 0)][:1].tolist() or scales.tolist()[:3]}")
    return scales


def _stretch_shape(f: Any) -> None:
    for width, group in ((64, 32), (48, 16)):
        _scales(f, torch.randn(5, width), torch.randn(9, width), group)


def _stretch_exact(f: Any) -> None:
    """Weights on the grid already: nothing can be gained, and nothing may be lost."""
    weight = (torch.arange(64) % 8 - 3.0).repeat(4, 1)
    x = torch.ones(6, 64)
    x[:, 0] = 50
    expect_at_most(round(loss(weight, x, _scales(f, weight, x, 32), 32), 6), 0, "loss of weights that were on the grid")


def _stretch_never_worse(f: Any) -> None:
    for factor in (1.0, 3.0, 100.0):
        weight, x = _outliers(factor=factor)
        expect_at_most(loss(weight, x, _scales(f, weight, x, 32), 32), loss(weight, x, torch.ones(64), 32) * 1.0001,
                       f"loss with channels {factor:g} times as large, against rounding to nearest")  # fmt: skip


def _stretch_gains(f: Any) -> None:
    weight, x = _outliers()
    share = loss(weight, x, _scales(f, weight, x, 32), 32) / loss(weight, x, torch.ones(64), 32)
    expect_at_most(round(share, 3), 0.6, "share of rounding to nearest's loss, with channels 30 times as large")


def _stretch_dead(f: Any) -> None:
    weight, x = _outliers()
    x[:, 3] = 0
    share = loss(weight, x, _scales(f, weight, x, 32), 32) / loss(weight, x, torch.ones(64), 32)
    expect_at_most(round(share, 3), 0.6, "share of rounding to nearest's loss, with one channel of zeros beside the large ones")
    _scales(f, weight, torch.zeros_like(x), 32)


def _stretch_one_row(f: Any) -> None:
    weight, x = _outliers(rows=1)
    nearest = loss(weight, x, torch.ones(64), 32)
    expect_at_most(loss(weight, x, _scales(f, weight, x, 32), 32), nearest * 1.0001, "loss on one row")


def _stretch_state(f: Any) -> None:
    weight, x = _outliers()
    with unchanged(weight=weight, x=x):
        f(weight, x, 32)


def _stretch_engine(f: Any) -> None:
    """The norm before a layer takes the division: the engine must write the same tokens until something is rounded."""
    model = Transformer.random(TINY, dtype=torch.float64)
    weights = dict(model.dense_weights())
    scales = _scales(f, weights["model.layers.0.mlp.gate_up_proj.weight"].float(), _outliers()[1], 32).double()
    weights["model.layers.0.mlp.gate_up_proj.weight"] = weights["model.layers.0.mlp.gate_up_proj.weight"] * scales
    norm = "model.layers.0.post_attention_layernorm.weight"
    weights[norm] = weights[norm] / scales
    folded = Transformer(TINY, weights, PlainLinear()).eval()
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    got, expected = (
        [o.token_ids for o in LLM(m, num_blocks=24, block_size=4).generate(list(PROMPTS), greedy)] for m in (folded, model)
    )
    expect_equal(got, expected, what="tokens with your scales folded into a norm")


STRETCH = Task(
    "3.2 stretch",
    "Search AWQ's scales",
    (
        NamedCheck("shape: one scale per input channel", _stretch_shape, hint=2),
        NamedCheck("exact: weights that lose nothing", _stretch_exact, hint=1),
        NamedCheck("random: never worse than rounding to nearest", _stretch_never_worse, hint=1),
        NamedCheck("random: large channels gain", _stretch_gains, hint=3),
        NamedCheck("edges: channels that are always 0", _stretch_dead, hint=3),
        NamedCheck("edges: one row of inputs", _stretch_one_row, hint=3),
        NamedCheck("state: inputs unchanged", _stretch_state),
        NamedCheck("engine: folded into the norm, the same tokens", _stretch_engine, hint=2),
    ),
    (
        "Try several strengths and keep the best: s = magnitude ** ratio for ratios 0, 0.1, … 1. Ratio 0 is rounding to\n"
        "nearest, so that the winner is never worse. Judge by the error of the products, not of the weights.",
        "magnitude = x.abs().mean(0): [in]. Round weight * s and divide by s: that is the weight which the unscaled x meets.",
        "for each ratio: s = magnitude.clamp(min=1e-4) ** ratio; s = s / (s.max() * s.min()).sqrt();\n"
        "error = quantise(weight * s, 3, group, False).dequantise() / s - weight; loss = (x @ error.T).square().sum()",
    ),
    references=(search_scales, Seen),
)

TASKS = (CORE, BREAK, STRETCH)
