"""Counting what a causal mask admits, and the work that follows from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.attention.torch_backend import TorchAttention
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.config import ModelConfig
from minillm.perf.work import visible_pairs


def pairs_one_by_one(q_len: int, kv_len: int, window: int | None) -> int:
    return sum(k <= p and (window is None or k > p - window) for p in range(kv_len - q_len, kv_len) for k in range(kv_len))


@given(st.integers(1, 30).flatmap(lambda kv: st.tuples(st.integers(0, kv), st.just(kv))), st.none() | st.integers(1, 35))
def test_visible_pairs_are_those_of_a_mask_counted_one_by_one(lengths: tuple[int, int], window: int | None) -> None:
    assert visible_pairs(*lengths, window) == pairs_one_by_one(*lengths, window)


@pytest.mark.parametrize(
    "q_len, kv_len, window, pairs", [(5, 5, None, 15), (1, 5, None, 5), (2, 5, None, 9), (9, 9, 4, 30), (1, 9, 1, 1)]
)
def test_visible_pairs_of_small_cases(q_len: int, kv_len: int, window: int | None, pairs: int) -> None:
    assert visible_pairs(q_len, kv_len, window) == pairs


@pytest.mark.parametrize("window", [None, 3])
def test_attention_work_is_four_flops_per_pair_and_query_element_and_each_visible_key_once(window: int | None) -> None:
    config = ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=4, max_position=64
    )
    rows = [Row([0] * q, kv - q, range(1, 9)) for q, kv in ((1, 9), (4, 6), (7, 7))]
    batch, backend = ForwardBatch.build(rows, 4), TorchAttention(window)
    work = backend.work(batch, backend.plan(batch, torch.float32), config, torch.float32)
    pairs = sum(pairs_one_by_one(q, kv, window) for q, kv in ((1, 9), (4, 6), (7, 7)))
    keys = sum(min(kv, q + window - 1) if window else kv for q, kv in ((1, 9), (4, 6), (7, 7)))
    assert work.flops == {"float32": 4 * pairs * config.q_size}
    assert work.kv_read_bytes == keys * 2 * config.kv_size * 4
