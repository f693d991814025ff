"""The prefix study: what it measures, on a tiny model; and what its bars make of the numbers."""

from __future__ import annotations

from minillm.bench.studies import prefix

from ..strategies import tiny_llm


def test_every_bar_is_fed_and_a_full_cache_stays_full():
    state = prefix.make_state(tiny_llm(num_blocks=15, max_num_seqs=1), shared=16, own=4, cached_blocks=80)
    for turn in range(3):
        found = prefix.measure(state, turn)
        assert all(bar.value(found) > 0 for bar in prefix.BARS)
    assert found["lookups"] == found["churned"] == 20
    for cache in (*state.full.values(), *state.busy.values()):
        assert sum(cache.holds(block) for block in range(1, 81)) == 80
    assert all(cache.match(p) for cache in state.full.values() for p in state.prompts)
    assert state.plain.meter.prefix_tokens == 0
    # three hits of all four shared blocks a round; a warming one hits too unless misses have pushed the beginning out
    assert state.cached.meter.prefix_tokens >= 3 * 3 * 16


def test_the_bars_compare_the_right_way_round():
    found = {"cold_s": 2.0, "hit_s": 0.4, "miss_s": 2.02, "lookups": 100, "churned": 10, "radix_s": 0.005, "hash_s": 0.01}
    found |= {"radix_churn_s": 0.1, "hash_churn_s": 0.2}
    assert [round(bar.value(found), 6) for bar in prefix.BARS] == [5, 1.01, 20_000, 10_000, 100, 50]
    assert [(bar.at_least, bar.at_most) for bar in prefix.BARS[:2]] == [(4.0, None), (None, 1.02)]
