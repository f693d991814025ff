"""Block tables: what a request is given, what it gives back, and what a refusal leaves unchanged."""

from __future__ import annotations

import pytest

from minillm import SamplingParams
from minillm.cache.block_pool import BlockPool
from minillm.cache.manager import CacheManager
from minillm.cache.prefix import NoPrefixCache
from minillm.engine.request import Request

from .dict_prefix import DictPrefixCache


def manager(num_blocks=6, block_size=4, prefix=None) -> CacheManager:
    return CacheManager(BlockPool(num_blocks), prefix or NoPrefixCache(), block_size)


def request(tokens) -> Request:
    ids = list(tokens)
    return Request("r", len(ids), ids, SamplingParams(), 0, frozenset(), 8)


def state(m: CacheManager):
    return m.pool.num_free, m.pool.num_cached, m.pool.num_referenced


@pytest.mark.parametrize("num_tokens, blocks", [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_request_holds_whole_blocks(num_tokens, blocks):
    m, r = manager(), request(range(12))
    m.allocate(r, num_tokens)
    assert len(r.blocks) == blocks == m.blocks_for(num_tokens)


def test_growing_by_one_token_takes_a_block_only_at_a_boundary():
    m, r = manager(), request(range(12))
    assert [len(m.allocate(r, n)) for n in range(1, 10)] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert len(set(r.blocks)) == 3


def test_a_refusal_returns_none_and_changes_nothing():
    m, a, b = manager(num_blocks=3), request(range(8)), request(range(9))
    m.allocate(a, 8)
    before, table = state(m), list(a.blocks)
    assert m.allocate(b, 5) is None and b.blocks == [] and state(m) == before
    assert m.allocate(a, 13) is None and a.blocks == table and state(m) == before
    assert m.allocate(b, 4) is not None


def test_freed_blocks_can_be_had_again_and_the_table_is_empty():
    m, r = manager(num_blocks=2), request(range(8))
    m.allocate(r, 8)
    m.free(r)
    assert r.blocks == [] and state(m) == (2, 0, 0)
    assert m.allocate(request(range(8)), 8) is not None


def test_only_full_blocks_of_computed_tokens_enter_the_prefix_cache():
    m = manager(prefix=DictPrefixCache(4))
    r = request(range(12))
    m.allocate(r, 12)
    r.num_computed_tokens = 7  # three blocks are held, one is full
    m.free(r)
    assert state(m) == (5, 1, 0)
    assert m.prefix.match(range(12)) and len(m.prefix.match(range(12))) == 1


@pytest.mark.parametrize("num_tokens, hit", [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_a_match_leaves_at_least_one_token_to_compute(num_tokens, hit):
    m = manager(prefix=DictPrefixCache(4))
    r = request(range(12))
    m.allocate(r, 12)
    r.num_computed_tokens = 12
    m.free(r)
    assert len(m.match(request(range(num_tokens)))) == hit


def test_a_cache_that_answers_too_much_is_capped():
    class Eager(DictPrefixCache):
        def match(self, token_ids):
            return [1, 2, 3]

    assert manager(prefix=Eager(4)).match(request(range(8))) == [1]


def warm(num_blocks=4, tokens=range(8)) -> CacheManager:
    """A manager whose cache holds the full blocks of tokens."""
    m = manager(num_blocks, prefix=DictPrefixCache(4))
    r = request(tokens)
    m.allocate(r, len(r.token_ids))
    r.num_computed_tokens = len(r.token_ids)
    m.free(r)
    return m


def test_matched_blocks_come_first_in_the_table_and_can_be_shared():
    m, a, b = warm(), request(range(10)), request(range(11))
    matched = m.match(a)
    fresh_a, fresh_b = m.allocate(a, 10, matched), m.allocate(b, 11, m.match(b))
    assert a.blocks == matched + fresh_a and b.blocks == matched + fresh_b and fresh_a != fresh_b
    assert [m.pool.ref_count(x) for x in matched] == [2, 2]
    m.free(a)
    assert [m.pool.ref_count(x) for x in matched] == [1, 1] and m.pool.num_cached == 0
    m.free(b)
    assert state(m) == (2, 2, 0)


def test_cached_blocks_are_evicted_when_room_is_needed_but_never_the_matched_ones():
    m, r = warm(num_blocks=4), request(range(16))
    matched = m.match(r)[:1]
    m.allocate(r, 12, matched)
    assert r.blocks[0] == matched[0] and len(set(r.blocks)) == 3
    assert m.prefix.evicted == [] and state(m) == (0, 1, 3)
    m.allocate(r, 16)
    assert m.prefix.evicted and not m.prefix.holds(m.prefix.evicted[0]) and state(m) == (0, 0, 4)


def test_the_matched_blocks_are_not_evicted_even_if_they_would_be_first():
    m, other = warm(num_blocks=4), request(range(20, 24))
    m.allocate(other, 4)
    other.num_computed_tokens = 4
    m.free(other)
    r = request(range(16))
    matched = m.match(r)  # the longest prefix in the cache: the first that it would give up
    assert m.allocate(r, 16, matched) is not None
    assert r.blocks[:2] == matched and len(set(r.blocks)) == 4 and state(m) == (0, 0, 4)
    m.pool.check()


def test_a_request_that_eviction_cannot_help_evicts_nothing():
    m, a, b = warm(num_blocks=4), request(range(20, 28)), request(range(40, 56))
    m.allocate(a, 8)
    assert m.allocate(b, 12) is None and m.prefix.evicted == [] and state(m) == (0, 2, 2)


def test_a_second_copy_of_the_same_tokens_is_not_kept():
    m, a, b = manager(prefix=DictPrefixCache(4)), request(range(8)), request(range(8))
    for r in (a, b):
        m.allocate(r, 8)
        r.num_computed_tokens = 8
    m.free(a)
    m.free(b)
    assert state(m) == (4, 2, 0)
    m.pool.check()
