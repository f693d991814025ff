"""An engine with a prefix cache, each of ours and one of somebody's own: output equals cold, nothing is lost. B: block size."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minillm import LLM, EngineConfig, SamplingParams
from minillm.engine.engine import Engine

from ..strategies import (
    MAX_LEN,
    models,
    poison_freed_blocks,
    policies,
    reference,
    run_to_end,
    slots_needed,
    tiny_engine,
    tiny_model,
    watched,
)
from .dict_prefix import DictPrefixCache

B = 4
KINDS = ("dictionary", "hash", "radix")


def prefix_of_kind(kind, block_size=B):
    return DictPrefixCache(block_size) if kind == "dictionary" else kind


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def cached_engine(kind, block_size=B, **options) -> Engine:
    engine = tiny_engine(prefix_cache=prefix_of_kind(kind, block_size), block_size=block_size, **options)
    poison_freed_blocks(engine)
    return engine


def count_evictions(engine) -> list[int]:
    """The blocks that the cache gives up from now on."""
    evicted, evict = [], engine.cache.prefix.evict

    def counting(n, evictable):
        gone = evict(n, evictable)
        evicted.extend(gone)
        return gone

    engine.cache.prefix.evict = counting
    return evicted


def ask(engine, prompt, max_tokens=5):
    name = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return run_to_end(engine)[name]


def cold(prompt, max_tokens=5):
    return tuple(reference().greedy(prompt, max_tokens))


@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_a_prompt_sent_twice_equals_cold_and_recomputes_at_least_one_token(kind, length):
    engine, prompt = cached_engine(kind), list(range(2, 2 + length))
    assert ask(engine, prompt).num_cached_tokens == 0
    with watched(engine.model) as batches:
        second = ask(engine, prompt)
    assert second.token_ids == cold(prompt)
    assert second.num_cached_tokens == (length - 1) // B * B <= length - 1
    assert batches[0].num_tokens == length - second.num_cached_tokens >= 1
    assert engine.meter.prefix_tokens == second.num_cached_tokens


def test_an_answer_is_a_prefix_for_the_next_turn(kind):
    engine, prompt = cached_engine(kind), [5, 6, 7]
    first = ask(engine, prompt, max_tokens=7)
    longer = [*prompt, *first.token_ids, 9]
    second = ask(engine, longer)
    # ten tokens stand in front of the 9; the last of them was sampled and never computed
    assert second.num_cached_tokens == 2 * B and second.token_ids == cold(longer)


def test_prompts_that_diverge_inside_a_block_share_only_the_blocks_before_it(kind):
    engine = cached_engine(kind)
    ask(engine, [2, 3, 4, 5, 6, 7, 8, 9])
    other = [2, 3, 4, 5, 6, 7, 30, 9, 10]
    out = ask(engine, other)
    assert out.num_cached_tokens == B and out.token_ids == cold(other)


def test_a_preempted_request_finds_its_own_old_blocks_and_computes_only_the_rest(kind):
    """Three tokens are out when it is pushed out; the count of what is scheduled then starts behind the hit."""
    engine = cached_engine(kind, num_blocks=5, max_num_seqs=2)
    old = engine.add_request(list(range(2, 10)), SamplingParams(max_tokens=8, ignore_eos=True))
    young = engine.add_request(list(range(12, 19)), SamplingParams(max_tokens=8, ignore_eos=True))
    victim = list(engine.scheduler.waiting)[1]
    done = run_to_end(engine)
    assert victim.num_preemptions >= 1 and victim.num_cached_tokens > 0
    assert done[old].token_ids == cold(list(range(2, 10)), 8) and done[young].token_ids == cold(list(range(12, 19)), 8)
    engine.cache.pool.check()


@pytest.mark.parametrize("block_size", [1, 4])
def test_eviction_gives_blocks_back_once_each_and_what_was_evicted_is_computed_again(kind, block_size):
    engine = cached_engine(kind, block_size, num_blocks=-(-16 // block_size))
    evicted = count_evictions(engine)
    prompts = [[first, *range(10, 19)] for first in (2, 3, 4, 2)]
    for prompt in prompts:
        assert ask(engine, prompt, max_tokens=6).token_ids == cold(prompt, 6)
        engine.cache.pool.check()
    assert evicted and all(1 <= b <= engine.cache.pool.num_blocks for b in evicted), "blocks, not tokens"
    pool = engine.cache.pool
    assert pool.num_cached == sum(engine.cache.prefix.holds(b) for b in range(1, pool.num_blocks + 1))


@pytest.mark.parametrize("when", ["waiting", "mid-chunk", "decoding"])
def test_an_abort_restores_the_pool_and_leaves_no_unfinished_kv_in_the_cache(kind, when):
    engine = cached_engine(kind, max_num_batched_tokens=6, max_num_seqs=1)
    prompt = list(range(2, 15))
    name = engine.add_request(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    computed = {"waiting": 0, "mid-chunk": 6, "decoding": 14}[when]
    for _ in range({"waiting": 0, "mid-chunk": 1, "decoding": 4}[when]):
        engine.step()
    engine.abort(name)
    pool = engine.cache.pool
    kept = computed // B
    assert pool.num_referenced == 0 and pool.num_cached == kept and pool.num_free + pool.num_cached == pool.num_blocks
    again = ask(engine, prompt)
    assert again.token_ids == cold(prompt) and again.num_cached_tokens == min(computed // B, 12 // B) * B


def test_an_interrupted_step_leaves_no_unfinished_kv_in_the_cache(kind):
    from ..strategies import WatchedAttention

    backend = WatchedAttention()
    engine = cached_engine(kind, attention_backend=backend)
    prompt = list(range(2, 12))
    name = engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    backend.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort(name)
    assert engine.cache.pool.num_cached == 0 and engine.cache.pool.num_free == engine.cache.pool.num_blocks
    assert ask(engine, prompt).token_ids == cold(prompt)


def test_running_requests_share_cached_blocks_and_the_last_one_returns_them(kind):
    engine = cached_engine(kind)
    ask(engine, list(range(2, 11)))
    pool, shared = engine.cache.pool, engine.cache.prefix.match(list(range(2, 10)))
    names = [engine.add_request([*range(2, 10), t], SamplingParams(max_tokens=m, ignore_eos=True)) for t, m in ((11, 2), (12, 5))]
    engine.step()
    assert [pool.ref_count(b) for b in shared] == [2, 2]
    engine.step()
    assert [pool.ref_count(b) for b in shared] == [1, 1], "the shorter one has ended"
    done = run_to_end(engine)
    assert names[1] in done and pool.num_referenced == 0 and pool.num_cached >= 2


@pytest.mark.parametrize("kv_cache", ["none", "contiguous"])
def test_a_prefix_cache_without_blocks_to_share_is_refused(kind, kv_cache):
    with pytest.raises(ValueError, match=f"kv_cache='{kv_cache}'"):
        tiny_engine(kv_cache=kv_cache, prefix_cache=prefix_of_kind(kind))


def test_an_unknown_prefix_cache_is_refused_with_the_names_that_are_known():
    with pytest.raises(ValueError, match="prefix_cache must be one of 'none', 'hash', 'radix', got 'lru'"):
        tiny_engine(prefix_cache="lru")


def test_the_seam_takes_a_learners_own_object_by_keyword():
    mine = DictPrefixCache(B)
    llm = LLM(tiny_model(), prefix_cache=mine, block_size=B, num_blocks=20)
    prompt = list(range(2, 12))
    first, second = (llm.generate(prompt, SamplingParams(max_tokens=3))[0] for _ in range(2))
    assert first.token_ids == second.token_ids and second.num_cached_tokens == 8 and llm.meter.prefix_tokens == 8


few = st.lists(st.integers(2, 3), min_size=1, max_size=18)  # two different tokens: many equal beginnings
turns = st.lists(st.lists(st.tuples(few, st.integers(1, 8)), min_size=1, max_size=4), min_size=2, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(models, turns, st.integers(1, 5), st.integers(0, 4), st.integers(1, 40), st.integers(1, 5), policies)
def test_output_equals_cold_under_any_history_of_requests(kind, model, turns, block_size, slack, budget, seqs, policy):
    needed = max(slots_needed(p, SamplingParams(max_tokens=n)) for turn in turns for p, n in turn)
    options = EngineConfig(
        prefix_cache=prefix_of_kind(kind, block_size), block_size=block_size, num_blocks=-(-needed // block_size) + slack,
        max_num_batched_tokens=budget, max_num_seqs=seqs, attention_window=model[1], attention_sinks=model[2], **policy,
    )  # fmt: skip
    engine = Engine(tiny_model(model[0]), None, options)
    poison_freed_blocks(engine)
    evicted = count_evictions(engine)
    for turn in turns:
        names = [engine.add_request(p, SamplingParams(max_tokens=n, ignore_eos=True)) for p, n in turn]
        done = run_to_end(engine)
        for name, (prompt, n) in zip(names, turn, strict=True):
            assert done[name].token_ids == tuple(reference(*model).greedy(prompt, min(n, MAX_LEN - len(prompt))))
            assert done[name].num_cached_tokens % block_size == 0
        pool = engine.cache.pool
        pool.check()
        held = [b for b in range(1, pool.num_blocks + 1) if engine.cache.prefix.holds(b)]
        assert pool.num_referenced == 0 and list(pool.cached_blocks) == held
    event("something was evicted" if evicted else "nothing was evicted")
    event("something was found" if engine.meter.prefix_tokens else "nothing was found")


# --- while requests run -------------------------------------------------------------------------------------------------------


def test_a_prompt_is_found_as_soon_as_it_is_computed_while_its_request_still_runs(kind):
    engine, prompt = cached_engine(kind), list(range(2, 2 + 3 * B))
    first = engine.add_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True))
    engine.step()
    second = engine.add_request([*prompt, 20], SamplingParams(max_tokens=6, ignore_eos=True))
    engine.step()
    table = engine.cache_snapshot().tables
    assert table[first][:3] == table[second][:3] and engine.meter.prefix_tokens == 3 * B
    done = run_to_end(engine)
    assert done[first].token_ids == cold(prompt, 6) and done[second].token_ids == cold([*prompt, 20], 6)


def test_a_prompt_in_the_middle_of_its_chunks_is_not_found(kind):
    engine, prompt = cached_engine(kind, max_num_batched_tokens=2 * B), list(range(2, 2 + 3 * B))
    engine.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    assert engine.cache.prefix.match(prompt) == []
    engine.step()
    assert len(engine.cache.prefix.match(prompt)) == 3


def test_equal_prompts_that_were_computed_side_by_side_share_their_blocks_afterwards(kind):
    engine, prompt = cached_engine(kind), list(range(2, 2 + 2 * B + 1))
    names = [engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True)) for _ in range(3)]
    engine.step()
    tables = engine.cache_snapshot().tables
    assert len({tables[n][:2] for n in names}) == 1 and len({tables[n][2] for n in names}) == 3
    assert engine.cache.pool.num_referenced == 2 + 3
    done = run_to_end(engine)
    assert all(done[n].token_ids == cold(prompt, 4) for n in names)


def test_generated_tokens_are_not_offered_before_their_request_ends(kind):
    engine, prompt = cached_engine(kind), list(range(2, 2 + B))
    name = engine.add_request(prompt, SamplingParams(max_tokens=2 * B, ignore_eos=True))
    for _ in range(B + 2):
        engine.step()
    kept = [b for b in range(1, 65) if engine.cache.prefix.holds(b)]
    assert len(kept) == 1, "the prompt's block; the answer's may still be cut by a stop string"
    run_to_end(engine)
    assert not engine.knows(name) and sum(engine.cache.prefix.holds(b) for b in range(1, 65)) == 2


def test_asking_how_much_is_cached_agrees_with_the_hit(kind):
    engine = cached_engine(kind)
    ask(engine, list(range(2, 2 + 2 * B)))
    for prompt in (list(range(2, 2 + 2 * B)), list(range(2, 3 + 2 * B)), [2, 3, 4], [9] * 9, [*range(2, 2 + B), 30, 31]):
        engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        (waiting,) = engine.scheduler.waiting
        promised = engine.cache.cached_tokens(waiting)
        assert run_to_end(engine)[waiting.request_id].num_cached_tokens == promised


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_what_is_evictable_and_what_is_protected_is_all_that_the_tree_holds(kind):
    """At every step, with prompts that part inside a block: protected is what requests hold of the tree, the rest is cached."""
    engine = cached_engine(kind, num_blocks=14, max_num_seqs=3)
    beginning = [2, 3, 4, 5, 6, 7, 8, 9]
    for tail in ([10, 11, 12, 13, 14], [10, 11, 30], [10, 11, 30, 13, 14], [31] * 9, [10, 11, 12, 13, 15]):
        engine.add_request(beginning + tail, SamplingParams(max_tokens=5, ignore_eos=True))
    while engine.has_work:
        engine.step()
        shot, pool = engine.cache_snapshot(), engine.cache.pool
        assert shot.evictable_tokens == B * pool.num_cached, "as many as the pool has unreferenced"
        assert shot.protected_tokens == B * len(set(shot.kept) & set(shot.referenced))
        assert shot.evictable_tokens + shot.protected_tokens == B * len(shot.kept) == B * len(set(shot.kept))
        assert all(len({shot.ref_counts[b] > 0 for b in node.blocks}) <= 1 for node in shot.tree.walk())
    assert engine.meter.prefix_tokens > 0


@pytest.mark.parametrize("kind", ["hash", "radix"])
@pytest.mark.parametrize("when", ["waiting", "mid-chunk", "decoding"])
def test_an_abort_leaves_what_others_share_alone(kind, when):
    engine = cached_engine(kind, max_num_batched_tokens=6)
    beginning = list(range(2, 2 + 2 * B))
    ask(engine, beginning)
    stays = engine.add_request([*beginning, 20], SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    goes = engine.add_request([*beginning, *[21] * 9], SamplingParams(max_tokens=8, ignore_eos=True))
    for _ in range({"waiting": 0, "mid-chunk": 1, "decoding": 4}[when]):
        engine.step()
    engine.abort(goes)
    assert run_to_end(engine)[stays].token_ids == cold([*beginning, 20], 8)
    engine.cache.pool.check()
    assert engine.cache.pool.num_referenced == 0
    assert ask(engine, [*beginning, *[21] * 9]).token_ids == cold([*beginning, *[21] * 9])


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_an_abort_while_a_step_is_in_flight_leaves_no_unfinished_kv_in_the_cache(kind, steps):
    engine = cached_engine(kind, overlap=True, max_num_batched_tokens=6)
    prompt = list(range(2, 2 + 3 * B))
    name = engine.add_request(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    engine.abort(name)
    for _ in range(3):  # what was in flight lands
        engine.step()
    pool = engine.cache.pool
    pool.check()
    assert pool.num_referenced == 0 and pool.num_free + pool.num_cached == pool.num_blocks
    again = ask(engine, prompt)
    assert again.token_ids == cold(prompt) and again.num_cached_tokens % B == 0


def test_a_cache_that_fails_when_it_is_offered_a_prompt_ends_that_request_alone():
    class Failing(DictPrefixCache):
        def insert(self, token_ids, blocks):
            if 30 in token_ids:
                raise ZeroDivisionError("mine")
            super().insert(token_ids, blocks)

    engine = tiny_engine(prefix_cache=Failing(B))
    bad = engine.add_request([30] * B, SamplingParams(max_tokens=3, ignore_eos=True))
    good = engine.add_request([5] * B, SamplingParams(max_tokens=3, ignore_eos=True))
    done = {}
    for _ in range(10):
        try:
            done.update({o.request_id: o for o in engine.step() if o.finished})
        except ZeroDivisionError:
            pass
    assert done[good].token_ids == cold([5] * B, 3) and bad not in done and not engine.has_work
    engine.cache.pool.check()
    assert engine.cache.pool.num_referenced == 0


@pytest.mark.parametrize("length", range(B, 2 * B + 1))
def test_a_cache_that_fails_while_the_next_step_is_in_flight_is_offered_no_token_that_nobody_knows(length):
    """The failure costs a sampled token its place, and the step in flight computes that token all the same."""
    offers = []

    class Failing(DictPrefixCache):
        def insert(self, token_ids, blocks):
            offers.append((len(token_ids), len(blocks)))
            if len(offers) == 1:
                raise ZeroDivisionError("mine")
            super().insert(token_ids, blocks)

    engine = tiny_engine(prefix_cache=Failing(B), overlap=True)
    engine.add_request([5] * length, SamplingParams(max_tokens=B, ignore_eos=True))
    while engine.has_work:
        with contextlib.suppress(ZeroDivisionError):
            engine.step()
    assert offers and all(tokens == blocks * B for tokens, blocks in offers), offers
    engine.cache.pool.check()
    assert engine.cache.pool.num_referenced == 0


@pytest.mark.parametrize("call", range(12))
@pytest.mark.parametrize("overlap", [False, True])
def test_a_cache_that_cannot_say_what_it_holds_is_not_believed_any_more(call, overlap):
    """Blocks that it remembers go to others: a match would give their requests' KV away."""

    class Failing(DictPrefixCache):
        calls = 0

        def holds(self, block):
            self.calls += 1
            if self.calls == call + 1:
                raise ZeroDivisionError("mine")
            return super().holds(block)

    engine = tiny_engine(prefix_cache=Failing(B), overlap=overlap, num_blocks=8)
    prompts, done, faults = [[5] * 2 * B, [6] * 2 * B, [7] * (B + 2)], [], 0
    for prompt in [*prompts, *prompts]:
        first = engine.add_request(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
        engine.add_request(prompt, SamplingParams(max_tokens=3, ignore_eos=True), sibling=first)
        while engine.has_work:
            try:
                done += [o for o in engine.step() if o.finished]
            except ZeroDivisionError:
                faults += 1
    assert faults == 1 and len(done) >= 10, "one request may be lost, or two that end in that step"
    assert all(o.token_ids == cold(o.prompt_token_ids, 3) for o in done)
    engine.cache.pool.check()
    assert engine.cache.pool.num_referenced == 0
