"""The needles, against counts made by hand, against torch's own counter, and against the tensors that were really read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minillm import Engine, EngineConfig, SamplingParams
from minillm.perf.meter import GAUGES, Needles
from minillm.perf.work import Work, visible_pairs

from ..strategies import (
    GROUPS,
    WINDOWS,
    engine_options,
    greedy_params,
    run_to_end,
    slots_needed,
    tiny_engine,
    tiny_model,
    watched,
    workloads,
)

# the model of group 3, by hand
HIDDEN, INNER, VOCAB, LAYERS, HEAD_DIM, Q, KV, ELEMENT = 16, 20, 32, 2, 4, 24, 8, 8
LAYER_WEIGHTS = HIDDEN * (Q + 2 * KV) + Q * HIDDEN + 3 * HIDDEN * INNER
KV_TOKEN = 2 * KV * ELEMENT * LAYERS


def ask(engine, *work):
    for prompt, max_tokens in work:
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def counts(engine, *names):
    return tuple(getattr(engine.meter, n) for n in names)


def test_a_chunked_run_of_two_requests_counts_what_a_hand_counts():
    """A has 5 tokens and gets 3, B has 2 and gets 2; budget 4. Steps: A 4 · A 1, B 2 · A 1, B 1 · A 1."""
    engine = tiny_engine(max_num_batched_tokens=4, max_num_seqs=3)
    ask(engine, ([5, 6, 7, 8, 9], 3), ([4, 5], 2))
    run_to_end(engine)
    assert counts(engine, "steps", "tokens_computed", "tokens_reused", "prefix_tokens") == (4, 10, 4 + 7 + 6, 0)
    assert counts(engine, "output_tokens", "row_passes") == (5, 5) and engine.meter.snapshot().passes_per_token == 1
    assert counts(engine, "slots_used", "slots_idle", "slots_padded", "padded_tokens") == (6, 6, 0, 0)
    pairs = (1 + 2 + 3 + 4) + (5 + 1 + 2) + (6 + 3) + 7
    matmul = 2 * 10 * LAYER_WEIGHTS * LAYERS + 2 * 5 * VOCAB * HIDDEN
    assert engine.meter.flops == {"float64": matmul + 4 * pairs * Q * LAYERS}
    every_step = LAYERS * (LAYER_WEIGHTS + 2 * HIDDEN + 2 * HEAD_DIM)  # products and norms
    every_sampling_step = HIDDEN + VOCAB * HIDDEN  # the last norm and the head; the first chunk needs neither
    every_token = HIDDEN + 2 * HEAD_DIM  # its row of the embedding, its cosines and sines
    assert engine.meter.weight_bytes == (4 * every_step + 3 * every_sampling_step + 10 * every_token) * ELEMENT
    assert engine.meter.kv_write_bytes == 10 * KV_TOKEN
    assert engine.meter.kv_read_bytes == (4 + (5 + 2) + (6 + 3) + 7) * KV_TOKEN
    assert counts(engine, "kv_allocated_peak", "kv_live_peak") == (3 * 4 * KV_TOKEN, 9 * KV_TOKEN)
    assert counts(engine, "kv_allocated_bytes", "kv_live_bytes", "kv_pool_bytes") == (0, 0, 64 * 4 * KV_TOKEN)
    assert engine.meter.weight_bytes_held == sum({t.data_ptr(): t.nbytes for t in tiny_model().buffers()}.values())
    assert counts(engine, "drafted", "accepted", "wasted", "stalled_tokens") == (0, 0, 0, 0)


def test_held_kv_follows_the_requests_from_step_to_step():
    engine = tiny_engine(max_num_batched_tokens=4, max_num_seqs=3)
    ask(engine, ([5, 6, 7, 8, 9], 3), ([4, 5], 2))
    held = []
    while engine.has_work:
        engine.step()
        held.append((engine.meter.kv_allocated_bytes // KV_TOKEN, engine.meter.kv_live_bytes // KV_TOKEN))
    assert held == [(4, 4), (12, 7), (8, 6), (0, 0)], "B has given its block back after the third step"
    ask(engine, ([5] * 9, 3))
    engine.step()
    (request,) = engine.scheduler.running
    engine.abort(request.request_id)
    assert counts(engine, "kv_allocated_bytes", "kv_live_bytes") == (0, 0)


def test_a_static_batch_counts_its_padding():
    """Prompts of 1 and 6, then three steps in which the finished row is computed for nobody."""
    engine = tiny_engine(batching="static", max_num_seqs=3)
    ask(engine, ([4], 1), ([5] * 6, 4))
    run_to_end(engine)
    assert counts(engine, "steps", "tokens_computed", "padded_tokens") == (4, 7 + 3, 5 + 3)
    assert counts(engine, "slots_used", "slots_padded", "slots_idle") == (2 + 3, 3, 4)
    pairs = (1 + 21 + 5) + (7 + 1) + (8 + 1) + (9 + 1)
    matmul = 2 * 18 * LAYER_WEIGHTS * LAYERS + 2 * 5 * VOCAB * HIDDEN
    assert engine.meter.total_flops == matmul + 4 * pairs * Q * LAYERS, "padding costs what tokens cost"
    assert engine.meter.kv_write_bytes == 18 * KV_TOKEN


def test_recomputation_reuses_nothing_and_holds_one_layers_kv():
    engine = tiny_engine(kv_cache="none")
    ask(engine, ([5, 6, 7], 4))
    run_to_end(engine)
    assert counts(engine, "tokens_computed", "tokens_reused", "output_tokens") == (3 + 4 + 5 + 6, 0, 4)
    assert engine.meter.kv_live_peak == 6 * KV_TOKEN // LAYERS and engine.meter.kv_live_bytes == 0
    paged = tiny_engine()
    ask(paged, ([5, 6, 7], 4))
    run_to_end(paged)
    assert counts(paged, "tokens_computed", "tokens_reused") == (6, 3 + 4 + 5)
    assert paged.meter.total_flops < engine.meter.total_flops


def test_a_decoding_request_beside_somebodys_prompt_is_stalled_once_per_step():
    engine = tiny_engine(max_num_batched_tokens=4)
    ask(engine, ([4], 6), ([5] * 10, 2))
    run_to_end(engine)
    assert engine.meter.stalled_tokens == 3, "the prompt of 10 takes 3 tokens beside the first, then 3, 3 and 1"


def test_a_decoding_request_that_sits_a_step_out_is_stalled():
    engine = tiny_engine(kv_cache="none", max_num_batched_tokens=12)
    ask(engine, ([4] * 5, 4), ([5] * 5, 4))
    run_to_end(engine)
    assert engine.meter.stalled_tokens == 2, "7 and 8 tokens leave no room for the other's 7"


def test_preemption_shows_as_tokens_computed_twice():
    engine = tiny_engine(num_blocks=6)
    ask(engine, *(([t] * 6, 10) for t in (4, 5, 6)))
    run_to_end(engine)
    assert engine.meter.output_tokens == 30 == engine.meter.row_passes
    assert engine.meter.tokens_computed > 3 * (6 + 9)


# --- snapshots ---


@settings(max_examples=15)
@given(st.data(), workloads(greedy_params()))
def test_equal_runs_give_equal_needles_and_a_difference_is_the_second_run_alone(data, work):
    options = data.draw(engine_options(max(slots_needed(p, s) for p, s in work)))
    options["prefix_cache"] = "none"  # it is there to change the next run

    def run(engine):
        for prompt, params in work:
            engine.add_request(prompt, params)
        run_to_end(engine)
        return engine.meter.snapshot()

    engine = tiny_engine(**options)
    first = run(engine)
    assert run(tiny_engine(**options)) == first
    second = run(engine)
    assert second - first == first, "a run leaves nothing behind that changes the next"
    engine.meter.reset()
    assert run(engine) == first


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_tokens_that_two_requests_share_are_live_once(kind):
    engine = tiny_engine(prefix_cache=kind, num_blocks=20)
    prompt = list(range(2, 11))  # two blocks and one token
    for _ in range(3):
        engine.add_request(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    per_token = engine.store.bytes_per_token
    assert engine.meter.kv_live_bytes == (8 + 3) * per_token and engine.meter.kv_allocated_bytes == (2 + 3) * 4 * per_token
    run_to_end(engine)
    assert engine.meter.kv_live_bytes == engine.meter.kv_allocated_bytes == 0


def test_a_snapshot_does_not_move_and_reset_keeps_what_is_held():
    engine = tiny_engine()
    ask(engine, ([4, 5], 3))
    engine.step()
    snapshot = engine.meter.snapshot()
    before = snapshot.by_verb()
    run_to_end(engine)
    assert snapshot.by_verb() == before and snapshot.steps == 1
    engine.meter.reset()
    empty = engine.meter.snapshot()
    assert (empty.steps, empty.total_flops, empty.total_bytes, empty.passes_per_token) == (0, 0, 0, 0.0)
    assert empty.weight_bytes_held == snapshot.weight_bytes_held and empty.kv_pool_bytes == snapshot.kv_pool_bytes


def test_a_difference_subtracts_counts_and_keeps_sizes():
    early = Needles(flops={"float64": 5}, steps=2, kv_live_bytes=100, kv_live_peak=300, weight_bytes=7)
    late = Needles(flops={"float64": 9, "int8": 4}, steps=5, kv_live_bytes=50, kv_live_peak=300, weight_bytes=10)
    change = late - early
    assert change.flops == {"float64": 4, "int8": 4} and (change.steps, change.weight_bytes) == (3, 3)
    assert (change.kv_live_bytes, change.kv_live_peak) == (50, 300)


def test_every_needle_belongs_to_one_verb_and_is_printed():
    engine = tiny_engine()
    ask(engine, ([4, 5], 3))
    run_to_end(engine)
    verbs = engine.meter.snapshot().by_verb()
    assert list(verbs) == ["skip", "compute less", "move less", "occupy less", "saturate", "break serial"]
    named = [name for counters in verbs.values() for name in counters]
    optional = {"loaded_tokens", "tier_read_bytes", "tier_write_bytes", "index_flops", "index_bytes"}
    optional |= {"mixtures", "routed_rows", "experts_touched", "busiest_rows"}
    assert not optional & set(named), "an engine without tiers, an indexer and experts does not speak of them"
    verbs = Needles(flops=dict(engine.meter.flops), tier_write_bytes=1, index_bytes=1, mixtures=1).by_verb()
    named = [name for counters in verbs.values() for name in counters]
    assert len(named) == len(set(named)) and {f"flops_{p}" for p in engine.meter.flops} < set(named)
    assert set(Needles.__dataclass_fields__) - {"flops"} < set(named) and set(GAUGES) < set(named)
    for verb in verbs:
        assert verb in str(engine.meter)
    with pytest.raises(AttributeError):
        engine.meter.no_such_needle  # noqa: B018


# --- against torch ---


class NoAttention:
    """Passes the queries through: what remains are the matrix products that torch's counter sees."""

    def plan(self, batch, dtype):
        return None

    def forward(self, q, layer, store, plan):
        return q

    def work(self, batch, plan, config, dtype):
        return Work()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 3}, {"batching": "static"}, {"kv_cache": "none"}])
