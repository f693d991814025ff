"""Any trace of add, step, hand back, interrupt and abort: no block is lost or wrongly shared, every output comes once, right."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import wait
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minillm import EngineConfig, SamplingParams
from minillm.attention.indexer import BoundsIndexer
from minillm.attention.window import SparseView
from minillm.cache.tiers import HostTier
from minillm.engine.engine import Engine

from ..cache.dict_prefix import DictPrefixCache
from ..reference import ending
from ..strategies import (
    EOS,
    LATENT,
    VOCAB,
    FakeTokenizer,
    WatchedSparse,
    all_models,
    engine_options,
    for_experts,
    kv_dtypes,
    poison_freed_blocks,
    reference,
    slots_needed,
    sparse_reference,
    sparse_views,
    tiny_model,
    watched_attention,
    with_drafts,
)

TOKENIZER = FakeTokenizer(EOS)
MAX_MODEL_LEN = 30
# few different tokens make equal beginnings likely, which a prefix cache needs
some_prompts = st.one_of(
    st.lists(st.integers(2, 3), min_size=1, max_size=14), st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=14)
)
some_params = st.builds(
    SamplingParams, max_tokens=st.integers(1, 10), ignore_eos=st.booleans(),
    stop=st.lists(st.sampled_from(["ab", "a", "b", "€", "xab"]), max_size=2),
)  # fmt: skip

# host memory of one to a few blocks, so that blocks push each other out; half of the offered blocks are loaded, or all
tier_options = st.one_of(
    st.just({}),
    st.fixed_dictionaries({
        "host_cache": st.builds(HostTier, st.sampled_from([5_000, 20_000, 10**6])),
        "cache_write": st.sampled_from(["back", "through"]),
        "tier_policy": st.sampled_from(["always", lambda offer: len(offer.tiers) // 2]),
    }),
)  # fmt: skip


class Sent:
    """What the machine knows of a request: what was asked, and what came back so far."""

    def __init__(self, prompt, params, oracle):
        self.prompt, self.params = prompt, params
        self.stream = oracle.greedy(prompt, min(params.max_tokens, MAX_MODEL_LEN - len(prompt)))
        self.end = self.after(len(self.stream))
        self.received, self.text = 0, ""

    def after(self, n):
        """The request cut after n tokens, by the reference."""
        if n == 0:
            return replace(ending([2], SamplingParams(max_tokens=1)), token_ids=(), text="")
        return ending(self.stream[:n], replace(self.params, max_tokens=n), EOS, TOKENIZER.decode)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        model=all_models, options=with_drafts(engine_options(needed=18, max_model_len=MAX_MODEL_LEN)), own=st.booleans(),
        tiers=tier_options, kv_dtype=kv_dtypes, sparse=st.none() | st.none() | st.tuples(sparse_views, st.integers(1, 2)),
    )  # fmt: skip
    def build(self, model, options, own, tiers, kv_dtype, sparse):
        options = for_experts(options, model[0])
        if model[0] in LATENT:  # latents are neither quantised nor chosen among
            kv_dtype, sparse = "auto", None
        self.model, self.view, size = (*model, kv_dtype), model[1:], options["block_size"]
        if own and options["prefix_cache"] == "hash":  # somebody's own object at the seam
            options["prefix_cache"] = DictPrefixCache(size)
        self.cached = options["prefix_cache"] != "none"
        if sparse:
            (blocks, window), share = sparse
            self.model, self.view, options["cuda_graphs"] = (model[0], None, 0), (None, 0), False
            config = tiny_model(model[0]).config
            self.backend = WatchedSparse(config, SparseView(blocks, window, size), BoundsIndexer(), share)
            self.reference = sparse_reference(model[0], blocks, window, size, share, "bounds", kv_dtype)
        else:
            self.backend, self.reference = watched_attention(*model), reference(*self.model)
        if self.cached:
            options |= tiers
        config = EngineConfig(**options, kv_dtype=kv_dtype, attention_backend=self.backend, max_model_len=MAX_MODEL_LEN)
        self.engine = Engine(tiny_model(*self.model[:2]), TOKENIZER, config)
        poison_freed_blocks(self.engine)
        self.sent: dict[str, Sent] = {}

    def state(self):
        s, pool = self.engine.scheduler, self.engine.cache.pool
        return list(s.waiting), list(s.running), pool.num_free, pool.num_cached, self.engine.has_work

    # --- what a caller can do ---

    @precondition(lambda self: len(self.sent) < 8)
    @rule(work=st.lists(st.tuples(some_prompts, some_params), min_size=1, max_size=4))
    def add(self, work):
        for prompt, params in work:
            mine = list(prompt)
            needed = slots_needed(prompt, params, MAX_MODEL_LEN)
            budget = self.engine.options.max_num_batched_tokens
            if self.engine.cache.most_slots(needed, budget) > self.engine.cache.capacity:
                self.refuse(prompt, params, None, "KV slots")
                continue
            if self.engine.options.kv_cache == "none" and needed > budget:
                self.refuse(prompt, params, None, str(needed))
                continue
            name = self.engine.add_request(mine, params)
            assert name not in self.sent and mine == prompt
            self.sent[name] = Sent(prompt, params, self.reference)

    @precondition(lambda self: self.engine._live and len(self.sent) < 8)
    @rule(data=st.data(), samples=st.integers(1, 4))
    def add_samples(self, data, samples):
        """More samples of a prompt that was sent and has not ended, whatever has become of it."""
        name = data.draw(st.sampled_from(sorted(self.engine._live)))
        known = self.sent[name]
        for _ in range(samples):
            another = self.engine.add_request(known.prompt, known.params, sibling=name)
            self.sent[another] = Sent(known.prompt, known.params, self.reference)

    @rule(
        case=st.sampled_from(
            [
                ([], {}, None, "no tokens"),
                ("", {}, None, "empty"),
                ([VOCAB], {}, None, f"{VOCAB}"),
                ([2, -1], {}, None, "-1"),
                ([True], {}, None, "True"),
                ([2.0], {}, None, "2.0"),
                ([2] * MAX_MODEL_LEN, {}, None, f"{MAX_MODEL_LEN}"),
                ([2], {"n": 2, "max_tokens": 1}, None, "n=2"),
                ([2], {"stop_token_ids": [VOCAB]}, None, f"{VOCAB}"),
                ([2], {"max_tokens": 1}, "", "request_id"),
            ]
        )
    )
    def add_invalid(self, case):
        prompt, params, name, message = case
        self.refuse(prompt, SamplingParams(**params), name, message)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def add_an_id_in_use(self, data):
        name = data.draw(st.sampled_from(sorted(self.sent)))
        self.refuse([2, 3], SamplingParams(max_tokens=1), name, name)

    def refuse(self, prompt, params, name, message):
        before = self.state()
        with pytest.raises(ValueError, match=message):
            self.engine.add_request(prompt, params, name)
        assert self.state() == before

    @rule(times=st.integers(1, 5))
    def steps(self, times):
        for _ in range(times):
            self.step()

    def step(self):
        self.backend.batches.clear()
        busy = self.engine.scheduler.has_work
        for out in self.engine.step():
            self.receive(out)
        # with overlap, a step may have nothing to do but to wait for the last tokens of all
        least = 0 if self.engine.options.overlap else busy
        assert least <= len(self.backend.batches) <= busy, "one pass of the model in a step with work, none without"
        for batch in self.backend.batches:
            assert batch.num_tokens <= self.engine.options.max_num_batched_tokens
            slots = batch.slots.tolist()[: batch.num_tokens - batch.num_padding]
            assert len(set(slots)) == len(slots) and all(s >= batch.block_size for s in slots), "own slots, not the null block's"

    @rule()
    def step_and_hand_back(self):
        self.engine.hold(self.engine.step())

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule()
    def step_that_is_interrupted(self):
        wait([flight.future for flight in self.engine._flights])  # so that it always is the next step that is hit
        self.backend.error = KeyboardInterrupt()
        try:  # with overlap, that is seen a step later
            while self.engine.scheduler.has_work:
                self.step()
        except KeyboardInterrupt:
            pass
        assert self.backend.error is None or self.engine.options.overlap
        self.backend.error = None

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data):
        self.abort_one(data.draw(st.sampled_from(sorted(self.sent))))

    @precondition(lambda self: self.sent and self.in_the_middle_of_their_prompts())
    @rule(data=st.data())
    def abort_mid_chunk(self, data):
        self.abort_one(data.draw(st.sampled_from(self.in_the_middle_of_their_prompts())))

    def in_the_middle_of_their_prompts(self):
        return [r.request_id for r in self.engine.scheduler.running if r.blocks and not r.num_output_tokens]

    def abort_one(self, name):
        out = self.engine.abort(name)
        sent = self.sent.pop(name)
        assert out.request_id == name and sent.text + out.delta == out.text
        if out.finish_reason == "abort":
            n = len(sent.stream) if out.token_ids == sent.end.token_ids else len(out.token_ids)
            assert (out.token_ids, out.text) in [(e.token_ids, e.text) for e in map(sent.after, range(sent.received, n + 1))]
        else:  # it had ended, and its last output was on its way
            self.check_end(sent, out)

    @rule(name=st.sampled_from(["nobody", "request-0"]))
    def abort_unknown(self, name):
        if name not in self.sent:
            before = self.state()
            assert self.engine.abort(name) is None and self.state() == before

    # --- what must come back ---

    def receive(self, out):
        sent = self.sent[out.request_id]
        assert list(out.prompt_token_ids) == sent.prompt and out.num_cached_tokens < MAX_MODEL_LEN
        before, sent.received = sent.received, len(out.token_ids)
        several = self.engine.options.speculative is not None
        assert out.finished or sent.received == before + 1 or (several and sent.received > before), "each output brings tokens"
        sent.text += out.delta
        assert sent.text == out.text
        if out.finished:
            self.check_end(sent, out)
            del self.sent[out.request_id]
        else:
            assert list(out.token_ids) == sent.stream[: sent.received] and sent.end.text.startswith(out.text)

    def check_end(self, sent, out):
        assert (out.token_ids, out.text, out.finish_reason) == (sent.end.token_ids, sent.end.text, sent.end.finish_reason)

    @invariant()
    def blocks_are_conserved(self):
        pool, scheduler = self.engine.cache.pool, self.engine.scheduler
        pool.check()
        assert pool.num_free + pool.num_referenced + pool.num_cached == pool.num_blocks
        flying = {r: None for flight in self.engine._flights for r in (s.request for s in flight.plan.scheduled)}
        gone = [r for r in flying if r not in scheduler.running]
        tables = Counter(b for r in [*scheduler.running, *gone] for b in r.blocks if b)
        tables.update(b for flight in self.engine._flights for b in flight.spare)
        owed = [self.engine.cache.copies.planned, *(flight.plan.copies for flight in self.engine._flights)]
        tables.update(source for copies in owed for source, _ in copies)  # held until the copy has run
        assert all(pool.ref_count(b) == n for b, n in tables.items()) and pool.num_referenced == len(tables)
        assert pool.num_shared == sum(n - 1 for n in tables.values())
        assert not any(r.blocks for r in scheduler.waiting)
        if self.cached:
            held = [b for b in range(1, pool.num_blocks + 1) if self.engine.cache.prefix.holds(b)]
            assert [b for b in held if not pool.ref_count(b)] == list(pool.cached_blocks), "kept and held by nobody: cached"
            shot = self.engine.cache_snapshot()
            if shot.tree is not None:
                assert set(shot.kept) <= set(held) and len(set(shot.kept)) == len(shot.kept)
            if self.engine.options.prefix_cache == "radix" and self.model[1] is None:
                assert shot.evictable_tokens == pool.num_cached * self.engine.cache.block_size
        else:
            assert pool.num_cached == 0
        if self.engine.options.strips:
            assert set(tables.values()) <= {1}
            for r in scheduler.running:
                assert not r.blocks or r.blocks == list(range(r.blocks[0], r.blocks[-1] + 1)), "side by side"
        assert scheduler.num_live_tokens == sum(r.num_computed_tokens for r in scheduler.running)
        assert all(r.blocks for r in flying), "what a step in flight reads is not released"
        assert {r for r in scheduler.running if r.num_in_flight} <= set(flying)
        assert not any(r.num_in_flight or r.num_pending for r in scheduler.waiting)
        for r in scheduler.running:
            assert len(r.blocks) >= self.engine.cache.blocks_for(r.num_computed_tokens)
            held = [b for b in r.blocks if b]
            assert len(set(held)) == len(held)
            self.only_unseen_blocks_are_gone(r)

    def only_unseen_blocks_are_gone(self, r):
        """By the definition of a window: a block is gone if and only if all its keys are behind the window and no sinks."""
        (window, sinks), size = self.view, self.engine.cache.block_size
        query = r.num_landed_tokens - (r.num_landed_tokens == r.prompt_len and len(r.family) > 1)
        for i, block in enumerate(r.blocks):
            keys = range(i * size, (i + 1) * size)
            unseen = window is not None and all(sinks <= k <= query - window for k in keys)
            gone = block == 0
            if self.engine.options.speculative is not None and not gone:
                continue  # what an accepted draft left behind is taken back in the next step
            assert gone == (unseen and not self.engine.options.strips)

    @invariant()
    def requests_are_conserved(self):
        scheduler = self.engine.scheduler
        inside = {r.request_id for r in [*scheduler.waiting, *scheduler.running]}
        assert inside <= set(self.sent), "what has ended is forgotten"
        assert len(scheduler.running) <= self.engine.options.max_num_seqs
        assert len(inside) == len(scheduler.waiting) + len(scheduler.running)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.sent, "every request ends"
        pool = self.engine.cache.pool
        assert self.engine.cache.tiers is None or not self.engine.cache.tiers._pending
        assert pool.num_referenced == 0 and (self.cached or pool.num_free == pool.num_blocks)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=25)
