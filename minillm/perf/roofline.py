"""Predicted time of counted work, and which of bandwidth, compute, capacity or overhead sets it.

The model is the roofline (Williams, Waterman, Patterson 2009): T >= rounds * max(FLOPs / (FLOP/s), bytes / (bytes/s)), subject
to weights + KV <= memory. It is a lower bound: it assumes perfect overlap, every peak reached and nothing else to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable

from minillm.checking import check_positive, check_share, check_whole
from minillm.model.config import ModelConfig
from minillm.perf.hardware import Hardware
from minillm.perf.units import format_bytes, format_time
from minillm.perf.work import Work, visible_pairs


@dataclass(frozen=True)
class Prediction:
    """Seconds that some work takes at least, and why. bound: "bandwidth", "compute", "overhead" or "capacity"."""

    seconds: float
    compute_s: float
    memory_s: float
    overhead_s: float
    bound: str
    held_bytes: float = 0.0
    usable_bytes: float = math.inf

    def verdict(self) -> str:
        """The bound and its reason in one sentence."""
        move, compute = format_time(self.memory_s), format_time(self.compute_s)
        if self.bound == "capacity":
            return f"capacity-bound: {format_bytes(self.held_bytes)} must be held, {format_bytes(self.usable_bytes)} are usable"
        if self.bound == "overhead":
            return f"overhead-bound: {format_time(self.overhead_s)} of overhead, {compute} of arithmetic, {move} of data movement"
        if self.bound == "compute":
            return f"compute-bound: {compute} of arithmetic against {move} of data movement"
        busy = 100 * self.compute_s / self.seconds if self.seconds else 0
        return f"bandwidth-bound: {move} of data movement against {compute} of arithmetic, which is busy {busy:.2g} % of the time"


def predict(
    work: Work, hardware: Hardware, overhead_s: float = 0.0, *, held_bytes: float = 0.0, usable: float = 0.9
) -> Prediction:
    """The least time that `work` takes on `hardware`.

    overhead_s: seconds of launches, scheduling and the like, on top of the roofline and not overlapped with it.
    held_bytes: weights and KV that must be in memory at once; more than the `usable` share of the memory makes the bound
    "capacity": as it stands, the work cannot run there. Work of a precision that the hardware does not list, or a
    negative number, raises ValueError.
    """
    for name, value in (("overhead_s", overhead_s), ("held_bytes", held_bytes)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    check_share("usable", usable)
    compute_s = sum(flops / hardware.rate(dtype) for dtype, flops in work.flops.items() if flops)
    memory_s = work.total_bytes / hardware.bandwidth
    roof = max(compute_s, memory_s)
    usable_bytes = usable * hardware.memory
    if held_bytes > usable_bytes:
        bound = "capacity"
    elif overhead_s > roof:
        bound = "overhead"
    else:
        bound = "compute" if compute_s > memory_s else "bandwidth"
    return Prediction(roof + overhead_s, compute_s, memory_s, overhead_s, bound, held_bytes, usable_bytes)


def latency(rounds: int, work: Work, hardware: Hardware) -> float:
    """Seconds that `rounds` dependent rounds of the same work take at least: rounds * max(FLOPs / FLOP/s, bytes / bandwidth)."""
    check_whole("rounds", rounds, at_least=0)
    return rounds * predict(work, hardware).seconds


def step_work(
    config: ModelConfig, chunks: Iterable[tuple[int, int]], *, logits: int, dtype: str = "bfloat16",
    bytes_per_weight: float = 2.0, kv_bytes_per_element: float = 2.0,
) -> Work:
    """The least work of one engine step.

    chunks: (past, new) of each sequence: tokens in its cache already, tokens computed now. logits: tokens whose next-token
    scores are wanted; the output head runs for these only. FLOPs are those of matrix products: 2 per weight and token,
    and 4 * head_dim per query head, layer and visible (query, key) pair; of latent attention, for each chunk, those of the
    form that needs fewer. Bytes: every weight once, of an input embedding
    only the rows looked up, of routed experts as many as are chosen on average where all are equally likely; each sequence's
    visible keys and values once, those of its new tokens written. Intermediates
    are taken to stay on the chip, so activation_bytes is 0; so is launches, which a shape does not tell.
    """
    chunks = list(chunks)
    for past, new in chunks:
        check_whole("past", past, at_least=0)
        check_whole("new", new)
    check_positive("bytes_per_weight", bytes_per_weight)
    check_positive("kv_bytes_per_element", kv_bytes_per_element)
    tokens = sum(new for _, new in chunks)
    check_whole("logits", logits, at_least=0)
    if logits > tokens:
        raise ValueError(f"logits must be at most the {tokens} tokens of the step, got {logits}")
    if tokens == 0:
        return Work()
    table = config.vocab_size * config.hidden_size
    weights: float = config.num_params - table * (1 if config.tie_embeddings else 2) + tokens * config.hidden_size
    weights += table if logits else 0
    window = config.sliding_window or math.inf
    visible = sum(new + min(past, window - 1) for past, new in chunks)
    if config.moe is not None:
        idle = config.moe.num_experts - config.moe.distinct_experts(tokens)
        weights -= len(config.sparse_layers) * idle * config.moe.expert_params(config.hidden_size)
    flops = 2 * config.layers_matmul_params * tokens + 2 * table * logits
    flops += config.num_layers * sum(attention_flops(config, past, new) for past, new in chunks)
    per_token = config.kv_bytes_per_token(kv_bytes_per_element)
    return Work(
        {dtype: flops}, weight_bytes=round(weights * bytes_per_weight), kv_read_bytes=round(visible * per_token),
        kv_write_bytes=round(tokens * per_token),
    )


def attention_flops(config: ModelConfig, past: int, new: int) -> int:
    """FLOPs of one layer's attention when `new` tokens follow `past` cached ones, beside 2 per weight and token."""
    pairs = visible_pairs(new, past + new, config.sliding_window)
    if config.mla is None:
        return 4 * config.q_size * pairs
    shape, heads = config.mla, config.num_heads
    keys = new + min(past, (config.sliding_window or math.inf) - 1)
    if shape.absorbs(heads, new, int(keys)):
        flops = shape.absorbed_flops(heads, new, pairs)
    else:
        flops = shape.naive_flops(heads, int(keys), pairs)
    return flops - 2 * new * shape.up_params(heads)  # once per new token the up-projection is among the weights


