"""Parallel samples share their prompt's blocks; whoever writes to a shared block gets a copy."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.cache.block_pool import BlockPool
from minillm.cache.kv_store import PlainKVStore, copy_slots
from minillm.cache.manager import CacheManager
from minillm.cache.prefix import NoPrefixCache
from minillm.engine.request import Request, Status

from ..strategies import assert_empty, greedy, poison_freed_blocks, run_to_end, tiny_config, tiny_engine, tiny_llm, tiny_model

PROMPT = [5, 9, 3, 7, 2, 8, 4, 6, 11, 12]  # two full blocks of 4 and a half
HOT = dict(temperature=1.3, max_tokens=7, ignore_eos=True)


def ask(engine, prompt, n, count=1, sibling=None):
    names = []
    for _ in range(count):
        names.append(engine.add_request(prompt, SamplingParams(max_tokens=n, ignore_eos=True), sibling=sibling))
        sibling = names[0] if sibling is None else sibling
    return names


def tables(engine):
    return [list(r.blocks) for r in engine.scheduler.running]


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 5}, {"kv_cache": "none"}, {"kv_cache": "contiguous"}, {"batching": "static"},
                {"overlap": True}, {"max_num_seqs": 2}, {"prefix_cache": "radix"}, {"attention_window": 48},
                {"max_num_batched_tokens": 3}],
    ids=str,
)  # fmt: skip
def test_n_samples_are_n_independent_requests_with_the_seeds_that_follow(options):
    alone = [tiny_llm().generate([PROMPT], SamplingParams(seed=40 + i, **HOT))[0].token_ids for i in range(4)]
    llm = tiny_llm(**options)
    poison_freed_blocks(llm.engine)
    together = llm.generate([PROMPT], SamplingParams(n=4, seed=40, **HOT))
    assert [out.token_ids for out in together] == alone and len(set(alone)) > 1
    assert llm.engine.cache.pool.num_referenced == 0 and not llm.engine.has_work


def test_siblings_take_the_full_blocks_over_and_a_copy_of_the_partial_one():
    engine = tiny_engine()
    ask(engine, PROMPT, 5, count=3)
    engine.step()
    assert tables(engine) == [[1, 2, 3]], "the others wait for the prompt"
    engine.step()
    assert tables(engine) == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    pool = engine.cache.pool
    assert [pool.ref_count(b) for b in range(1, 6)] == [3, 3, 1, 1, 1] and pool.num_shared == 4
    done = run_to_end(engine)
    assert {out.token_ids for out in done.values()} == {greedy(PROMPT, 5)}


def test_memory_and_work_are_those_of_one_prompt():
    engine = tiny_engine()
    ask(engine, PROMPT, 2, count=4)
    run_to_end(engine)
    needles = engine.meter
    assert needles.tokens_computed == len(PROMPT) + 1 + 3 * 2 and needles.prefix_tokens == 3 * (len(PROMPT) - 1)
    token = engine.store.bytes_per_token
    # the second step: two shared blocks and one of their own each, the first sample one token ahead of the three others
    assert needles.kv_allocated_peak == (2 + 4) * 4 * token and needles.kv_live_peak == (8 + 3 + 3 * 2) * token


def test_samples_of_one_token_do_not_wait_for_each_other():
    engine = tiny_engine()
    ask(engine, PROMPT, 1, count=4)
    run_to_end(engine)
    assert engine.meter.steps == 1


def test_a_copy_is_counted_as_reading_and_writing_its_block():
    def work(count):
        engine = tiny_engine()
        ask(engine, PROMPT, 2, count=count)
        run_to_end(engine)
        return engine.meter.snapshot(), engine.store.bytes_per_token

    (one, token), (two, _) = work(1), work(2)
    # one block copied, two tokens computed that read 10 and 11
    assert two.kv_write_bytes - one.kv_write_bytes == (4 + 2) * token
    assert two.kv_read_bytes - one.kv_read_bytes == (4 + 10 + 11) * token


@pytest.mark.parametrize("when", ["waiting", "in the middle of its prompt", "decoding"])
def test_a_first_sample_that_is_aborted_strands_nobody(when):
    engine = tiny_engine(max_num_batched_tokens=4)
    poison_freed_blocks(engine)
    first, *others = ask(engine, PROMPT, 6, count=3)
    for _ in range({"waiting": 0, "in the middle of its prompt": 2, "decoding": 4}[when]):
        engine.step()
    engine.abort(first)
    done = run_to_end(engine)
    assert {name: done[name].token_ids for name in others} == dict.fromkeys(others, greedy(PROMPT, 6))
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def test_others_go_on_while_samples_wait_for_their_prompt():
    engine = tiny_engine(max_num_batched_tokens=12)
    ask(engine, PROMPT, 3, count=2)
    (other,) = ask(engine, [4], 3)
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ["request-0", other], "the second sample is passed over"


def test_a_pool_with_room_for_one_sample_serves_them_one_after_the_other():
    engine = tiny_engine(num_blocks=4)
    poison_freed_blocks(engine)
    names = ask(engine, PROMPT, 6, count=4)
    done = run_to_end(engine)
    assert {done[n].token_ids for n in names} == {greedy(PROMPT, 6)}


def test_a_sibling_must_be_live_and_have_the_same_prompt():
    engine = tiny_engine()
    (name,) = ask(engine, PROMPT, 2)
    with pytest.raises(ValueError, match="'nobody' is no request that has not ended"):
        ask(engine, PROMPT, 2, sibling="nobody")
    with pytest.raises(ValueError, match="has another prompt, of 10 tokens; this one has 3"):
        ask(engine, [1, 2, 3], 2, sibling=name)
    run_to_end(engine)
    with pytest.raises(ValueError, match="has not ended"):
        ask(engine, PROMPT, 2, sibling=name)


def test_an_interrupted_step_makes_its_copies_again():
    engine = tiny_engine()
    poison_freed_blocks(engine)
    names = ask(engine, PROMPT, 5, count=2)
    engine.step()
    run, calls = engine.runner.backend.forward, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*args)

    engine.runner.backend.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.cache.copies.planned == [(3, 4)] and engine.cache.pool.ref_count(3) == 2, "the source waits for its copy"
    engine.abort(names[0])
    assert run_to_end(engine)[names[1]].token_ids == greedy(PROMPT, 5)
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def test_a_store_without_a_copy_of_its_own_is_read_and_written():
    class Mine:
        """Somebody's store: the protocol and nothing more."""

        def __init__(self, config, num_slots, dtype, device):
            store = self._store = PlainKVStore.allocate(config, num_slots, dtype, device)
            self.write, self.read = store.write, store.read
            self.num_slots, self.bytes_per_token = store.num_slots, store.bytes_per_token

    llm = LLM(tiny_model(), block_size=4, num_blocks=20, kv_store=Mine)
    outs = llm.generate([PROMPT], SamplingParams(n=3, max_tokens=5, ignore_eos=True))
    assert {out.token_ids for out in outs} == {greedy(PROMPT, 5)} and llm.meter.prefix_tokens == 18
    assert_empty(llm)


