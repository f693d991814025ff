"""3.2 stretch: search for AWQ's scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_3_2.common import PROMPTS, TINY
from minillm.model.transformer import Transformer
from minillm.quant.awq import search_scales
from minillm.quant.calibrate import Seen
from minillm.quant.grid import quantise
from minillm.quant.linear import PlainLinear


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
