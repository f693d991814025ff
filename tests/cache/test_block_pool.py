"""Every block is in exactly one place, and nothing changes when a request for blocks is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minillm.cache.block_pool import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The model: a Counter of references, a set of cached blocks, and the free blocks in the order in which they became free."""

    @initialize(num_blocks=st.integers(1, 9))
    def build(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.all = set(range(1, num_blocks + 1))
        self.refs: Counter[int] = Counter()
        self.cached: set[int] = set()
        self.free = list(range(1, num_blocks + 1))

    @rule(n=st.integers(0, 10))
    def allocate(self, n):
        blocks = self.pool.allocate(n)
        if n > len(self.free):
            assert blocks is None
            return
        assert blocks == self.free[:n], "the blocks that have been free longest"
        del self.free[:n]
        self.refs.update(blocks)

    @precondition(lambda self: +self.refs or self.cached)
    @rule(data=st.data())
    def acquire(self, data):
        known = sorted({*+self.refs, *self.cached})
        blocks = data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1))
        self.pool.acquire(blocks)
        self.refs.update(blocks)
        self.cached -= set(blocks)

    @precondition(lambda self: +self.refs)
    @rule(data=st.data())
    def release(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(+self.refs)), unique=True, min_size=1))
        keep = data.draw(st.sets(st.sampled_from(sorted(self.all))))
        freed = self.pool.release(blocks, keep)
        self.refs.subtract(blocks)
        gone = [b for b in reversed(blocks) if self.refs[b] == 0]
        assert freed == [b for b in gone if b not in keep], "tail first"
        self.cached |= {b for b in gone if b in keep}
        self.free += freed

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def uncache(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True, min_size=1))
        self.pool.uncache(blocks)
        self.cached -= set(blocks)
        self.free += blocks

    @rule(data=st.data())
    def misuse_is_refused(self, data):
        idle = sorted(self.all - set(+self.refs))
        if not idle:
            return
        block = data.draw(st.sampled_from(idle))
        with pytest.raises(RuntimeError, match=f"block {block} was released more often"):
            self.pool.release([block])
        if block in self.free:
            with pytest.raises(RuntimeError, match=f"block {block} is neither"):
                self.pool.acquire([block])
            with pytest.raises(RuntimeError, match="a prefix cache evicted"):
                self.pool.uncache([block])

    @invariant()
    def every_block_is_in_one_place(self):
        self.pool.check()
        assert self.pool.num_free + self.pool.num_referenced + self.pool.num_cached == self.pool.num_blocks
        assert (self.pool.num_free, self.pool.num_cached) == (len(self.free), len(self.cached))
        assert all(self.pool.ref_count(b) == self.refs[b] for b in self.all)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_null_block_is_never_handed_out():
    blocks = BlockPool(5).allocate(5)
    assert blocks is not None and NULL_BLOCK not in blocks and len(set(blocks)) == 5


@pytest.mark.parametrize("num_blocks", [0, -3])
def test_a_pool_without_blocks_is_refused(num_blocks):
    with pytest.raises(ValueError, match=f"at least 1 block, got {num_blocks}"):
        BlockPool(num_blocks)


def test_a_lost_block_is_noticed():
    pool = BlockPool(3)
    pool._free.popleft()
    with pytest.raises(RuntimeError, match="2 free . 0 referenced . 0 cached != 3"):
        pool.check()
    pool = BlockPool(3)
    pool._free.append(2)
    with pytest.raises(RuntimeError):
        pool.check()


def test_a_free_block_cannot_be_shared_and_a_referenced_one_not_evicted():
    pool = BlockPool(4)
    (held,) = pool.allocate(1)
    for stray in (2, 0, -1, 5, "x"):
        with pytest.raises(RuntimeError, match="neither referenced nor cached"):
            pool.acquire([held, stray])
    assert pool.ref_count(held) == 1
    (kept,) = pool.allocate(1)
    pool.release([kept], keep=[kept])
    for wrong in ([held], [kept, kept], [kept, 4], [9]):
        with pytest.raises(RuntimeError, match="a prefix cache evicted"):
            pool.uncache(wrong)
    pool.check()
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (2, 1, 1)
