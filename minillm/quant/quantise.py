"""Quantise a whole model: one walk for every method, each layer fitted to what the quantised layers before it give."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Mapping

import torch
from torch import Tensor

from minillm.engine.admission import TokenizerLike
from minillm.model.transformer import Layer, Transformer
from minillm.quant.awq import search_scales
from minillm.quant.calibrate import LINEARS, Seen, calibration_rows, layer_by_layer
from minillm.quant.config import QuantConfig
from minillm.quant.fold import fold_scales, multiply_inputs, shared_by_heads
from minillm.quant.fp8 import FP8Linear
from minillm.quant.gptq import gptq
from minillm.quant.grid import Codes, check_finite, group_size, quantise
from minillm.quant.group_linear import GroupLinear
from minillm.quant.linear import Linear, LinearMethod, PlainLinear, default_method
from minillm.quant.smooth import smooth_layer
from minillm.quant.w8a8 import W8A8Linear

log = logging.getLogger("minillm")


class QuantMethods:
    """A linear method per layer: groups for the layers, channels for the head. Given codes are handed to the layers they name."""

    def __init__(
        self, config: QuantConfig, dtype: torch.dtype, device: torch.device | str, codes: Mapping[str, Codes] | None = None
    ):
        self.config, self.dtype, self.device, self._codes = config, dtype, device, dict(codes or {})

    def for_layer(self, name: str) -> LinearMethod:
        c = self.config
        if name == "lm_head":
            if c.head_bits is None:
                return default_method(self.dtype, self.device)
            kernel = "auto" if c.kernel == "triton" and c.head_bits != 4 else c.kernel
            return GroupLinear(c.head_bits, -1, True, c.dense_from, kernel=kernel, name=name)
        if c.method == "w8a8":
            return W8A8Linear(codes=self._codes.pop(name, None), name=name)
        if c.method == "fp8":
            return FP8Linear(name=name)
        codes = self._codes.pop(name, None)
        return GroupLinear(c.bits, c.group, c.symmetric, c.dense_from, kernel=c.kernel, codes=codes, name=name)


@dataclass(frozen=True)
class LayerLoss:
    """Mean squared error of a linear layer's output on calibration inputs: rounded to nearest, and as the method chose. For
    "w8a8" inputs are rounded too."""

    name: str
    nearest: float
    chosen: float


@dataclass
class Fitted:
    """What a method found. weights: the fused tensors that belong to the codes (AWQ and W8A8 rescale norms and rows). strengths:
    of W8A8's migration by layer, None where there is none."""

    weights: dict[str, Tensor]
    codes: dict[str, Codes] = field(default_factory=dict)
    losses: list[LayerLoss] = field(default_factory=list)
    strengths: dict[str, float | None] = field(default_factory=dict)


def quantise_model(
    model: Transformer, config: QuantConfig, tokenizer: TokenizerLike | None = None,
    dtype: torch.dtype | None = None, device: torch.device | str | None = None,
) -> Transformer:  # fmt: skip
    """A quantised copy of a model in dtype (its own unless said); the model stays as it is.

    "awq", "gptq" and "w8a8" run it over config.calibration. ValueError: in_features that are no multiple of the group, text
    without a tokenizer, weights that are not finite.
    """
    if model.config.mla is not None:
        raise ValueError(
            f"{config.method!r} quantises layers with KV heads, and {model.config.name} has latent attention: leave its weights "
            f"as they are"
        )
    dtype, device = dtype or model.dtype, device or model.device
    fitted = fit(model, config, tokenizer)
    weights = {name: t.to(device=device, dtype=dtype) for name, t in fitted.weights.items()}
    result = Transformer(model.config, weights, QuantMethods(config, dtype, device, fitted.codes)).eval()
    result.storage = describe(result, config)
    return result


def describe(model: Transformer, config: QuantConfig) -> str:
    """The grid, how it is multiplied by, and what a step reads of it with few and with many rows."""
    layer: Layer = model.layers[0]  # type: ignore[assignment]
    sample = layer.attention.qkv
    if isinstance(sample.method, W8A8Linear):
        return f"{config.description}; {sample.method.gemm.about if sample.method.gemm else ''}"
    if isinstance(sample.method, FP8Linear):
        return f"{config.description}; {sample.method.about(sample._buffers['e4m3'])}"
    method = sample.method
    assert isinstance(method, GroupLinear)
    few = f"{config.description}; {method.about(sample._buffers)}"
    if "dense_copy" not in sample._buffers:
        return few
    return f"{few}, from {method.threshold} rows on a dequantised copy in {str(model.dtype).removeprefix('torch.')}"