def decode_work(
    config: ModelConfig, batch: int, context: int, *, dtype: str = "bfloat16", bytes_per_weight: float = 2.0,
    kv_bytes_per_element: float = 2.0,
) -> Work:
    """One decoding step: one new token for each of `batch` sequences, which then have `context` tokens each."""
    check_whole("batch", batch)
    check_whole("context", context)
    return step_work(
        config, [(context - 1, 1)] * batch, logits=batch, dtype=dtype, bytes_per_weight=bytes_per_weight,
        kv_bytes_per_element=kv_bytes_per_element,
    )


def prefill_work(
    config: ModelConfig, tokens: int, *, past: int = 0, logits: int = 1, dtype: str = "bfloat16", bytes_per_weight: float = 2.0,
    kv_bytes_per_element: float = 2.0,
) -> Work:
    """`tokens` prompt tokens of one sequence after `past` cached ones; a chunk that does not end the prompt has logits=0."""
    return step_work(
        config, [(past, tokens)], logits=logits, dtype=dtype, bytes_per_weight=bytes_per_weight,
        kv_bytes_per_element=kv_bytes_per_element,
    )


def attention_intensity(config: ModelConfig, new: int, context: int, bytes_per_element: float = 2.0) -> float:
    """FLOP per byte of attention when the last `new` of `context` tokens are computed, whatever the batch.

    The bytes are one pass over queries, keys, values and outputs. Decoding (new=1) tends to query heads per KV head in 16
    bits, that is 1 for MHA; a whole prompt (new=context) of MHA to context / 4. Latent attention is taken absorbed, without the
    up-projection, and tends to nearly 2 * heads. Full attention; a window is ignored.
    """
    check_whole("new", new)
    check_whole("context", context, at_least=new)
    check_positive("bytes_per_element", bytes_per_element)
    pairs, shape, heads = visible_pairs(new, context), config.mla, config.num_heads
    flops, ends = 4 * config.q_size * pairs, 2 * config.q_size  # ends: elements of a query and its result
    if shape is not None:
        ends = heads * (shape.cache_width + shape.kv_rank)
        flops = 2 * ends * pairs
    return flops / ((config.kv_width * context + ends * new) * bytes_per_element)


def capacity(
    config: ModelConfig, hardware: Hardware, *, weight_bytes: float, context: int, kv_bytes_per_element: float = 2.0,
    usable: float = 0.9,
) -> int:
    """How many requests of `context` tokens fit beside `weight_bytes` in the `usable` share of the memory; 0 if none.

    A request holds the KV of all its tokens, also of those that a sliding window no longer reads.
    """
    check_whole("context", context)
    check_positive("weight_bytes", weight_bytes)
    check_positive("kv_bytes_per_element", kv_bytes_per_element)
    check_share("usable", usable)
    free = usable * hardware.memory - weight_bytes
    return max(0, math.floor(free / (context * config.kv_bytes_per_token(kv_bytes_per_element))))
