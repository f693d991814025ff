"""cuda_graphs=True: batches padded to a few sizes, copied into buffers, replayed; here without a GPU, with everything else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm import EngineConfig, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.graphs import COPIES, MIN_KEYS, PowersOfTwo

from ..strategies import greedy, run_to_end, tiny_engine, tiny_llm, tiny_model

BLOCK = 4


def graphs_of(**options):
    return tiny_engine(cuda_graphs=True, **options).runner.graphs


def batch_of(kv_lens, seed=0):
    """Rows that decode, with keys at random blocks of a pool of 64."""
    blocks = iter(torch.randperm(64, generator=torch.Generator().manual_seed(seed)).add(1).tolist())
    return ForwardBatch.build([Row([3 + n % 20], n - 1, [next(blocks) for _ in range(-(-n // BLOCK))]) for n in kv_lens], BLOCK)


@given(st.integers(1, 300), st.integers(0, 300))
def test_a_size_is_the_next_power_of_two_and_never_beyond_the_largest_batch(rows, more):
    size = PowersOfTwo().bucket(rows, rows + more)
    powers = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert size == min(next(p for p in powers if p >= rows), rows + more)
    assert rows <= size < 2 * rows or size == rows


@pytest.mark.parametrize("rows, most, size", [(1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 8, 8), (5, 6, 6), (9, 9, 9), (9, 100, 16)])
def test_sizes_by_hand(rows, most, size):
    assert PowersOfTwo().bucket(rows, most) == size


def test_keys_take_powers_of_two_from_the_smallest_to_the_longest():
    graphs = graphs_of(max_model_len=40)
    assert [graphs.keys_bucket(n) for n in (2, 32, 33, 40)] == [MIN_KEYS, 32, 40, 40] and MIN_KEYS == 32


def test_a_padding_row_computes_one_token_and_writes_to_the_null_block():
    batch = batch_of([5, 9, 2])
    full = PowersOfTwo().pad(batch, 4)
    assert full.token_ids.tolist() == [*batch.token_ids.tolist(), 0] and full.positions.tolist()[-1] == 0
    assert full.slots.tolist() == [*batch.slots.tolist(), 0] and full.q_lens == (1,) * 4 and full.kv_lens == (5, 9, 2, 1)
    assert list(full.tables[3]) == [0] and full.num_padding == 1 and torch.equal(full.logit_indices, batch.logit_indices)
    assert PowersOfTwo().pad(batch, 3) is batch


@pytest.mark.parametrize("window", [None, 4])
def test_replays_give_the_eager_logits_and_write_the_same_keys_and_values(window):
    """One after the other through the same buffers: longer, shorter, more rows, fewer; nothing of an earlier one is left."""
    model = tiny_model(3, window)
    engine = tiny_engine(3, window, cuda_graphs=True, max_num_seqs=8)
    graphs, store, backend = engine.runner.graphs, engine.store, TorchAttention(window)
    for kv in store.layers:
        kv.normal_(generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        for i, kv_lens in enumerate([(40, 3, 17), (2, 2, 2), (1,), (9, 33, 1, 1, 5), (30,), (7, 8, 9, 10, 11, 12)]):
            batch = batch_of(kv_lens, i)
            kept = PlainKVStore([kv.clone() for kv in store.layers])
            expected = model(batch, kept, backend, backend.plan(batch, model.dtype))
            full = graphs.pad(batch)
            logits = graphs.run(full, graphs.plan(full))
            assert logits.shape == (PowersOfTwo().bucket(len(kv_lens), 8), 32)
            torch.testing.assert_close(logits[: len(kv_lens)], expected, rtol=1e-12, atol=1e-12)
            for ours, theirs in zip(store.layers, kept.layers, strict=True):
                torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-12, atol=1e-12)  # all but padding's own slot
    assert {rows for rows, _ in graphs.sizes} == {1, 4, 8} and {keys for _, keys in graphs.sizes} <= {32, 48}


def test_an_empty_recording_touches_the_null_slot_only():
    """What a capture on a GPU runs before the first batch is there."""
    engine = tiny_engine(cuda_graphs=True)
    for kv in engine.store.layers:
        kv.fill_(float("nan"))[0] = 0
    from minillm.engine.graphs import Graph

    graphs = engine.runner.graphs
    graph = Graph(graphs.step, 4, 32, graphs.dtype, graphs.device)
    with torch.inference_mode():
        logits = graph._run()
    assert logits.isfinite().all() and all(kv[1:].isnan().all() for kv in engine.store.layers)


def test_tokens_are_the_eager_ones_and_few_sizes_serve_them():
    prompts = [[t] * (3 + t) for t in range(2, 9)]
    params = [SamplingParams(max_tokens=4 + i, ignore_eos=True) for i in range(7)]
    llm = tiny_llm(cuda_graphs=True, max_num_seqs=7)
    outs = llm.generate(prompts, params)
    assert [o.token_ids for o in outs] == [greedy(p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
    assert {rows for rows, _ in llm.engine.runner.graphs.sizes} == {1, 2, 4, 7}


def test_padding_is_counted_in_slots_and_tokens():
    """Three requests decode three steps as four rows; the step with the prompts is not padded."""
    counts, needles = {}, {}
    for graphs in (False, True):
        engine = tiny_engine(cuda_graphs=graphs, max_num_seqs=6)
        for t in (4, 5, 6):
            engine.add_request([t, t], SamplingParams(max_tokens=4, ignore_eos=True))
        run_to_end(engine)
        m = engine.meter
        counts[graphs] = m.slots_used, m.slots_padded, m.slots_idle, m.padded_tokens, m.tokens_computed, m.output_tokens
        needles[graphs] = m.snapshot()
    assert needles[True].launches == needles[False].launches + 3 * COPIES
    assert needles[True].total_flops > needles[False].total_flops, "padding costs what tokens cost"
    assert counts[False] == (12, 0, 12, 0, 15, 12) and counts[True] == (12, 3, 9, 3, 15, 12)


def test_a_batch_larger_than_the_largest_size_runs_eagerly():
    graphs = graphs_of(max_num_seqs=3)
    assert graphs.accepts(batch_of([5, 5, 5])) and not graphs.accepts(batch_of([5] * 4))
    assert not graphs.accepts(ForwardBatch.build([Row([1, 2], 0, [1])], BLOCK)), "a prompt"


class Tens:
    """A learner's rule."""

    def __init__(self):
        self.padded = 0

    def bucket(self, rows, most):
        return min(10, most)

    def pad(self, batch, rows):
        self.padded += 1
        return PowersOfTwo().pad(batch, rows)


