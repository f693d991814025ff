"""4.2 stretch: say what tensor parallelism makes of a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minillm import LLM
from minillm.course.expect import Mismatch, expect_equal, expect_raises
from minillm.course.labs.gqa_mla import per_rank
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_4_2.common import TINY
from minillm.model.config import ModelConfig
from minillm.model.presets import preset
from minillm.model.transformer import Transformer


def _ranked(f: Any, config: ModelConfig, ranks: int, expected: float, what: str) -> None:
    expect_equal(float(f(config, ranks)), float(expected), what=f"{what} on {ranks} ranks: bytes per token on each")


def _grouped(kv_heads: int, heads: int = 32) -> ModelConfig:
    return replace(TINY, mla=None, head_dim=8, num_heads=heads, num_kv_heads=kv_heads)


def _stretch_shape(f: Any) -> None:
    got = f(_grouped(4), 2)
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        raise Mismatch(f"it gives a number of bytes, got {got!r:.60}")


def _stretch_by_hand(f: Any) -> None:
    _ranked(f, preset("qwen3-32b"), 1, 2**18, "Qwen3-32B")
    _ranked(f, preset("qwen3-32b"), 8, 2**15, "Qwen3-32B")
    _ranked(f, preset("deepseek-v3"), 1, 70_272, "DeepSeek-V3")
    _ranked(f, preset("deepseek-v3"), 8, 70_272, "DeepSeek-V3, whose latent belongs to all heads,")


def _stretch_random(f: Any) -> None:
    for kv_heads in (1, 2, 4, 8, 32):
        for ranks in (1, 2, 4, 8, 16, 32):
            config = _grouped(kv_heads)
            _ranked(f, config, ranks, per_rank(config, [ranks])[ranks], f"{kv_heads} KV heads of 32")


def _stretch_edges(f: Any) -> None:
    _ranked(f, _grouped(1), 32, _grouped(1).kv_bytes_per_token(), "one KV head")
    expect_raises(ValueError, lambda: f(_grouped(4), 3), what="4 KV heads on 3 ranks")
    expect_raises(ValueError, lambda: f(_grouped(4), 6), what="4 KV heads on 6 ranks")
    expect_raises(ValueError, lambda: f(_grouped(4), 0), what="no rank")
    expect_raises(ValueError, lambda: f(_grouped(4), 64), what="32 heads on 64 ranks")
    expect_raises(ValueError, lambda: f(_grouped(4, heads=12), 6), what="12 heads, of which 4 KV heads, on 6 ranks")
    expect_raises(ValueError, lambda: f(_grouped(6, heads=12), 4), what="12 heads, of which 6 KV heads, on 4 ranks")
    expect_raises(ValueError, lambda: f(TINY, 2), what="3 heads over latents on 2 ranks")
    expect_raises(ValueError, lambda: f(TINY, 0), what="latents on no rank")


def _stretch_engine(f: Any) -> None:
    for config in (TINY, _grouped(4)):
        store = LLM(Transformer.random(config), dtype="bfloat16", num_blocks=8).engine.store
        _ranked(f, config, 1, store.bytes_per_token, "what the engine's store keeps")


STRETCH = Task(
    "4.2 stretch",
    "What tensor parallelism makes of a cache",
    (
        NamedCheck("shape", _stretch_shape, hint=2),
        NamedCheck("exact: two published models", _stretch_by_hand, hint=1),
        NamedCheck("random: KV heads and ranks", _stretch_random, hint=2),
        NamedCheck("edges: one head, and what cannot be split", _stretch_edges, hint=3),
        NamedCheck("engine: one rank keeps what the engine keeps", _stretch_engine, hint=2),
    ),
    (
        "Heads are split over ranks. A KV head goes where its query heads go; with more ranks than KV heads each rank still\n"
        "needs one, so heads are copied. A latent is read by every head.",
        "16 bits: 2 · layers · heads on the rank · 2 · head_dim bytes; for latents 2 · layers · cache_width, on every rank.",
        "ValueError unless ranks >= 1, num_heads % ranks == 0, and kv_heads % ranks == 0 or ranks % kv_heads == 0. Then\n"
        "kept = max(1, kv_heads // ranks).",
    ),
    references=(per_rank, ModelConfig.kv_bytes_per_token),
)
