"""How weights are to be quantised: one frozen, validated object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Collection, Iterable, Literal, Mapping, Sequence, Union

METHODS = ("rtn", "awq", "gptq", "w8a8", "fp8")
BITS = (2, 3, 4, 8)
PER_CHANNEL = -1
KERNELS = ("auto", "torch", "triton")
BY_METHOD: Any = object()
"""Stands for what a method takes by itself: 4 bits in groups of 64 with zero points; for "w8a8" and "fp8", which have no
choice, 8 bits on a symmetric grid per channel."""


@dataclass(frozen=True)
class QuantConfig:
    """Quantisation of weights, and of activations too where the method says so.

    Weight-only methods keep activations and arithmetic in the model's dtype.
    method: "rtn" rounds to nearest; "awq" scales salient channels first (Lin et al. 2023, arXiv 2306.00978); "gptq" lets later
    columns make up for the error of earlier ones (Frantar et al. 2022, arXiv 2210.17323). With activations: "w8a8" multiplies
    whole numbers of 8 bits (Xiao et al. 2022, arXiv 2211.10438); "fp8" e4m3 numbers, emulated where the hardware has none.
    bits: 2, 3, 4 or 8 per weight. group: weights along a row that share a scale; -1 is one scale per output channel.
    symmetric: no zero points; the grid is then centred on 0. head_bits: the output head is rounded to nearest on a symmetric
    grid per channel in so many bits; None leaves it as it is.
    calibration: texts, or lists of token ids, that "awq", "gptq" and "w8a8" are fitted to; None takes the project's own text.
    dense_from: rows of a step from which a second copy, dequantised to the model's dtype, is multiplied by instead; it is held
    in memory beside the packed one. None keeps no such copy; "auto" keeps one where packed kernels were measured to lose: in
    bfloat16 on a CPU.
    migration: of "w8a8": how much of the activations' outliers the weights take over: 0 to 1, None for nothing (and no
    calibration), or "search" for what loses least on the calibration text, layer by layer.
    kernel: what multiplies by 4-bit layers: "triton", the kernel of ``minillm.kernels.matmul``; "torch"; or "auto", Triton's on a
    GPU and torch's on a CPU.
    """

    method: Literal["rtn", "awq", "gptq", "w8a8", "fp8"] = "rtn"
    bits: int = BY_METHOD
    group: int = BY_METHOD
    symmetric: bool = BY_METHOD
    head_bits: int | None = 8
    calibration: Sequence[Union[str, Sequence[int]]] | None = None
    dense_from: int | None | Literal["auto"] = "auto"
    migration: float | None | Literal["search"] = "search"
    kernel: Literal["auto", "torch", "triton"] = "auto"

    def __post_init__(self) -> None:
        if not _is_word(self.method, *METHODS):
            raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {self.method!r:.60}")
        whole = self.method in ("w8a8", "fp8")
        for name, grid in (("bits", 8 if whole else 4), ("group", PER_CHANNEL if whole else 64), ("symmetric", whole)):
            if getattr(self, name) is BY_METHOD:
                object.__setattr__(self, name, grid)
            elif whole and (type(getattr(self, name)) is not type(grid) or getattr(self, name) != grid):
                raise ValueError(f"{name} of {self.method!r} is always {grid}, got {getattr(self, name)!r:.60}")
        if self.head_bits is not None:
            _check_bits("head_bits", self.head_bits)
        check_layer(self.bits, self.group, self.symmetric, self.dense_from, self.kernel)
        if self.kernel == "triton" and self.bits != 4:
            raise ValueError(f"kernel='triton' multiplies by 4 bits, got bits={self.bits}")
        if self.calibration is not None and not _are_texts(self.calibration):
            raise ValueError(f"calibration must be a list of at least one text or list of ids, got {self.calibration!r:.60}")
        strength = self.migration
        if strength is not None and not _is_word(strength, "search") and not _is_share(strength):
            raise ValueError(f"migration must be 0 to 1, None or 'search', got {strength!r:.60}")

    @property
    def description(self) -> str:
        """In a phrase: "AWQ, 4 bits, asymmetric, groups of 64, head in 8 bits"."""
        if self.method == "fp8":
            return f"FP8, e4m3 weights per channel and activations per token, {self._head}"
        if self.method == "w8a8":
            moved = "none" if self.migration is None else "searched" if self.migration == "search" else self.migration
            return f"W8A8, weights per channel and activations per token, migration {moved}, {self._head}"
        grid = "symmetric" if self.symmetric else "asymmetric"
        group = "per channel" if self.group == PER_CHANNEL else f"groups of {self.group}"
        return f"{self.method.upper()}, {self.bits} bits, {grid}, {group}, {self._head}"

    @property
    def _head(self) -> str:
        return "head as it was" if self.head_bits is None else f"head in {self.head_bits} bits"


def check_layer(bits: Any, group: Any, symmetric: Any, dense_from: Any, kernel: Any) -> None:
    """ValueError for what no layer of groups can be made of."""
    _check_bits("bits", bits)
    if not _is_count(group) and not (type(group) is int and group == PER_CHANNEL):
        raise ValueError(f"group must be a whole number of at least 1, or -1 for one per channel, got {group!r:.60}")
    if not isinstance(symmetric, bool):
        raise ValueError(f"symmetric must be True or False, got {symmetric!r:.60}")
    if dense_from is not None and not _is_word(dense_from, "auto") and not _is_count(dense_from):
        raise ValueError(f"dense_from must be a whole number of at least 1, None or 'auto', got {dense_from!r:.60}")
    if not _is_word(kernel, *KERNELS):
        raise ValueError(f"kernel must be one of {', '.join(map(repr, KERNELS))}, got {kernel!r:.60}")


def _check_bits(name: str, bits: Any) -> None:
    if not _is_count(bits) or bits not in BITS:
        raise ValueError(f"{name} must be one of {', '.join(map(str, BITS))}, got {bits!r:.60}")


def _are_texts(value: Any) -> bool:
    """Whether it holds texts or rows of token ids, at least one."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection) or not len(value):
        return False
    return all(isinstance(text, str) or (isinstance(text, Iterable) and not isinstance(text, bytes)) for text in value)


def _is_word(value: Any, *words: str) -> bool:
    return isinstance(value, str) and value in words


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def as_config(value: Any) -> QuantConfig | None:
    """The QuantConfig that a switch names ("awq") or is; None where it is neither."""
    if isinstance(value, str):
        if value not in METHODS:
            raise ValueError(
                f"quantization must be None, one of {', '.join(map(repr, METHODS))}, or an object, got {value!r:.60}"
            )
        return QuantConfig(value)  # type: ignore[arg-type]
    return value if isinstance(value, QuantConfig) else None