def test_a_padding_rule_of_ones_own_is_used():
    mine = Tens()
    llm = tiny_llm(cuda_graphs=mine, max_num_seqs=12)
    assert llm.generate([[4, 5]], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids == greedy([4, 5], 6)
    assert llm.engine.runner.graphs.sizes == [(10, 32)] and mine.padded == 5 and llm.meter.slots_padded == 45


@pytest.mark.parametrize("rows, message", [(1, "2 rows were to be padded to 1"), (9, "2 rows were to be padded to 9")])
def test_a_rule_that_gives_an_impossible_size_is_an_error_that_names_it(rows, message):
    mine = Tens()
    mine.bucket = lambda n, most: rows
    llm = tiny_llm(cuda_graphs=mine, max_num_seqs=8)
    with pytest.raises(RuntimeError, match=message):
        llm.generate([[4], [5]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert llm.engine.cache.pool.num_referenced == 0


def test_a_rule_that_does_not_pad_is_an_error():
    mine = Tens()
    mine.pad = lambda batch, rows: batch
    with pytest.raises(RuntimeError, match="padded to 8 rows and has 2"):
        tiny_llm(cuda_graphs=mine, max_num_seqs=8).generate([[4], [5]], SamplingParams(max_tokens=3, ignore_eos=True))


def test_what_cannot_be_replayed_is_refused():
    for wrong in (1, "yes", None):
        with pytest.raises(ValueError, match="cuda_graphs must be True, False or a Padding"):
            EngineConfig(cuda_graphs=wrong)

    class Other:
        plan = forward = work = lambda self, *a: None

    with pytest.raises(ValueError, match="cuda_graphs replays the torch attention backend"):
        tiny_engine(cuda_graphs=True, attention_backend=Other())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="capturing a CUDA graph needs an NVIDIA GPU; torch sees none")
@pytest.mark.parametrize("overlap", [False, True])
def test_captured_graphs_give_the_eager_tokens(overlap):
    model = tiny_model().converted(torch.float64, "cuda")
    from minillm import LLM

    prompts, params = [[t] * (3 + t) for t in range(2, 9)], SamplingParams(max_tokens=12, ignore_eos=True)
    llm = LLM(model, num_blocks=64, block_size=BLOCK, cuda_graphs=True, max_num_seqs=7, overlap=overlap)
    assert [o.token_ids for o in llm.generate(prompts, params)] == [greedy(p, 12) for p in prompts]
