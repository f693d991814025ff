"""The six needles. The meter counts, from the batch and the tensors; it never reads a clock, so equal runs give equal numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Mapping, Sequence

from minillm.perf.work import Work

GAUGES = ("weight_bytes_held", "kv_pool_bytes", "kv_allocated_bytes", "kv_live_bytes", "kv_allocated_peak", "kv_live_peak")


@dataclass(frozen=True)
class Needles:
    """What the engine did between two moments. Subtract an earlier snapshot from a later one; sizes held are the later one's.

    Skip: tokens_computed went through the model; tokens_reused did not, because their KV was there (summed over steps);
    prefix_tokens were found in a prefix cache, loaded_tokens of them in a tier below the pool. Compute less: flops by precision.
    index_flops and index_bytes are the share of sparse attention's indexer, and counted in the others too.
    Move less: bytes by kind; those over the link to a host or disk tier are apart, in tier_read_bytes and tier_write_bytes.
    Occupy less: bytes held; allocated counts whole blocks, live only tokens, peaks are since the last reset.
    Saturate: slots (of max_num_seqs) used, padded and idle, summed over steps; padded_tokens computed for nobody; launches;
    stalled_tokens: decoding requests in a step that also computes somebody's prompt, or that had to sit one out.
    Break serial: steps are passes over the weights; row_passes counts a pass once per request that got a token from it;
    wasted tokens were sampled and are in no output: their request had ended, which an overlapped step sees too late.
    Of mixtures of experts, summed over layers and steps: mixtures passed, routed rows that went to experts (top_k a token),
    experts_touched that got any and whose weights were read, busiest_rows of the expert that got most.
    """

    tokens_computed: int = 0
    tokens_reused: int = 0
    prefix_tokens: int = 0
    loaded_tokens: int = 0
    flops: dict[str, int] = field(default_factory=dict)
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    activation_bytes: int = 0
    index_flops: int = 0
    index_bytes: int = 0
    tier_read_bytes: int = 0
    tier_write_bytes: int = 0
    weight_bytes_held: int = 0
    kv_pool_bytes: int = 0
    kv_allocated_bytes: int = 0
    kv_live_bytes: int = 0
    kv_allocated_peak: int = 0
    kv_live_peak: int = 0
    slots_used: int = 0
    slots_padded: int = 0
    slots_idle: int = 0
    padded_tokens: int = 0
    launches: int = 0
    stalled_tokens: int = 0
    steps: int = 0
    row_passes: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    wasted: int = 0
    mixtures: int = 0
    routed_rows: int = 0
    experts_touched: int = 0
    busiest_rows: int = 0

    @property
    def experts_per_step(self) -> float:
        """Distinct experts that a step touches in a mixture, on average; 0 for a dense model."""
        return self.experts_touched / self.mixtures if self.mixtures else 0.0

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes

    @property
    def work(self) -> Work:
        """The same counts as one operator's Work, for a roofline."""
        return Work(
            self.flops, self.weight_bytes, self.kv_read_bytes, self.kv_write_bytes, self.activation_bytes, self.launches,
            self.index_flops, self.index_bytes,
        )  # fmt: skip

    @property
    def passes_per_token(self) -> float:
        """Passes a request waits for, per token it gets: 1 without speculation."""
        return self.row_passes / self.output_tokens if self.output_tokens else 0.0

    def __sub__(self, earlier: "Needles") -> "Needles":
        changes: dict[str, Any] = {"flops": {p: n - earlier.flops.get(p, 0) for p, n in self.flops.items()}}
        for f in fields(self):
            if f.name != "flops" and f.name not in GAUGES:
                changes[f.name] = getattr(self, f.name) - getattr(earlier, f.name)
        return replace(self, **changes)

    def by_verb(self) -> dict[str, dict[str, int]]:
        """{verb: {counter: count}}, verbs in the order of the course. The counters of tiers, of an indexer and of
        experts are there once one was used."""
        return {
            "skip": self._pick("tokens_computed", "tokens_reused", "prefix_tokens") | self._moved("loaded_tokens"),
            "compute less": {f"flops_{p}": n for p, n in sorted(self.flops.items())}
            | self._index("index_flops")
            | self._routed(),
            "move less": self._pick("weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes")
            | self._moved("tier_read_bytes", "tier_write_bytes")
            | self._index("index_bytes"),
            "occupy less": self._pick(*GAUGES),
            "saturate": self._pick("slots_used", "slots_padded", "slots_idle", "padded_tokens", "launches", "stalled_tokens"),
            "break serial": self._pick("steps", "row_passes", "output_tokens", "drafted", "accepted", "wasted"),
        }

    def _pick(self, *names: str) -> dict[str, int]:
        return {name: getattr(self, name) for name in names}

    def _moved(self, *names: str) -> dict[str, int]:
        return self._pick(*names) if self.tier_read_bytes or self.tier_write_bytes or self.loaded_tokens else {}

    def _index(self, name: str) -> dict[str, int]:
        return self._pick(name) if self.index_bytes else {}

    def _routed(self) -> dict[str, int]:
        return self._pick("mixtures", "routed_rows", "experts_touched", "busiest_rows") if self.mixtures else {}

    def __str__(self) -> str:
        lines = []
        for verb, counters in self.by_verb().items():
            body = "  ".join(f"{name} {value:,}" for name, value in counters.items())
            lines.append(f"{verb:<13} {body}")
        return "\n".join(lines)