def test_matmul_flops_equal_torchs_own_count(group, options):
    engine = tiny_engine(group, attention_backend=NoAttention(), **options)
    ask(engine, ([4] * 5, 3), ([6], 4))
    with FlopCounterMode(display=False) as counter:
        run_to_end(engine)
    assert engine.meter.total_flops == counter.get_total_flops() > 0


@settings(max_examples=15)
@given(st.data(), workloads(greedy_params(), max_requests=4), st.sampled_from(WINDOWS))
def test_attention_flops_are_four_per_visible_pair_and_query_element(data, work, window):
    options = data.draw(engine_options(max(slots_needed(p, s) for p, s in work)))
    engine = tiny_engine(3, window, **(options | {"cuda_graphs": False}))  # a graph's batches do not say what they hold
    for prompt, params in work:
        engine.add_request(prompt, params)
    with watched(engine.model) as batches:
        run_to_end(engine)
    pairs = 0
    for b in batches:
        for q_len, kv_len in zip(b.q_lens, b.kv_lens, strict=True):
            for query in range(kv_len - q_len, kv_len):
                pairs += sum(1 for key in range(kv_len) if key <= query and (window is None or query - key < window))
    tokens, samples = sum(b.num_tokens for b in batches), sum(len(b.logit_indices) for b in batches)
    matmul = 2 * tokens * LAYER_WEIGHTS * LAYERS + 2 * samples * VOCAB * HIDDEN
    assert engine.meter.total_flops - matmul == 4 * pairs * Q * LAYERS


