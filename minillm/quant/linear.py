"""The seam for linear layers: how a weight is stored, and how rows are multiplied by it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Hashable, Mapping, Protocol, TypeVar, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.checking import check_parts
from minillm.perf.work import Work

Packed = Mapping[str, Tensor | None]
PARTS = "pack", "apply", "unpack"
Form = TypeVar("Form")
Forms = Mapping[int, tuple["LinearMethod", Packed]]
"""What a compiled step multiplies by: {fewest rows: a method and what it kept}."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one product moves besides its rows: weights read, and intermediates of its own written and read. precision: in
    which it multiplies, where that is not the layer's dtype. launches: operators that it is made of."""

    weight_bytes: int
    scratch_bytes: int = 0
    precision: str = ""
    launches: int = 1


class LinearMethod(Protocol):
    """A storage format of weights with the product that belongs to it.

    A method whose products do not read all that pack kept may have ``traffic(packed, rows) -> Traffic``, which the meter then
    asks. One that has products which torch.export can trace may have ``traced(packed) -> {fewest rows: (method, packed)}``, of
    which compile=True takes, for a step of so many rows, the last that applies; the first is for 1 row.
    One that treats layers differently may have ``for_layer(name) -> LinearMethod``; it then needs nothing else.
    """

    def pack(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
        """weight [out, in] and bias [out] → the tensors to keep. Called once, at load."""
        ...

    def apply(self, packed: Packed, x: Tensor) -> Tensor:
        """x [rows, in] → [rows, out]."""
        ...

    def unpack(self, packed: Packed) -> Tensor:
        """The weight [out, in] that apply multiplies by."""
        ...


class LayerMethods(Protocol):
    """A linear method for each layer, by its name: "model.layers.0.self_attn.qkv_proj", …, "lm_head"."""

    def for_layer(self, name: str) -> LinearMethod: ...


AnyMethod = Union[LinearMethod, LayerMethods]


def method_for(method: AnyMethod, name: str) -> LinearMethod:
    """The method of one layer."""
    chooser: Any = getattr(method, "for_layer", None)
    if chooser is None:
        return method  # type: ignore[return-value]
    chosen: LinearMethod = chooser(name)
    check_parts(f"for_layer({name!r}) of {type(method).__name__}", chosen, PARTS, "a LinearMethod")
    return chosen


def for_rows(forms: Mapping[int, Form], rows: int) -> Form:
    """Of what is held by the fewest rows that it is for, that for so many rows."""
    return forms[max(fewest for fewest in forms if fewest <= rows)]


def _is_form(item: tuple[Any, Any]) -> bool:
    rows, form = item
    return type(rows) is int and rows >= 1 and isinstance(form, tuple) and len(form) == 2 and isinstance(form[1], Mapping)


class PlainLinear:
    """The weight as it is, multiplied by torch."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
        return {"weight": weight.contiguous(), "bias": bias}

    def apply(self, packed: Packed, x: Tensor) -> Tensor:
        return F.linear(x, packed["weight"], packed["bias"])  # type: ignore[arg-type]

    def unpack(self, packed: Packed) -> Tensor:
        weight = packed["weight"]
        assert weight is not None
        return weight.to_dense() if weight.is_mkldnn else weight

    def traced(self, packed: Packed) -> Forms:
        """The plain product with the plain weight: torch's compiler packs it in its own way."""
        return {1: (PlainLinear(), {"weight": self.unpack(packed), "bias": packed["bias"]})}


class PrepackedLinear(PlainLinear):
    """The weight in oneDNN's blocked layout. In bfloat16 one decoding row reads it at 18 GB/s where F.linear, which reorders
    the weight at every call, reads at 11 (two cores with AMX)."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
        return {"weight": torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), "bias": bias}

    def apply(self, packed: Packed, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed["weight"], packed["bias"], "none", [], "")


def default_method(dtype: torch.dtype, device: torch.device | str) -> LinearMethod:
    """What is fastest without changing a weight: prepacking pays in bfloat16 on a CPU that oneDNN supports."""
    if dtype == torch.bfloat16 and torch.device(device).type == "cpu" and prepack_available():
        return PrepackedLinear()
    return PlainLinear()


def prepack_available() -> bool:
    """Whether this torch build and CPU have oneDNN's bfloat16 linear."""
    ops = torch.ops.mkldnn
    if not (
        torch.backends.mkldnn.is_available() and hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")
    ):
        return False
    return bool(ops._is_mkldnn_bf16_supported())


class Linear(nn.Module):
    """y = x Wᵀ + b, by whichever method."""

    weight: Tensor  # [out, in], where the method keeps it as it is
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, method: LinearMethod):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.method = method
        self.replace(weight, bias)
        self.traffic(1)  # what it says wrongly is said at load, not within a step

    def replace(self, weight: Tensor, bias: Tensor | None) -> None:
        """Hold other values of the same shape; the tensors that were held are not written to."""
        self._bias = bias
        self._keep(self.method.pack(weight, bias))

    def _keep(self, packed: Packed) -> None:
        if not isinstance(packed, Mapping) or not all(t is None or isinstance(t, Tensor) for t in packed.values()):
            what = f"pack of {type(self.method).__name__} must return the tensors to keep by name, or None for one there is not"
            raise ValueError(f"{what}, got {packed!r:.60}")
        for name, tensor in packed.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self._buffers, x)

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """Weight [out, in] and bias [out] as the layer was built from them."""
        return self.method.unpack(self._buffers), self._bias

    def traced(self) -> "dict[int, Linear]":
        """This layer as torch.export can trace it, by the fewest rows that each form is for; over the same tensors where it can.
        ValueError where it cannot."""
        ask: Any = getattr(self.method, "traced", None)
        if ask is None:
            raise ValueError(f"{type(self.method).__name__} has no product that torch can compile")
        forms = ask(self._buffers)
        if not isinstance(forms, Mapping) or 1 not in forms or not all(map(_is_form, forms.items())):
            raise ValueError(
                f"traced of {type(self.method).__name__} must return {{fewest rows: (method, packed)}}, the first for 1 row, got "
                f"{forms!r:.60}"
            )
        return {rows: self._holding(*form) for rows, form in forms.items()}

    def _holding(self, method: LinearMethod, packed: Packed) -> "Linear":
        layer = copy.copy(self)
        layer._buffers, layer._non_persistent_buffers_set = {}, set()
        layer.method = method
        layer._keep(packed)
        return layer

    def nbytes(self) -> int:
        """Bytes held by everything that pack kept."""
        return sum(t.nbytes for t in self._buffers.values() if t is not None)

    def traffic(self, rows: int) -> Traffic:
        """What the method says that a product of so many rows moves; all that pack kept where it says nothing."""
        asked: Any = getattr(self.method, "traffic", None)
        if asked is None:
            return Traffic(self.nbytes())
        said = asked(self._buffers, rows)
        if not isinstance(said, Traffic):
            raise ValueError(f"traffic of {type(self.method).__name__} must return a Traffic, got {said!r:.60}")
        return said

    def kind(self) -> Hashable:
        """What its work depends on besides the rows: the method with what it was given, whatever that is, but for the layer's
        name; and the tensors it keeps."""
        kept = tuple((name, t.dtype, tuple(t.shape)) for name, t in self._buffers.items() if t is not None)
        held = getattr(self.method, "__dict__", {})
        if any(getattr(kind, "__slots__", ()) for kind in type(self.method).__mro__):  # what is in slots is in no dictionary
            return type(self.method), id(self.method), kept
        given = {name: v if isinstance(v, (str, int, float, type(None))) else id(v) for name, v in held.items() if name != "name"}
        return type(self.method), tuple(sorted(given.items())), kept

    def work(self, rows: int) -> Work:
        """The weight is read once however many rows there are: that is what batching buys. No rows, no read."""
        if rows == 0:
            return Work()
        element = self.dtype.itemsize
        traffic = self.traffic(rows)
        return Work(
            flops={traffic.precision or str(self.dtype).removeprefix("torch."): 2 * rows * self.in_features * self.out_features},
            weight_bytes=traffic.weight_bytes,
            activation_bytes=rows * (self.in_features + self.out_features) * element + traffic.scratch_bytes,
            launches=traffic.launches,
        )
