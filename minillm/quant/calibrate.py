"""Calibration: what each linear layer is fed, seen while the engine's own model runs over some text."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Callable, Sequence, Union

import torch
from torch import Tensor, nn

from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.engine.admission import TokenizerLike
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.transformer import Layer, Transformer

ROW_TOKENS = 256
MAX_ROWS = 16
SAMPLE = 128
LINEARS = {
    "self_attn.qkv_proj": lambda layer: layer.attention.qkv,
    "self_attn.o_proj": lambda layer: layer.attention.out,
    "mlp.gate_up_proj": lambda layer: layer.mlp.gate_up,
    "mlp.down_proj": lambda layer: layer.mlp.down,
}
"""The linear layers of a Layer by the names that a checkpoint gives them, fused."""


@dataclass(frozen=True)
class Seen:
    """The inputs x [rows, in] of one linear layer, in what quantisers ask for.

    gram: mean of x xᵀ [in, in]; with it the mean squared error of any other weight is exact. magnitude: mean of |x| [in]. peak:
    largest |x| [in]. sample: at most 128 of the inputs themselves [rows, in], for those who round inputs.
    """

    gram: Tensor
    magnitude: Tensor
    peak: Tensor
    sample: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Seen":
        chosen = torch.arange(min(len(x), SAMPLE), device=x.device) * len(x) // min(len(x), SAMPLE)
        return cls(x.T @ x / len(x), x.abs().mean(0), x.abs().amax(0), x[chosen])

    def loss(self, weight: Tensor, other: Tensor) -> float:
        """Mean over inputs of the squared distance between their products with two weights [out, in]."""
        error = other - weight
        return float(((error @ self.gram) * error).sum())


def calibration_rows(
    texts: Sequence[Union[str, Sequence[int]]] | None, tokenizer: TokenizerLike | None, model: Transformer
) -> list[list[int]]:
    """Rows of at most 256 tokens, at most 16 of them. None is the project's own text. ValueError for text without a tokenizer,
    an empty text or an id outside the vocabulary."""
    if texts is None:
        from minillm.quant.calibration_text import TEXTS

        texts = TEXTS
    length, vocab = min(ROW_TOKENS, model.config.max_position), model.config.vocab_size
    rows: list[list[int]] = []
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError(
                    "calibration on text needs a tokenizer, and the model has none: give QuantConfig(calibration=[ids, …])"
                )
            ids = list(tokenizer.encode(text))
        else:
            ids = _whole(text)
        bad = [i for i in ids if not 0 <= i < vocab]
        if bad or not ids:
            raise ValueError(f"calibration must hold token ids in 0..{vocab - 1}, got {bad[0] if bad else 'an empty row'}")
        rows += [ids[i : i + length] for i in range(0, len(ids), length)]
    # an even choice where there is too much
    return [rows[i * len(rows) // MAX_ROWS] for i in range(MAX_ROWS)] if len(rows) > MAX_ROWS else rows


def _whole(ids: Sequence[int]) -> list[int]:
    try:
        return [operator.index(i) for i in ids]
    except TypeError:
        raise ValueError(f"calibration must hold texts or lists of token ids, got {ids!r:.60}") from None


@torch.inference_mode()
def layer_by_layer(
    model: Transformer, rows: Sequence[Sequence[int]], change: Callable[[str, Layer, dict[str, Seen]], None]
) -> None:
    """One pass of the model over rows of token ids; before each layer runs, ``change(name, layer, seen)`` may change it in place.

    seen: the inputs of its linear layers as they are after all earlier changes. One layer's inputs are held at a time.
    """
    size = max(map(len, rows))
    batch = ForwardBatch.build([Row(ids, 0, [i + 1]) for i, ids in enumerate(rows)], size, device=model.device)
    store = PlainKVStore.allocate(model.config, (len(rows) + 1) * size, model.dtype, model.device, shared=True)
    backend = TorchAttention(model.config.sliding_window)

    def before(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(layer: nn.Module, step: tuple[Any, ...]) -> None:
            seen = _watch(layer, step)
            for linear, inputs in seen.items():
                if not torch.isfinite(inputs.gram).all():
                    raise ValueError(
                        f"{name}.{linear} is fed numbers that are not finite, or too large to be squared, on the calibration "
                        "text: nothing can be fitted to them"
                    )
            change(name, layer, seen)  # type: ignore[arg-type]

        return hook

    hooks = [layer.register_forward_pre_hook(before(f"model.layers.{i}")) for i, layer in enumerate(model.layers)]
    try:
        model(batch, store, backend, backend.plan(batch, model.dtype))
    finally:
        for handle in hooks:
            handle.remove()


def _watch(layer: nn.Module, step: tuple[Any, ...]) -> dict[str, Seen]:
    """Run the layer once more than the pass does, and note what reaches its linear layers."""
    seen: dict[str, Seen] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = Seen.of(inputs[0])

        return hook

    hooks = [find(layer).register_forward_pre_hook(note(name)) for name, find in LINEARS.items()]
    try:
        layer.forward(*step)
    finally:
        for handle in hooks:
            handle.remove()
    return seen