@dataclass(frozen=True)
class StepCounts:
    """One step from the scheduler's side, taken before it runs: tokens and rows of requests and of padding, tokens whose KV was
    there already, KV bytes while the step runs. The model's side of it is its Work."""

    tokens: int
    reused_tokens: int
    prefix_tokens: int
    loaded_tokens: int
    padded_tokens: int
    rows: int
    padded_rows: int
    idle_rows: int
    stalled_tokens: int
    sampled_rows: int
    kv_allocated: int
    kv_live: int
    drafted: int = 0


class Meter:
    """Adds up steps. ``snapshot()`` is the needles since the last ``reset()``."""

    def __init__(self, weight_bytes_held: int = 0, kv_pool_bytes: int = 0):
        self._held = Needles(weight_bytes_held=weight_bytes_held, kv_pool_bytes=kv_pool_bytes)
        self.reset()

    def reset(self) -> None:
        self._needles = self._held
        self._expert_rows: dict[int, list[int]] = {}

    def snapshot(self) -> Needles:
        return self._needles

    def hold_kv(self, kv_allocated: int, kv_live: int) -> None:
        """What is held between two steps, after finished requests gave their blocks back."""
        self._needles = replace(self._needles, kv_allocated_bytes=kv_allocated, kv_live_bytes=kv_live)

    def move_tiers(self, read_bytes: int, written_bytes: int) -> None:
        """Bytes that came out of host and disk tiers and went into them since the last call."""
        n = self._needles
        self._needles = replace(
            n, tier_read_bytes=n.tier_read_bytes + read_bytes, tier_write_bytes=n.tier_write_bytes + written_bytes
        )

    def route(self, counts: Mapping[int, Sequence[int]]) -> None:
        """One step's mixtures. counts: {layer: rows that each expert got}."""
        if not counts:  # a dense model, at every step
            return
        n = self._needles
        for layer, rows in counts.items():
            before = self._expert_rows.get(layer, [0] * len(rows))
            self._expert_rows[layer] = [a + b for a, b in zip(before, rows, strict=True)]
        self._needles = replace(
            n, mixtures=n.mixtures + len(counts), routed_rows=n.routed_rows + sum(map(sum, counts.values())),
            experts_touched=n.experts_touched + sum(sum(1 for r in rows if r) for rows in counts.values()),
            busiest_rows=n.busiest_rows + sum(map(max, counts.values())),
        )  # fmt: skip

    @property
    def expert_rows(self) -> dict[int, list[int]]:
        """{layer: rows that each expert got} since the last reset."""
        return {layer: list(rows) for layer, rows in self._expert_rows.items()}

    def record(self, step: StepCounts, work: Work, output_tokens: int, accepted: int = 0, wasted: int = 0) -> None:
        n = self._needles
        total = n.work + work
        self._needles = replace(
            n,
            tokens_computed=n.tokens_computed + step.tokens, tokens_reused=n.tokens_reused + step.reused_tokens,
            prefix_tokens=n.prefix_tokens + step.prefix_tokens,
            loaded_tokens=n.loaded_tokens + step.loaded_tokens, flops=dict(total.flops), weight_bytes=total.weight_bytes,
            kv_read_bytes=total.kv_read_bytes, kv_write_bytes=total.kv_write_bytes, activation_bytes=total.activation_bytes,
            index_flops=total.index_flops, index_bytes=total.index_bytes,
            kv_allocated_bytes=step.kv_allocated, kv_live_bytes=step.kv_live,
            kv_allocated_peak=max(n.kv_allocated_peak, step.kv_allocated), kv_live_peak=max(n.kv_live_peak, step.kv_live),
            slots_used=n.slots_used + step.rows, slots_padded=n.slots_padded + step.padded_rows,
            slots_idle=n.slots_idle + step.idle_rows,
            padded_tokens=n.padded_tokens + step.padded_tokens, launches=total.launches,
            stalled_tokens=n.stalled_tokens + step.stalled_tokens, steps=n.steps + 1,
            row_passes=n.row_passes + step.sampled_rows, output_tokens=n.output_tokens + output_tokens,
            drafted=n.drafted + step.drafted, accepted=n.accepted + accepted, wasted=n.wasted + wasted,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        # every needle can be read on the meter itself: llm.meter.tokens_computed
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._needles, name)

    def __str__(self) -> str:
        return str(self._needles)
