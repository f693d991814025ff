"""How large the pool becomes, and that the engine says why."""

from __future__ import annotations

import pytest
import torch

from minillm import EngineConfig
from minillm.cache import sizing
from minillm.cache.sizing import pool_size

CPU = torch.device("cpu")


def size(bytes_per_token=100, max_model_len=64, **options):
    return pool_size(EngineConfig(**options), bytes_per_token, max_model_len, CPU)


def test_num_blocks_is_taken_as_it_is():
    chosen = size(num_blocks=7, block_size=5)
    assert (chosen.block_size, chosen.num_blocks) == (5, 7) and "num_blocks=7" in chosen.reason


def test_kv_memory_is_never_exceeded_and_never_more_than_can_be_used():
    chosen = size(kv_memory=3999, block_size=4)
    assert chosen.num_blocks == 9 and chosen.num_blocks * 4 * 100 <= 3999
    assert size(kv_memory=10**12, block_size=4, max_num_seqs=2).num_blocks == 2 * 16


def test_memory_for_less_than_one_block_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"kv_memory=399 is 0 blocks .* one block of 4 tokens, 400 bytes"):
        size(kv_memory=399, block_size=4)


def test_the_default_is_room_for_all_requests_where_memory_allows(monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda device: 10**9)
    chosen = size(max_num_seqs=3, block_size=10)
    assert chosen.num_blocks == 3 * 7 and "3 requests of 64 tokens" in chosen.reason


def test_the_default_takes_a_stated_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda device: 40_000)
    chosen = size(max_num_seqs=3, block_size=10)
    assert chosen.num_blocks == int(40_000 * sizing.DEFAULT_SHARE) // 1000 and "25%" in chosen.reason
    monkeypatch.setattr(sizing, "available_memory", lambda device: 10)
    assert size().num_blocks == 1, "a machine without memory still gets a block"


@pytest.mark.parametrize("strips", [{"kv_cache": "contiguous"}, {"allocation": "reserve"}])
def test_a_pool_without_room_for_one_reserved_strip_is_refused(strips, monkeypatch):
    assert size(**strips, num_blocks=16, block_size=4).num_blocks == 16
    with pytest.raises(ValueError, match=r"num_blocks=15 is 15 blocks of 4 tokens .* strip of 64 tokens, 6400 bytes"):
        size(**strips, num_blocks=15, block_size=4)
    with pytest.raises(ValueError, match=r"kv_memory=6000 is 3 blocks of 16 tokens .* 6400 bytes"):
        size(**strips, kv_memory=6000)
    monkeypatch.setattr(sizing, "available_memory", lambda device: 10)
    assert size(**strips, block_size=10).num_blocks == 7, "a machine without memory still gets a strip"
    assert size(kv_cache="contiguous", allocation="exact", num_blocks=1).num_blocks == 1, "an exact strip may be short"


def test_num_blocks_and_kv_memory_together_are_refused():
    with pytest.raises(ValueError, match=r"num_blocks \(3\) or kv_memory \(5\), not both"):
        EngineConfig(num_blocks=3, kv_memory=5)


def test_this_machines_free_memory_is_a_positive_number():
    assert sizing.available_memory(CPU) > 0
