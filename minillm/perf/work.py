"""What an operator does, counted from shapes and element sizes: arithmetic by precision, bytes by kind. No clock is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping


@dataclass(frozen=True)
class Work:
    """Counted work; add two with ``+``, repeat one with ``* n``.

    flops: floating-point operations per precision, e.g. {"bfloat16": 10}; a multiply-add is two.
    weight_bytes: parameters read. kv_read_bytes, kv_write_bytes: the KV store's share.
    activation_bytes: intermediates read and written by operators; what a fused operator keeps in registers is not here.
    launches: operators started (on a GPU, kernel launches).
    index_flops, index_bytes: what of all these choosing the keys to read took, where not all are read.
    """

    flops: Mapping[str, int] = field(default_factory=dict)
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    activation_bytes: int = 0
    launches: int = 0
    index_flops: int = 0
    index_bytes: int = 0

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes

    def __add__(self, other: "Work") -> "Work":
        flops = dict(self.flops)
        for precision, n in other.flops.items():
            flops[precision] = flops.get(precision, 0) + n
        return Work(
            flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_write_bytes + other.kv_write_bytes,
            self.activation_bytes + other.activation_bytes,
            self.launches + other.launches,
            self.index_flops + other.index_flops,
            self.index_bytes + other.index_bytes,
        )

    def __mul__(self, n: int) -> "Work":
        return Work(
            {precision: n * f for precision, f in self.flops.items()},
            n * self.weight_bytes,
            n * self.kv_read_bytes,
            n * self.kv_write_bytes,
            n * self.activation_bytes,
            n * self.launches,
            n * self.index_flops,
            n * self.index_bytes,
        )


def visible_pairs(q_len: int, kv_len: int, window: int | None = None, sinks: int = 0) -> int:
    """Query-key pairs that a causal mask admits when the last q_len of kv_len tokens are computed: each query sees itself and
    everything before it, with a sliding window the last ``window`` keys and the first ``sinks`` only."""

    def up_to(n: int, limit: int) -> int:
        """1 + 2 + … + n, no summand above the limit."""
        full = min(max(n, 0), limit)
        return full * (full + 1) // 2 + max(n - full, 0) * limit

    def seen(n: int) -> int:
        """Pairs of the first n queries: what the window shows, and the sinks that have left it."""
        return up_to(n, n) if window is None else up_to(n, window) + up_to(n - window, sinks)

    return seen(kv_len) - seen(kv_len - q_len)
