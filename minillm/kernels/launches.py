"""What the engine's functions would launch, recorded without launching it.

Each case calls the same function that the engine calls, on tensors of torch's "meta" device, which have a shape and no memory;
where it would launch a kernel, the arguments are kept.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch

MODULES = ("flash_prefill", "paged_decode", "fused", "matmul", "int8_matmul")


@dataclass(frozen=True)
class Launch:
    """One kernel launch as its wrapper asked for it: argument values by name, and options of the compiler."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


class Recorder:
    """Stands in a module for a kernel and keeps its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*values: Any, **named: Any) -> None:
            names = self.kernel.arg_names
            options: dict[str, Any] = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
            self.launches.append(Launch(self.kernel, {**dict(zip(names, values, strict=False)), **named}, options))

        return launch


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within it, the wrappers of all kernel modules record their launches instead of launching."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    replaced: list[tuple[Any, str, Any]] = []
    for name in MODULES:
        module = importlib.import_module(f"minillm.kernels.{name}")
        for attribute, value in list(vars(module).items()):
            if isinstance(value, JITFunction) and attribute.endswith("_kernel"):
                replaced.append((module, attribute, value))
                setattr(module, attribute, Recorder(value, launches))
    try:
        yield launches
    finally:
        for module, attribute, value in replaced:
            setattr(module, attribute, value)


def cases(wide: bool) -> dict[str, Callable[[], object]]:
    """The configurations shipped, by name: heads of 64 and 128 in 16 bits, as SmolLM2 and larger Llamas have them. wide: for
    chips whose matrix units take the wide tiles (see flash_prefill.prefill_tile)."""
    from minillm.kernels import flash_prefill, fused, int8_matmul, matmul, paged_decode

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def int32(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    def prefill(head_dim: int, heads: int, kv_heads: int, window: int | None = None) -> None:
        q = empty(512, heads + 2 * kv_heads, head_dim)[:, :heads]
        flash_prefill.flash_prefill(
            q, empty(4096, 2, kv_heads, head_dim), int32(4, 256), int32(4), int32(4), int32(4), int32(20), int32(20),
            torch.empty_like(q), block_size=16, tile=flash_prefill.prefill_tile(head_dim, q.dtype, wide), window=window,
        )  # fmt: skip

    def decode(head_dim: int, heads: int, kv_heads: int, splits: int) -> None:
        q = empty(32, heads, head_dim)
        paged_decode.paged_decode(
            q, empty(4096, 2, kv_heads, head_dim), int32(32, 256), int32(32), int32(32), int32(32), int32(32), q, block_size=16,
            tile=paged_decode.decode_tile(head_dim, q.dtype), num_splits=splits,
        )  # fmt: skip

    def rope(head_dim: int, heads: int, kv_heads: int) -> None:
        qkv, table = empty(32, heads + 2 * kv_heads, head_dim), empty(32, 2, 1, head_dim)
        fused.rope_store(
            qkv[:, :-kv_heads], qkv[:, -kv_heads:], table[:, 0], table[:, 1], empty(32, dtype=torch.int64),
            empty(4096, 2, kv_heads, head_dim),
        )  # fmt: skip

    def w4a16(rows: int, splits: int | None = None) -> None:
        k, n, group = 8192, 8192, 128
        matmul.w4a16_matmul(
            empty(rows, k), int32(k, n // 8), empty(k // group, n), int32(k // group, n // 8), group, None, splits
        )

    def w8a8(rows: int) -> None:
        k = n = 8192
        x, weight = empty(rows, k, dtype=torch.int8), empty(n, k, dtype=torch.int8)
        int8_matmul.int8_matmul(x, weight, empty(n, dtype=torch.float32), torch.bfloat16)

    return {
        "D=64": lambda: prefill(64, 9, 3),
        "D=128": lambda: prefill(128, 32, 8),
        "D=128, window": lambda: prefill(128, 32, 8, window=4096),
        "D=64, one part": lambda: decode(64, 9, 3, 1),
        "D=64, split": lambda: decode(64, 9, 3, 8),
        "D=128, split": lambda: decode(128, 32, 8, 8),
        "norm of 4096": lambda: fused.rms_norm(empty(32, 4096), empty(4096), 1e-5),
        "sum and norm of 4096": lambda: fused.rms_norm(empty(32, 4096), empty(4096), 1e-5, empty(32, 4096)),
        "D=64, rope": lambda: rope(64, 9, 3),
        "D=128, rope": lambda: rope(128, 32, 8),
        "width 1536": lambda: fused.swiglu(empty(32, 3072)),
        "16 rows, split": lambda: w4a16(16, 4),
        "32 rows, split": lambda: w4a16(32, 2),
        "64 rows": lambda: w4a16(64, 1),
        "dense": lambda: w4a16(65),
        "16 rows, int8": lambda: w8a8(16),
        "64 rows, int8": lambda: w8a8(64),
        "512 rows, int8": lambda: w8a8(512),
        "tokens of 4096": lambda: int8_matmul.round_rows(empty(32, 4096), 2.0**-100),
    }