@given(st.integers(1, 12), st.integers(0, 12), st.none() | st.integers(1, 14))
def test_visible_pairs_are_the_entries_of_the_mask(q_len, before, window):
    kv_len = before + q_len
    query, key = torch.arange(before, kv_len)[:, None], torch.arange(kv_len)[None]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    assert visible_pairs(q_len, kv_len, window) == int(mask.sum())


class WeightReads(TorchDispatchMode):
    """Bytes of parameters that operators read: whole tensors, or the rows that an index picks."""

    def __init__(self, model):
        super().__init__()
        self.weights = {t.untyped_storage().data_ptr() for t in model.buffers()}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view and out.numel():  # a product without rows reads nothing
            for t in args:
                if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in self.weights:
                    self.bytes += out.nbytes if func.overloadpacket is torch.ops.aten.index else t.nbytes
        return out


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("budget", [3, 64])
def test_weight_bytes_are_those_of_the_tensors_that_operators_read(group, dtype, budget):
    model = tiny_model(group).converted(dtype, "cpu")
    engine = Engine(model, None, EngineConfig(num_blocks=64, block_size=4, max_num_batched_tokens=budget))
    ask(engine, ([4] * 5, 3), ([6], 4))
    with WeightReads(model) as reads:
        run_to_end(engine)
    assert engine.meter.weight_bytes == reads.bytes > 0


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 3}, {"kv_cache": "none"}])
def test_kv_bytes_are_those_of_the_slots_that_were_read_and_written(options, monkeypatch):
    engine = tiny_engine(**options)
    store, layer_bytes = engine.store, 2 * KV * ELEMENT
    seen = {"read": 0, "write": 0}
    read, write = store.read, store.write

    def counting_read(layer, slots):
        seen["read"] += int((slots != 0).sum()) * layer_bytes  # slot 0 only fills short rows up
        return read(layer, slots)

    def counting_write(layer, slots, k, v):
        seen["write"] += len(slots) * layer_bytes
        assert k.nbytes + v.nbytes == len(slots) * layer_bytes
        return write(layer, slots, k, v)

    monkeypatch.setattr(store, "read", counting_read)
    monkeypatch.setattr(store, "write", counting_write)
    ask(engine, ([4] * 5, 3), ([6], 4))
    run_to_end(engine)
    assert (engine.meter.kv_read_bytes, engine.meter.kv_write_bytes) == (seen["read"], seen["write"])
