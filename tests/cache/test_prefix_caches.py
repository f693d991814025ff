"""Both prefix caches against the plainest one: a dictionary of whole prefixes; and what they promise beyond it."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minillm.cache.prefix import HashPrefixCache, NoPrefixCache
from minillm.cache.radix import RadixPrefixCache

B = 4
KINDS = {
    "hash": HashPrefixCache,
    "radix": RadixPrefixCache,
    "colliding": lambda size: HashPrefixCache(size, hasher=lambda before, tokens: (hash((before, tokens)) % 3, before is None)),
}
EXACT = [pytest.param(KINDS[name], id=name) for name in ("hash", "radix")]
ALL = [pytest.param(make, id=name) for name, make in KINDS.items()]


def kept_in(cache) -> list[int]:
    return sorted(b for node in cache.tree(lambda b: False).walk() for b in node.blocks)


def yes(block):
    return True


def outside(in_use):
    return lambda block: block not in in_use


def filled(make, *prompts, size=B):
    """A cache with one fresh block for every block of these prompts, numbered 1, 2, …; what is known already takes no number."""
    cache, fresh = make(size), iter(range(1, 1000))
    for prompt in prompts:
        known = cache.match(prompt)
        whole = len(prompt) // size
        cache.insert(prompt[: whole * size], [*known, *(next(fresh) for _ in range(whole - len(known)))])
    return cache


# --- against a dictionary of whole prefixes -----------------------------------------------------------------------------------


class Model:
    """Every kept prefix, spelled out. What cannot be reached from the beginning is not there."""

    def __init__(self, size):
        self.size, self.known = size, {}

    def longest(self, tokens):
        blocks = []
        for end in range(self.size, len(tokens) + 1, self.size):
            if tuple(tokens[:end]) not in self.known:
                break
            blocks.append(self.known[tuple(tokens[:end])])
        return blocks

    def forget(self, gone):
        self.known = {p: b for p, b in self.known.items() if b not in gone}
        reachable = {p for p in self.known if all(p[:end] in self.known for end in range(self.size, len(p), self.size))}
        self.known = {p: b for p, b in self.known.items() if p in reachable}


tokens = st.lists(st.integers(0, 1), max_size=14)
action = st.one_of(
    st.tuples(st.just("insert"), tokens),
    st.tuples(st.just("match"), tokens),
    st.tuples(st.just("evict"), st.tuples(st.integers(0, 5), st.sets(st.integers(1, 20)))),
)


@pytest.mark.parametrize("make", EXACT)
@settings(max_examples=150)
@given(size=st.integers(1, 4), actions=st.lists(action, min_size=4, max_size=30))
def test_any_history_equals_a_dictionary_of_prefixes(make, size, actions):
    cache, model, fresh = make(size), Model(size), iter(range(1, 10_000))
    for name, argument in actions:
        if name == "insert":
            known = model.longest(argument)
            assert cache.match(argument) == known
            whole = len(argument) // size
            blocks = [*known, *(next(fresh) for _ in range(whole - len(known)))]
            cache.insert(argument[: whole * size], blocks)
            for i, block in enumerate(blocks):
                model.known[tuple(argument[: (i + 1) * size])] = block
        elif name == "match":
            assert cache.peek(argument) == len(model.longest(argument))
            assert cache.match(argument) == model.longest(argument)
        else:
            n, in_use = argument
            held = [b for b in range(1, 200) if cache.holds(b)]
            possible = [b for b in held if b not in in_use]
            gone = cache.evict(n, outside(in_use))
            assert len(gone) >= min(n, len(possible)) and len(set(gone)) == len(gone) and set(gone) <= set(possible)
            if not in_use:
                assert len(gone) == min(n, len(held)), "nothing is given up needlessly"
            model.forget(gone)
            event("something before a block in use was evicted" if any(cache.holds(b) != (b in held) for b in in_use) else "-")
        assert kept_in(cache) == sorted(model.known.values())
        assert all(cache.holds(b) for b in model.known.values())
        assert cache.match(argument if name != "evict" else []) == (model.longest(argument) if name != "evict" else [])


@settings(max_examples=100)
@given(st.integers(1, 4), st.lists(action, min_size=4, max_size=30))
def test_keys_that_collide_never_serve_the_wrong_prefix(size, actions):
    cache, truth, fresh = KINDS["colliding"](size), {}, iter(range(1, 10_000))
    for name, argument in actions:
        if name == "evict":
            gone = cache.evict(argument[0], outside(argument[1]))
            assert not any(cache.holds(b) for b in gone)
            truth = {b: p for b, p in truth.items() if b not in gone}
            continue
        found = cache.match(argument)
        assert [truth[b] for b in found] == [tuple(argument[: (i + 1) * size]) for i in range(len(found))]
        if name == "insert":
            whole = len(argument) // size
            blocks = [*found, *(next(fresh) for _ in range(whole - len(found)))]
            truth.update({b: tuple(argument[: (i + 1) * size]) for i, b in enumerate(blocks)})
            cache.insert(argument[: whole * size], blocks)


# --- small and exact ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("length, found", [(0, 0), (1, 0), (B - 1, 0), (B, 1), (B + 1, 1), (2 * B - 1, 1), (2 * B, 2), (11, 2)])
def test_only_whole_blocks_are_found(make, length, found):
    cache = filled(make, list(range(2 * B)))
    assert cache.match(range(length)) == [1, 2][:found] and cache.peek(range(length)) == found


@pytest.mark.parametrize("make", EXACT)
def test_a_block_behind_another_beginning_is_not_found(make):
    cache = filled(make, [1, 1, 1, 1, 5, 6, 7, 8])
    assert cache.match([2, 2, 2, 2, 5, 6, 7, 8]) == [] and cache.match([5, 6, 7, 8]) == []


@pytest.mark.parametrize("make", EXACT)
def test_two_prompts_that_part_inside_a_block_share_what_stands_before_it(make):
    cache = filled(make, [*range(8), 8, 9, 10, 11], [*range(8), 8, 9, 30, 31])
    assert cache.match([*range(8), 8, 9, 30, 31]) == [1, 2, 4] and kept_in(cache) == [1, 2, 3, 4]


@pytest.mark.parametrize("make", ALL)
def test_a_second_copy_is_not_kept(make):
    cache = filled(make, list(range(8)))
    cache.insert(list(range(8)), [8, 9])
    assert cache.match(range(8)) == [1, 2] and not cache.holds(8) and not cache.holds(9)


@pytest.mark.parametrize("make", EXACT)
def test_a_block_that_is_kept_as_one_prefix_cannot_be_offered_as_another(make):
    cache = filled(make, list(range(8)))
    cache.insert(list(range(20, 28)), [2, 9])
    assert cache.match(range(20, 28)) == [] and cache.match(range(8)) == [1, 2] and not cache.holds(9)
    cache.insert(list(range(40, 48)), [7, 7])
    assert len(cache.match(range(40, 48))) <= 1


@pytest.mark.parametrize("make", ALL)
def test_blocks_that_are_not_full_are_refused(make):
    with pytest.raises(ValueError, match="2 blocks of 4 tokens were offered with 7 tokens"):
        make(B).insert(list(range(7)), [1, 2])
    make(B).insert([], [])


def test_without_a_cache_nothing_is_found():
    assert NoPrefixCache().match([1] * 9) == [] and NoPrefixCache().peek([1] * 9) == 0


# --- the order of eviction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", EXACT)
def test_the_end_of_a_prefix_goes_before_its_beginning(make):
    cache = filled(make, list(range(3 * B)))
    assert [cache.evict(1, yes) for _ in range(4)] == [[3], [2], [1], []]


@pytest.mark.parametrize("make", EXACT)
def test_the_least_recently_used_prefix_goes_first_and_a_match_is_a_use(make):
    a, b, c = ([t] * B for t in (1, 2, 3))
    cache = filled(make, a, b, c)
    cache.match(a)
    assert [cache.evict(1, yes) for _ in range(3)] == [[2], [3], [1]]


@pytest.mark.parametrize("make", EXACT)
def test_peeking_is_not_a_use(make):
    cache = filled(make, [1] * B, [2] * B)
    before = cache.tree(lambda b: False)
    assert cache.peek([1] * B) == 1 and cache.tree(lambda b: False) == before and cache.evict(1, yes) == [1]


@pytest.mark.parametrize("make", EXACT)
def test_what_two_prompts_share_is_as_recent_as_the_later_of_them(make):
    cache = filled(make, [0] * B + [1] * B, [9] * B, [0] * B + [2] * B)
    assert cache.evict(3, yes) == [2, 3, 4] and cache.match([0] * B) == [1]


@pytest.mark.parametrize("make", EXACT)
def test_only_the_end_of_a_leaf_is_given_up_when_that_is_enough(make):
    cache = filled(make, list(range(5 * B)))
    assert cache.evict(2, yes) == [5, 4] and cache.match(range(5 * B)) == [1, 2, 3]


@pytest.mark.parametrize("make", EXACT)
def test_blocks_in_use_are_passed_over_and_go_once_they_are_free(make):
    cache = filled(make, [1] * B, [2] * B, [3] * B)
    assert cache.evict(1, lambda b: b != 1) == [2]
    assert cache.evict(5, lambda b: b != 1) == [3]
    assert cache.evict(5, lambda b: b != 1) == [] and cache.holds(1)
    assert cache.evict(1, yes) == [1] and kept_in(cache) == []


@pytest.mark.parametrize("make", EXACT)
def test_a_beginning_can_go_from_under_a_block_in_use_and_come_back(make):
    cache = filled(make, list(range(3 * B)))
    assert 1 in cache.evict(2, lambda b: b == 1 or b == 2) and cache.match(range(3 * B)) == []
    cache.insert(list(range(3 * B)), [7, 8, 3])
    assert cache.match(range(3 * B)) == [7, 8, 3] and cache.holds(3)
    assert sorted(cache.evict(9, yes)) == [3, 7, 8]


@pytest.mark.parametrize("make", EXACT)
def test_eviction_does_not_look_through_the_whole_cache(make):
    """500 of 900 prefixes are in use and older than the rest: they are looked at once, not at each eviction."""
    cache = filled(make, *([t] * B for t in range(900)))
    looked_at = []
    for _ in range(100):
        cache.evict(1, lambda b: (looked_at.append(b), b > 500)[1])
    assert len(looked_at) <= 500 + 2 * 100


@pytest.mark.parametrize("make", EXACT)
def test_many_uses_leave_no_trace_but_the_order(make):
    cache = filled(make, [1] * B, [2] * B)
    for _ in range(1000):
        cache.match([1] * B)
    assert len(getattr(cache, "_leaves", [])) <= 2 and len(getattr(cache, "_order", [])) <= 2
    assert cache.evict(2, yes) == [2, 1]