@pytest.mark.parametrize("own", [True, False], ids=["its own copy", "read and written"])
def test_copies_read_everything_before_they_write(own):
    store = PlainKVStore.allocate(tiny_config(), 6, torch.float64)
    for layer, kv in enumerate(store.layers):
        kv[:] = torch.arange(6, dtype=torch.float64)[:, None, None, None] + 10 * layer
    if not own:
        store.copy = None  # type: ignore[assignment, method-assign]
    copy_slots(store, 2, torch.tensor([1, 2]), torch.tensor([2, 5]))
    assert [kv[:, 0, 0, 0].tolist() for kv in store.layers] == [[0, 1, 1, 3, 4, 2], [10, 11, 11, 13, 14, 12]]


# --- the table alone ---


def pair(num_blocks=8):
    """A running request of 6 tokens in blocks of 4, and a sibling that shares them all but has computed nothing itself."""
    m = CacheManager(BlockPool(num_blocks), NoPrefixCache(), 4)
    family: list[Request] = []
    for name in ("first", "second"):
        r = Request(name, 6, [1, 2, 3, 4, 5, 6], SamplingParams(), 0, frozenset(), 8, family=family)
        family.append(r)
    first, second = family
    m.allocate(first, 6)
    first.num_computed_tokens, first.status = 6, Status.RUNNING
    return m, first, second


