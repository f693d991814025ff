"""Sparse attention in the engine: dense attention under the mask of the chosen blocks, whatever the batch; and less work."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minillm import LLM, EngineConfig, ModelConfig, SamplingParams, Transformer
from minillm.attention import pairs, sparse
from minillm.attention.indexer import BoundsIndexer, best_blocks
from minillm.cache.tiers import HostTier
from minillm.engine.engine import Engine

from ..strategies import (
    EOS,
    assert_empty,
    engine_options,
    greedy,
    greedy_params,
    one_thread,  # noqa: F401
    poison_freed_blocks,
    run_to_end,
    slots_needed,
    sparse_reference,
    sparse_views,
    tiny_engine,
    tiny_model,
    workloads,
)

LONG = [(7 * i + i * i) % 29 + 2 for i in range(40)]
IGNORE = {"ignore_eos": True}


@settings(max_examples=60)
@given(
    st.data(), workloads(greedy_params()), st.sampled_from([1, 2, 3]), sparse_views, st.integers(1, 2),
    st.sampled_from(["bounds", "mean"]), st.sampled_from([0, 2, 16]), st.sampled_from([3, 32]), st.sampled_from([8, 16_384]),
)  # fmt: skip
def test_tokens_equal_dense_attention_under_the_mask_of_the_chosen_blocks(
    data, work, group, view, share, indexer, few, together, at_once
):
    """Under any options, with groups of queries cut in any way."""
    options = data.draw(engine_options(max(slots_needed(p, s) for p, s in work))) | {"cuda_graphs": False}
    blocks, window = view
    oracle = sparse_reference(group, blocks, window, options["block_size"], share, indexer)
    chosen = dict(sparse_blocks=blocks, sparse_window=window, sparse_share_layers=share, sparse_indexer=indexer)
    sizes = patch.object(sparse, "FEW", few), patch.object(pairs, "TOGETHER", together), patch.object(pairs, "PAIRS", at_once)
    with sizes[0], sizes[1], sizes[2]:
        engine = Engine(tiny_model(group), None, EngineConfig(**options, **chosen))
        poison_freed_blocks(engine)
        names = [engine.add_request(*one) for one in work]
        done = run_to_end(engine)
    for name, (prompt, params) in zip(names, work, strict=True):
        want = oracle.greedy(prompt, min(params.max_tokens, 48 - len(prompt)))
        end = next((i for i, t in enumerate(want) if t in EOS and not params.ignore_eos), len(want))
        assert done[name].token_ids == tuple(want[:end])
    event("something was chosen" if engine.meter.index_flops else "everything was seen")


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"prefix_cache": "radix"}, {"speculative": "ngram"}])
def test_as_many_blocks_as_there_are_give_the_tokens_of_dense_attention(options):
    engine = tiny_engine(sparse_blocks=10**12, sparse_window=1, **options)
    name = engine.add_request(LONG[:30], SamplingParams(max_tokens=12, **IGNORE))
    assert run_to_end(engine)[name].token_ids == greedy(LONG[:30], 12) and not engine.meter.index_flops


def test_other_blocks_give_other_logits():
    """So that equality with the reference says something: one block more, one key less, another indexer, or a shared choice."""
    exact = sparse_reference(3, 2, 3, 4).logits(LONG)[-1]
    for other in ((3, 3, 4), (2, 1, 4), (2, 3, 5), (2, 3, 4, 2), (2, 3, 4, 1, "mean")):
        assert (sparse_reference(3, *other).logits(LONG)[-1] - exact).abs().max() > 1e-4


@pytest.mark.parametrize("few", [0, 64])
def test_logits_of_a_chunk_equal_the_reference_whichever_way_its_queries_are_computed(few):
    want = torch.log_softmax(sparse_reference(3, 2, 3, 4).logits(LONG), -1)
    for chunk in (64, 9):
        with patch.object(sparse, "FEW", few):
            engine = tiny_engine(sparse_blocks=2, sparse_window=3, max_num_batched_tokens=chunk)
            engine.add_request(LONG, SamplingParams(max_tokens=1, logprobs=32, **IGNORE))
            (out,) = run_to_end(engine).values()
        got = torch.tensor([out.logprobs[0][t] for t in range(32)], dtype=torch.float64)
        torch.testing.assert_close(got, want[-1], rtol=0, atol=1e-10)


@settings(max_examples=25)
@given(sparse_views, st.integers(1, 6), st.integers(12, 24), st.sampled_from(["none", "hash"]))
def test_blocks_that_held_other_requests_have_the_summaries_of_those_that_hold_them_now(view, size, length, cache):
    """One request after the other through a pool in which each overwrites the one before."""
    blocks, window = view
    oracle = sparse_reference(3, blocks, window, size)
    engine = tiny_engine(
        sparse_blocks=blocks, sparse_window=window, block_size=size, num_blocks=-(-34 // size), prefix_cache=cache
    )
    poison_freed_blocks(engine)
    for turn in range(4):
        prompt = LONG[turn : turn + length]
        name = engine.add_request(prompt, SamplingParams(max_tokens=8, **IGNORE))
        assert run_to_end(engine)[name].token_ids == tuple(oracle.greedy(prompt, 8))


@pytest.mark.parametrize("write", ["back", "through"])
def test_a_prefix_that_comes_back_from_a_tier_brings_its_summaries(write):
    engine = tiny_engine(
        sparse_blocks=2, sparse_window=2, prefix_cache="radix", num_blocks=11, host_cache=HostTier(10**6), tier_policy="always",
        cache_write=write,
    )  # fmt: skip
    poison_freed_blocks(engine)
    oracle, loaded = sparse_reference(3, 2, 2, 4), 0
    for turn in (0, 1, 2, 0, 1, 2):
        prompt = LONG[turn : turn + 30]
        name = engine.add_request(prompt, SamplingParams(max_tokens=6, **IGNORE))
        out = run_to_end(engine)[name]
        assert out.token_ids == tuple(oracle.greedy(prompt, 6))
        loaded += engine.meter.loaded_tokens
    assert loaded > 0, "otherwise this tests nothing"


@pytest.mark.parametrize("window", [1, 6])
def test_refused_drafts_leave_no_trace_in_a_summary(window):
    """A drafter that is always wrong fills blocks with tokens that are taken back."""

    class Wrong:
        def propose(self, requests, lengths):
            from minillm.spec.draft import Draft

            return [Draft(tuple((r.token_ids[-1] + 11 * i) % 30 + 1 for i in range(1, n + 1))) for r, n in zip(requests, lengths)]

    engine = tiny_engine(sparse_blocks=1, sparse_window=window, block_size=2, speculative=Wrong(), num_draft_tokens=5)
    name = engine.add_request(LONG[:16], SamplingParams(max_tokens=20, **IGNORE))
    assert run_to_end(engine)[name].token_ids == tuple(sparse_reference(3, 1, window, 2).greedy(LONG[:16], 20))
    assert engine.meter.drafted > engine.meter.accepted


def test_samples_of_one_prompt_share_its_blocks_and_summaries():
    llm = LLM(tiny_model(), sparse_blocks=2, sparse_window=3, block_size=4, num_blocks=40)
    samples = llm.generate([LONG[:27]], SamplingParams(max_tokens=8, n=3, **IGNORE))
    want = tuple(sparse_reference(3, 2, 3, 4).greedy(LONG[:27], 8))
    assert [s.token_ids for s in samples] == [want] * 3
    assert_empty(llm)


def test_keys_in_8_bits_are_summarised_as_they_are_read():
    """In chunks or at once: the choice must not depend on how a prompt was cut."""
    outs = []
    for chunk in (64, 5):
        engine = tiny_engine(sparse_blocks=2, sparse_window=3, kv_dtype="int8", max_num_batched_tokens=chunk)
        name = engine.add_request(LONG[:30], SamplingParams(max_tokens=10, **IGNORE))
        outs.append(run_to_end(engine)[name].token_ids)
    assert outs[0] == outs[1]


def test_an_indexer_of_ones_own_chooses():
    class Earliest:
        """Wants the first blocks, and keeps nothing worth speaking of."""

        def summarise(self, keys):
            return keys[:, 0, :, :1]

        def score(self, q, summaries):
            blocks = torch.arange(summaries.shape[1], dtype=q.dtype)
            return -blocks.expand(q.shape[0], q.shape[1], q.shape[2], -1)

    class Latest(Earliest):
        def score(self, q, summaries):
            return -super().score(q, summaries)

    def answer(**options):
        engine = tiny_engine(**options)
        name = engine.add_request(LONG[:36], SamplingParams(max_tokens=6, **IGNORE))
        return run_to_end(engine)[name].token_ids

    latest = answer(sparse_blocks=2, sparse_window=1, sparse_indexer=Latest())
    assert latest == answer(sparse_blocks=1, sparse_window=5, sparse_indexer=Latest()), "the last blocks are a wider window"
    assert answer(sparse_blocks=2, sparse_window=1, sparse_indexer=Earliest()) != latest


def model_of(layers: int, length: int) -> Transformer:
    shape = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_heads=4, num_kv_heads=2, head_dim=4)
    return Transformer.random(ModelConfig(num_layers=layers, max_position=length, **shape), seed=1)


def test_decoding_reads_what_it_chose_and_the_summaries_of_the_candidates():
    """By hand: 2 layers; 10 blocks of 4 and one key; window 4, so that blocks 0 to 8 are candidates."""
    engine = Engine(model_of(2, 64), None, EngineConfig(num_blocks=16, block_size=4, sparse_blocks=3, sparse_window=4))
    engine.add_request([3] * 40, SamplingParams(max_tokens=2, **IGNORE))
    engine.step()
    before = engine.meter.snapshot()
    engine.step()
    used = engine.meter.snapshot() - before
    kv_row, summary = 2 * 2 * 4 * 4, 2 * 8 * 4  # K and V of 2 heads of 4 numbers; the bounds of 2 heads
    keys = 3 * 4 + 5  # chosen; local: from key 36 on, where the window's first key lies, to key 40
    assert used.kv_read_bytes == 2 * (keys * kv_row + 9 * summary)
    assert used.index_flops == 2 * (9 * 4 * 8 * 2)  # blocks, query heads, numbers, multiply and add
    assert 0 < used.index_bytes < used.total_bytes


@pytest.mark.parametrize("kv_dtype, number", [("auto", 4 * 4), ("int8", 4 + 4), ("fp8", 4 + 4)])
def test_a_block_that_is_filled_is_read_back_in_the_bytes_that_the_store_keeps(kv_dtype, number):
    """As above with one key less: the last of block 9 is written, and its keys are read for their summary."""
    options = EngineConfig(num_blocks=16, block_size=4, sparse_blocks=3, sparse_window=4, kv_dtype=kv_dtype)
    engine = Engine(model_of(2, 64), None, options)
    engine.add_request([3] * 39, SamplingParams(max_tokens=2, **IGNORE))
    engine.step()
    before = engine.meter.snapshot()
    engine.step()
    used = engine.meter.snapshot() - before
    kv_row, summary = 2 * 2 * number, 2 * 8 * 4
    assert used.kv_read_bytes == 2 * ((3 * 4 + 4) * kv_row + 4 * kv_row + 9 * summary)
    assert used.kv_write_bytes == 2 * (kv_row + summary)


def test_shared_choices_cost_the_indexer_of_one_layer_in_so_many():
    counts = {}
    for share in (1, 2, 3, 4):
        options = EngineConfig(num_blocks=40, block_size=4, sparse_blocks=2, sparse_window=4, sparse_share_layers=share)
        engine = Engine(model_of(4, 128), None, options)
        engine.add_request(LONG * 2, SamplingParams(max_tokens=4, **IGNORE))
        run_to_end(engine)
        counts[share] = engine.meter.index_flops, len(engine.store.tables)
    per_layer = counts[4][0]
    assert {s: (f // per_layer, t) for s, (f, t) in counts.items()} == {1: (4, 4), 2: (2, 2), 3: (2, 2), 4: (1, 1)}


def test_attention_work_stops_growing_with_the_context():
    """Prefill: FLOPs of attention per token are constant beyond the sparse length; dense ones grow."""
    flops = {}
    for blocks in (None, 4):
        for n in (256, 512):
            engine = Engine(model_of(1, 520), None, EngineConfig(num_blocks=130, block_size=4, sparse_blocks=blocks))
            engine.add_request([3 + i % 50 for i in range(n)], SamplingParams(max_tokens=1, **IGNORE))
            run_to_end(engine)
            flops[blocks, n] = engine.meter.total_flops - engine.meter.index_flops
    assert flops[4, 512] < 2.2 * flops[4, 256] and flops[None, 512] > 3 * flops[None, 256] * 0.9
    assert flops[4, 512] < flops[None, 512]


def test_the_pool_is_smaller_by_what_summaries_take():
    sizes = []
    for options in ({}, {"sparse_blocks": 2}):
        engine = Engine(model_of(2, 4096), None, EngineConfig(kv_memory=200_000, block_size=4, **options))
        assert engine.pool_size.num_blocks * 4 * engine.store.bytes_per_token <= 200_000
        sizes.append((engine.pool_size.num_blocks, engine.store.bytes_per_token))
    assert sizes[0][0] > sizes[1][0] and sizes[1][1] - sizes[0][1] == 2 * 2 * 8 * 4 // 4


class Shapeless:
    def summarise(self, keys):
        return keys.sum()

    def score(self, q, summaries):
        return q


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sparse_blocks": 0}, "sparse_blocks must be a whole number of at least 1, got 0"),
        ({"sparse_blocks": True}, "sparse_blocks must be"),
        ({"sparse_blocks": 2, "sparse_window": 0}, "sparse_window must be a whole number of at least 1, got 0"),
        ({"sparse_blocks": 2, "sparse_share_layers": 0}, "sparse_share_layers must be"),
        ({"sparse_blocks": 2, "sparse_indexer": "best"}, "one of 'bounds', 'mean', got 'best'"),
        ({"sparse_blocks": 2, "sparse_indexer": object()}, "lacks summarise, score"),
        ({"sparse_blocks": 2, "sparse_indexer": Shapeless()}, "summarise gives"),
        ({"sparse_window": 8}, "sparse_window=8 is of sparse attention; set sparse_blocks"),
        ({"sparse_share_layers": 2}, "sparse_share_layers=2 is of sparse attention"),
        ({"sparse_indexer": "mean"}, "sparse_indexer='mean' is of sparse attention"),
        ({"sparse_blocks": 2, "attention_window": 5}, "attention_window=5 hides keys from the indexer"),
        ({"sparse_blocks": 2, "attention_sinks": 1}, "attention_sinks=1 hides"),
        ({"sparse_blocks": 2, "compile": True}, "compile=True records the keys"),
        ({"sparse_blocks": 2, "cuda_graphs": True}, "cuda_graphs=True records the keys"),
        ({"sparse_blocks": 2, "attention_backend": "triton"}, "attention_backend='triton'"),
    ],
)
def test_what_cannot_be_combined_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine(**options)


def test_an_indexer_of_ones_own_without_sparse_blocks_waits():
    engine = tiny_engine(sparse_indexer=BoundsIndexer())
    name = engine.add_request(LONG[:30], SamplingParams(max_tokens=4, **IGNORE))
    assert run_to_end(engine)[name].token_ids == greedy(LONG[:30], 4)


def test_a_model_with_a_window_of_its_own_is_refused():
    with pytest.raises(ValueError, match="tiny has a sliding window of 4"):
        tiny_engine(3, 4, sparse_blocks=2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_finite_choose_candidates_and_disturb_no_other_row(bad):
    scores, candidates = torch.zeros(2, 1, 2, 6), torch.tensor([[[True] * 4 + [False] * 2]]).expand(2, -1, -1)
    scores[1, 0, :, 2:4] = 1.0
    scores[0, 0, 0] = bad
    assert best_blocks(scores, candidates, 2).tolist() == [[[0, 1]], [[2, 3]]]
    scores[0, 0, :, 3] = 0.0 if bad < 0 else bad
    assert best_blocks(scores, candidates, 3)[0].max() < 4


@pytest.mark.parametrize("indexer", ["bounds", "mean"])
@pytest.mark.parametrize("few", [0, 16])
def test_logits_beyond_float16_choose_as_in_32_bits(indexer, few):
    model = Transformer.random(tiny_model(3).config, seed=1)
    for layer in model.layers:  # a query's product with a key is some 10^5
        layer.attention.q_norm.weight.mul_(400)
        layer.attention.k_norm.weight.mul_(400)
    chosen, choose = [], sparse.best_blocks

    def noted(scores, candidates, k):
        chosen.append(scores.masked_select(candidates.unsqueeze(2)))
        return choose(scores, candidates, k)

    with patch.object(sparse, "FEW", few), patch.object(sparse, "best_blocks", noted), patch.object(pairs, "best_blocks", noted):
        llm = LLM(model, dtype="float16", num_blocks=40, block_size=2, sparse_blocks=2, sparse_window=2, sparse_indexer=indexer)
        outs = llm.generate([LONG[:20], [5] * 20], SamplingParams(max_tokens=6, **IGNORE))
    assert all(len(out.token_ids) == 6 for out in outs)
    assert all(scores.isfinite().all() for scores in chosen) and max(float(s.abs().max()) for s in chosen) > 2**15


def test_an_indexer_whose_scores_have_another_shape_is_named_with_both():
    class Flat(BoundsIndexer):
        def score(self, q, summaries):
            return super().score(q, summaries).sum(2)

    llm = LLM(tiny_model(), num_blocks=64, block_size=4, sparse_blocks=2, sparse_window=2, sparse_indexer=Flat())
    with pytest.raises(ValueError, match=r"score gives \[rows, queries, heads, blocks\], here .*; got"):
        llm.generate(LONG[:20], SamplingParams(max_tokens=4, **IGNORE))
    assert_empty(llm)


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda scores: None, "NoneType"),
        (lambda scores: scores.tolist(), "list"),
        (lambda scores: scores.numpy(), "ndarray"),
        (lambda scores: scores.to(torch.complex128), r"\(.*\) of complex numbers"),
        (lambda scores: scores[:, :, :0], r"\(\d+, 1, 0, \d+\)"),
    ],
)
def test_an_indexer_whose_scores_are_no_real_tensor_of_heads_is_refused_by_what_it_gave(spoil, said):
    class Spoilt(BoundsIndexer):
        def score(self, q, summaries):
            return spoil(super().score(q, summaries))

    llm = LLM(tiny_model(), num_blocks=64, block_size=4, sparse_blocks=2, sparse_window=2, sparse_indexer=Spoilt())
    with pytest.raises(ValueError, match=rf"score gives .*, real numbers; got {said}"):
        llm.generate(LONG[:20], SamplingParams(max_tokens=4, **IGNORE))
    assert_empty(llm)


def test_summaries_of_another_number_of_blocks_or_width_are_refused_not_spread_over_all_blocks():
    class OneForAll(BoundsIndexer):
        def summarise(self, keys):
            return super().summarise(keys).amax(0, keepdim=True)

    class Complex(BoundsIndexer):
        def summarise(self, keys):
            return super().summarise(keys).to(torch.complex128)

    for indexer, said in ((OneForAll(), r"got \(1, 2, 8\)"), (Complex(), "got .* of complex numbers")):
        with pytest.raises(ValueError, match=rf"summarise gives .*, here \(2, 2, width\), real numbers; {said}"):
            tiny_engine(sparse_blocks=2, sparse_indexer=indexer)

    class Narrowing(BoundsIndexer):
        """As wide as it said while the engine is built, and one number wide from then on."""

        width = None

        def summarise(self, keys):
            return super().summarise(keys)[..., : self.width]

    indexer = Narrowing()
    llm = LLM(tiny_model(), num_blocks=64, block_size=4, sparse_blocks=2, sparse_window=2, sparse_indexer=indexer)
    indexer.width = 1
    with pytest.raises(ValueError, match=r"summarise gives \(5, 2, 8\) here; got \(5, 2, 1\)"):
        llm.generate(LONG[:20], SamplingParams(max_tokens=4, **IGNORE))
    assert_empty(llm)
