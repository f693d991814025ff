"""8-bit arithmetic against 16-bit: one linear layer by every int8 GEMM that torch has, a whole prefill, and a decode step.

The layers are the default model's widest (576 → 3072), one as wide as a 7-billion-parameter model's (4096 → 4096), and between
them 2048 → 2048. W8A8 includes rounding the activations and scaling the sums; "product alone" leaves both out. "linear_dynamic"
is torch's older operator, which gives one scale to all tokens: measured, and not used.
"""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable

import torch
from torch import Tensor

from minillm.bench.decode import DecodeBench
from minillm.bench.study import Bar
from minillm.model.loader import load_checkpoint
from minillm.model.transformer import Transformer
from minillm.perf.hardware import CARDS
from minillm.quant.config import QuantConfig
from minillm.quant.int8_gemm import GEMMS, usable
from minillm.quant.linear import default_method
from minillm.quant.quantise import quantise_model
from minillm.quant.w8a8 import W8A8Linear, quantise_rows

TITLE = "W8A8 / 16-bit: one linear layer by GEMM and rows, a prefill of 512 tokens, a decode step"
ROUNDS = 5
SHAPES = {"576x3072": (576, 3072), "2048x2048": (2048, 2048), "4096x4096": (4096, 4096)}
WIDEST = "2048x2048"
OWN = "576x3072"
ROWS = (1, 16, 64, 512)
PROMPT, CONTEXT = 512, 128
PATIENCE_S = 0.4
"""Seconds that one place of a round may take."""


def faster(shape: str, gemm: str, rows: int, r: Any) -> float:
    """How many times as fast as 16 bits; 0 where this machine has no such GEMM."""
    taken = r.get(f"{gemm}_{shape}_{rows}")
    return r[f"16_{shape}_{rows}"] / taken if taken else 0.0


def fastest(r: Any, shape: str, rows: int) -> float:
    return max(faster(shape, gemm, rows, r) for gemm in ("onednn", "int_mm", "float"))


def share_of_rounding(shape: str, rows: int, r: Any) -> float:
    """Of the time of the best W8A8 layer: what is not its product."""
    return 1 - r[f"product_{shape}_{rows}"] / r[f"onednn_{shape}_{rows}"] if f"product_{shape}_{rows}" in r else 0.0


def ridge_rows(name: str, precision: str, bytes_per_weight: float) -> float:
    """Rows at which a product with many more weights than activations turns from waiting for weights to computing: 2 operations
    per weight and row against its bytes."""
    card = CARDS[name]
    return card.rate(precision) * bytes_per_weight / (2 * card.bandwidth)


BARS = (
    Bar("16-bit / W8A8, 512 rows, 2048x2048", lambda r: fastest(r, WIDEST, 512), at_least=1.3),
    Bar("16-bit / W8A8, 512 rows, the model's 576x3072", lambda r: fastest(r, OWN, 512), at_least=1.0),
    Bar("16-bit / W8A8, 512 rows, 4096x4096", lambda r: fastest(r, "4096x4096", 512)),
    *(
        Bar(f"16-bit / W8A8 by {gemm}, {rows} rows, {shape}", partial(faster, shape, gemm, rows))
        for gemm in ("onednn", "int_mm") for shape in (OWN, WIDEST) for rows in ROWS
    ),
    *(Bar(f"16-bit / linear_dynamic, {rows} rows, {WIDEST}", partial(faster, WIDEST, "dynamic", rows)) for rows in (1, 512)),
    *(Bar(f"share of rounding and scaling, {rows} rows, {OWN}", partial(share_of_rounding, OWN, rows)) for rows in (16, 512)),
    Bar("prefill of 512 tokens, 16-bit / W8A8", lambda r: r["prefill_16"] / r["prefill_w8a8"]),
    Bar("prefill of 512 tokens, 16-bit / 8-bit weights only", lambda r: r["prefill_16"] / r["prefill_w8"]),
    Bar("decode, 1 row, 16-bit / W8A8", lambda r: r["decode_16"] / r["decode_w8a8"]),
    Bar("decode, 1 row, 16-bit / 8-bit weights only", lambda r: r["decode_16"] / r["decode_w8"]),
    Bar("rows from which an H100 computes, 16-bit", lambda r: ridge_rows("h100", "bfloat16", 2)),
    Bar("rows from which an H100 computes, W8A8", lambda r: ridge_rows("h100", "int8", 1)),
)  # fmt: skip