@torch.inference_mode()
def fit(model: Transformer, config: QuantConfig, tokenizer: TokenizerLike | None = None) -> Fitted:
    """Codes for every linear layer but the head, found in float32 (float64 for a float64 model)."""
    precise = torch.float64 if model.dtype == torch.float64 else torch.float32
    fits_nothing = config.method in ("rtn", "fp8") or (config.method == "w8a8" and config.migration is None)
    if model.config.moe is not None and not fits_nothing:
        raise ValueError(
            f"quantization={config.method!r} fits a layer to what it is fed, and a calibration text feeds some of the experts of "
            f"{model.config.name} next to nothing: choose 'rtn', 'fp8' or QuantConfig('w8a8', migration=None)"
        )
    work = model.converted(precise, model.device, PlainLinear())
    layers = [(f"model.layers.{i}", layer) for i, layer in enumerate(work.layers)]
    linears = {f"{prefix}.{name}": linear for prefix, layer in layers for name, linear in _linears(layer).items()}
    for full, linear in linears.items():  # before anything is run
        group_size(linear.in_features, config.group, full)
        check_finite(linear.weight, full)
    fitted = Fitted({})
    if fits_nothing and config.method != "fp8":
        for full, linear in linears.items():
            fitted.codes[full] = quantise(linear.weight, config.bits, config.group, config.symmetric, full)
    elif not fits_nothing:
        step = {"awq": _fit_awq, "gptq": _fit_gptq, "w8a8": _fit_w8a8}[config.method]
        layer_by_layer(work, calibration_rows(config.calibration, tokenizer, work), partial(step, work, config, fitted))
    fitted.weights = work.dense_weights()
    return fitted


def _linears(layer: Any) -> dict[str, Linear]:
    """A layer's linear layers by their names within it."""
    return {"self_attn.qkv_proj": layer.attention.qkv, "self_attn.o_proj": layer.attention.out, **layer.mlp.linears()}


def _fit_gptq(
    work: Transformer, config: QuantConfig, fitted: Fitted, prefix: str, layer: Layer, seen: Mapping[str, Seen]
) -> None:
    for name, find in LINEARS.items():
        linear, full = find(layer), f"{prefix}.{name}"
        codes = gptq(linear.weight, seen[name], config.bits, config.group, config.symmetric, full)
        _keep(config, fitted, full, linear, codes, seen[name])


def _fit_awq(work: Transformer, config: QuantConfig, fitted: Fitted, prefix: str, layer: Layer, seen: Mapping[str, Seen]) -> None:
    c, now = work.config, dict(seen)
    before = {}

    def scaled(name: str) -> Tensor:
        linear, at = LINEARS[name](layer), seen[name]
        if name == "self_attn.o_proj":  # query heads that share a value head must share its scales
            at = replace(at, magnitude=shared_by_heads(at.magnitude, c.num_kv_heads, c.head_dim))
        before[name] = linear.weight, seen[name]
        scales = search_scales(linear.weight, at, config.bits, config.group, config.symmetric, f"{prefix}.{name}")
        multiply_inputs(layer, name, scales)
        now[name] = replace(seen[name], gram=seen[name].gram / torch.outer(scales, scales))
        return scales

    fold_scales(c, layer, scaled)
    for name, find in LINEARS.items():
        linear, full = find(layer), f"{prefix}.{name}"
        codes = quantise(linear.weight, config.bits, config.group, config.symmetric, full)
        _keep(config, fitted, full, linear, codes, now[name], before[name])


def _fit_w8a8(
    work: Transformer, config: QuantConfig, fitted: Fitted, prefix: str, layer: Layer, seen: Mapping[str, Seen]
) -> None:
    def keep(name: str, codes: Codes, nearest: float, chosen: float, strength: float | None) -> None:
        fitted.codes[name] = codes
        fitted.losses.append(LayerLoss(name, nearest, chosen))
        fitted.strengths[name] = strength

    smooth_layer(work, config.migration, keep, prefix, layer, seen)


def _keep(
    config: QuantConfig, fitted: Fitted, name: str, linear: Linear, codes: Codes, seen: Seen,
    unscaled: tuple[Tensor, Seen] | None = None,
) -> None:  # fmt: skip
    """Note the codes and their loss beside that of rounding to nearest, and let the layer run on the rounded weight."""
    rounded = codes.dequantise(linear.weight.dtype)
    weight, inputs = unscaled or (linear.weight, seen)
    nearest = quantise(weight, config.bits, config.group, config.symmetric, name).dequantise(weight.dtype)
    fitted.losses.append(LayerLoss(name, inputs.loss(weight, nearest), seen.loss(linear.weight, rounded)))
    fitted.codes[name] = codes
    linear.replace(rounded, linear.bias)