def test_a_fork_needs_a_prompt_that_is_computed():
    m, first, second = pair()
    assert m.fork(second) == ([1, 2], 5)
    first.num_tokens_in_flight = 3
    assert m.fork(second) == ([], 0) and m.awaits_prompt(second)
    first.status = Status.WAITING
    assert m.fork(second) == ([], 0) and not m.awaits_prompt(second), "preempted: nobody computes it"


def test_a_copy_that_the_pool_cannot_give_changes_nothing():
    m, first, second = pair(num_blocks=2)
    blocks, hit = m.fork(second)
    assert m.allocate(second, 6, blocks, hit) is None
    assert second.blocks == [] and m.copies.planned == [] and [m.pool.ref_count(b) for b in (1, 2)] == [1, 1]
    m.pool.check()


@pytest.mark.parametrize("launched", [False, True])
def test_a_block_that_is_only_copied_is_written_to_in_place(launched):
    m, first, second = pair()
    blocks, hit = m.fork(second)
    m.allocate(second, 6, blocks, hit)
    copies = m.copies.planned
    if launched:
        m.copies.launched()
    assert m.allocate(first, 8) == [] and first.blocks == [1, 2] and m.copies.planned == ([] if launched else copies)


@pytest.mark.parametrize("launched", [False, True])
def test_a_copy_that_is_still_to_run_shares_no_tokens(launched):
    m, first, second = pair()
    blocks, hit = m.fork(second)
    m.allocate(second, 6, blocks, hit)
    copies = m.copies.planned
    if launched:
        m.copies.launched()
    assert m.tokens_without_slots([first, second]) == 4, "the full block, which both have"
    m.free(first)
    assert m.tokens_without_slots([second]) == 0 and m.pool.ref_count(2) == 1
    if launched:
        m.copies.failed(copies)
    m.copies.launched()
    m.copies.done(copies)
    m.free(second)
    assert m.pool.num_free == m.pool.num_blocks and m.tokens_without_slots([]) == 0


def test_a_target_that_is_freed_before_its_copy_ran_is_not_copied_to():
    m, first, second = pair()
    blocks, hit = m.fork(second)
    assert m.allocate(second, 6, blocks, hit) == [3] and m.copies.planned == [(2, 3)] and m.pool.ref_count(2) == 2
    m.free(second)
    assert m.copies.planned == [] and m.pool.ref_count(2) == 1
    m.pool.check()


def test_a_copy_of_a_copy_that_has_not_run_is_taken_from_where_the_content_is():
    m, first, second = pair()
    blocks, hit = m.fork(second)
    m.allocate(second, 6, blocks, hit)
    m.pool.acquire([3])  # somebody else shares the copy before it was made
    second.num_computed_tokens = 5
    m.allocate(second, 6)
    assert second.blocks == [1, 4] and m.copies.planned == [(2, 3), (2, 4)]
    m.copies.launched()
    m.copies.done([(2, 3), (2, 4)])
    assert m.pool.ref_count(2) == 1 and m.copies.planned == []


def test_a_copy_of_a_copy_whose_step_has_failed_is_taken_from_where_the_content_is():
    m, first, second = pair()
    blocks, hit = m.fork(second)
    m.allocate(second, 6, blocks, hit)
    m.copies.launched()
    m.pool.acquire([3])  # somebody else shares the copy while it is in flight
    second.num_computed_tokens = 5
    m.allocate(second, 6)
    assert second.blocks == [1, 4] and m.copies.planned == [(3, 4)] and m.pool.ref_count(3) == 2
    m.copies.failed([(2, 3)])
    assert sorted(m.copies.planned) == [(2, 3), (2, 4)] and m.pool.ref_count(3) == 1 and m.pool.ref_count(2) == 3
    m.copies.launched()
    m.copies.done([(2, 3), (2, 4)])
    for request in (first, second):
        m.free(request)
    m.release([3])
    assert m.pool.num_free == m.pool.num_blocks
    m.pool.check()
