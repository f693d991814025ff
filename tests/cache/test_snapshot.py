"""The cache at one moment: every block is somewhere, and what is drawn is what the engine holds."""

from __future__ import annotations

from collections import Counter

import pytest

from minillm import SamplingParams
from minillm.cache.snapshot import TreeNode, nested

from ..strategies import run_to_end, tiny_engine
from .dict_prefix import DictPrefixCache


def one_token(max_tokens=1):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_a_fresh_engine_has_only_free_blocks():
    shot = tiny_engine(num_blocks=5).cache_snapshot()
    assert shot.free == (1, 2, 3, 4, 5) and shot.cached == shot.referenced == shot.kept == () and shot.tables == {}
    assert shot.block_size == 4 and shot.num_blocks == 5


def test_tables_and_counts_of_running_requests():
    engine = tiny_engine(num_blocks=9)
    for length in (3, 6):
        engine.add_request(list(range(2, 2 + length)), one_token(4), f"of-{length}")
    engine.step()
    shot = engine.cache_snapshot()
    assert shot.computed == {"of-3": 3, "of-6": 6} and [len(t) for t in shot.tables.values()] == [1, 2]
    held = Counter(b for table in shot.tables.values() for b in table)
    assert all(shot.ref_counts[b] == n for b, n in held.items()) and set(shot.referenced) == set(held)
    assert sorted([*shot.free, *shot.referenced, *shot.cached]) == list(range(1, 10))


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_the_tree_shows_what_is_kept_and_what_a_request_locks(kind):
    engine = tiny_engine(num_blocks=20, prefix_cache=kind)
    for tail in (20, 21):
        engine.add_request([*range(2, 10), tail, 11, 12, 13], one_token())
    run_to_end(engine)
    idle = engine.cache_snapshot()
    assert idle.evictable_tokens == 16 and idle.protected_tokens == 0 and sorted(idle.kept) == list(idle.cached)
    engine.add_request([*range(2, 10), 20, 11, 12, 13, 14], one_token(4))
    engine.step()
    busy = engine.cache_snapshot()
    assert busy.protected_tokens == 12 and busy.evictable_tokens == 4 and len(busy.cached) == 1
    tokens = {n.tokens[:1]: n for n in busy.tree.walk()}
    assert not tokens[(21,)].locked and tokens[(20,)].locked and busy.tree.blocks == ()
    assert tokens[(20,)].last_use > tokens[(21,)].last_use


def test_a_cache_that_cannot_be_drawn_has_no_tree():
    shot = tiny_engine(prefix_cache=DictPrefixCache(4)).cache_snapshot()
    assert shot.tree is None and shot.kept == () and shot.evictable_tokens == 0
    assert tiny_engine().cache_snapshot().tree is None


def test_a_snapshot_stays_as_it_is():
    engine = tiny_engine(num_blocks=9, prefix_cache="hash")
    engine.add_request(list(range(2, 12)), one_token(4))
    engine.step()
    shot, before = engine.cache_snapshot(), repr(engine.cache_snapshot())
    run_to_end(engine)
    assert repr(shot) == before


def test_nesting_has_no_depth_limit():
    chain = {i: [i + 1] for i in range(5000)}
    (root,) = nested([0], lambda i: chain.get(i, []), lambda i, below: TreeNode((i,), (i,), children=below))
    assert [n.tokens[0] for n in root.walk()] == list(range(5001))