@dataclass(frozen=True)
class State:
    """layers: {measurement: product of some rows}, those of one shape and number of rows side by side."""

    layers: dict[str, dict[str, Callable[[], object]]]
    benches: dict[str, DecodeBench]
    prompt: int = PROMPT
    context: int = CONTEXT


def prepare() -> State:
    checkpoint = load_checkpoint("smollm2-135m")
    exact = Transformer.from_weights(checkpoint.config, checkpoint.weights, torch.float32)
    bf16 = torch.bfloat16
    weights_only = QuantConfig("rtn", 8, -1, True, dense_from=None)
    made = {
        "16": exact.converted(bf16, "cpu"),
        "w8": quantise_model(exact, weights_only, dtype=bf16),
        "w8a8": quantise_model(exact, QuantConfig("w8a8", migration=None, dense_from=None), checkpoint.tokenizer, bf16),
    }
    return state_of(made)


def state_of(made: dict[str, Transformer], prompt: int = PROMPT, context: int = CONTEXT) -> State:
    benches = {name: DecodeBench(model, most=max(prompt, context), batch=1) for name, model in made.items()}
    layers = {f"{shape}_{rows}": products(*size, rows) for shape, size in SHAPES.items() for rows in ROWS}
    return State(layers, benches, prompt, context)


def products(in_features: int, out_features: int, rows: int) -> dict[str, Callable[[], object]]:
    """The same layer in 16 bits and in 8, by every GEMM that can be used here."""
    generator = torch.Generator().manual_seed(in_features + out_features)
    weight = torch.randn(out_features, in_features, generator=generator).bfloat16()
    x = torch.randn(rows, in_features, generator=generator).bfloat16()
    plain = default_method(x.dtype, "cpu")
    calls: dict[str, Callable[[], object]] = {"16": _product(plain, weight, x)}
    for name in GEMMS:
        if usable(name, "cpu", x.dtype) and name not in ("float", "triton"):
            calls[name] = _product(W8A8Linear(name), weight, x)
    if "onednn" in calls:
        method = W8A8Linear("onednn")
        packed = method.pack(weight, None)
        codes, _ = quantise_rows(x, GEMMS["onednn"].offset)
        kept, scales = packed["codes"], packed["scales"]
        calls["product"] = lambda: GEMMS["onednn"].multiply(codes, kept, scales, x.dtype)  # type: ignore[arg-type]
    if (older := _dynamic(weight.float(), x.float())) is not None:
        calls["dynamic"] = older
    return calls


def _product(method: Any, weight: Tensor, x: Tensor) -> Callable[[], object]:
    packed = method.pack(weight, None)
    return lambda: method.apply(packed, x)


def _dynamic(weight: Tensor, x: Tensor) -> Callable[[], object] | None:
    """torch's quantized::linear_dynamic, in float32: None where this build has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is going away, and says so
            stored = torch.quantize_per_channel(
                weight, weight.abs().amax(1) / 127, torch.zeros(len(weight), dtype=torch.int64), 0, torch.qint8
            )
            packed = torch.ops.quantized.linear_prepack(stored, None)
            torch.ops.quantized.linear_dynamic(x, packed)
    except (RuntimeError, AttributeError):
        return None
    return lambda: torch.ops.quantized.linear_dynamic(x, packed)


def measure(state: State, turn: int) -> dict[str, float]:
    found: dict[str, float] = {}
    with torch.inference_mode():
        for place, calls in state.layers.items():
            names = list(calls)
            for i in range(len(names)):
                name = names[(i + turn) % len(names)]
                found[f"{name}_{place}"] = _median(calls[name])
    names = list(state.benches)
    for i in range(len(names)):
        name = names[(i + turn) % len(names)]
        bench = state.benches[name]
        found[f"prefill_{name}"] = bench.measure(state.prompt, 1, False, repeats=1 if name == "w8" else 3).timing.median
        found[f"decode_{name}"] = bench.measure(state.context, 1, True, repeats=9).timing.median
    return found


def _median(call: Callable[[], object]) -> float:
    call()
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < 3 or (len(samples) < 15 and time.perf_counter() - started < PATIENCE_S / 4):
        before = time.perf_counter()
        call()
        samples.append(time.perf_counter() - before)
    return statistics.median(samples)
