"""Counted work from a config, its predicted time, and the numbers that follow from both."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from minillm.model.config import ModelConfig
from minillm.model.presets import PRESETS, SOURCES, preset
from minillm.perf.hardware import Hardware, card
from minillm.perf.roofline import (
    attention_intensity,
    capacity,
    decode_work,
    latency,
    predict,
    prefill_work,
    step_work,
)
from minillm.perf.units import GIB, KIB, MIB
from minillm.perf.work import Work, visible_pairs

QWEN = preset("qwen3-32b")
LLAMA = preset("llama-7b")
SMOL = preset("smollm2-135m")
H100 = card("h100")
TINY = ModelConfig(
    vocab_size=97, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, max_position=64
)
TOY = Hardware("toy", bandwidth=10.0, flops={"bfloat16": 100.0, "int8": 200.0}, memory=1000.0, source="invented")

configs = st.builds(
    lambda kv, group, **sizes: ModelConfig(num_kv_heads=kv, num_heads=kv * group, max_position=4096, **sizes),
    kv=st.integers(1, 4), group=st.integers(1, 5), head_dim=st.sampled_from([2, 8, 80]), num_layers=st.integers(1, 4),
    hidden_size=st.integers(1, 64), intermediate_size=st.integers(1, 64), vocab_size=st.integers(1, 99),
    tie_embeddings=st.booleans(), qkv_bias=st.booleans(), qk_norm=st.booleans(),
    sliding_window=st.none() | st.integers(1, 40),
)  # fmt: skip


# --- presets and checked values ---


def test_kv_per_token_of_known_models():
    assert QWEN.kv_bytes_per_token() == 256 * KIB
    assert LLAMA.kv_bytes_per_token() == 512 * KIB
    assert SMOL.kv_bytes_per_token() == 22.5 * KIB
    mha = dataclasses.replace(QWEN, num_kv_heads=QWEN.num_heads)
    assert mha.kv_bytes_per_token() == 2 * MIB


def test_kv_of_whole_requests():
    assert 131_072 * QWEN.kv_bytes_per_token() == 32 * GIB
    assert 4096 * LLAMA.kv_bytes_per_token() == 2 * GIB
    assert 32 * 4096 * LLAMA.kv_bytes_per_token() == 64 * GIB


def test_kv_of_a_7b_model_at_batch_1_and_32_against_its_weights():
    weights = 2 * LLAMA.num_params
    kv = 4096 * LLAMA.kv_bytes_per_token()
    assert round(100 * kv / weights, 1) == 15.9
    assert round(32 * kv / weights, 2) == 5.10


def test_parameter_counts_of_known_models():
    assert round(SMOL.num_params / 1e6, 1) == 134.5
    assert round(LLAMA.num_params / 1e9, 2) == 6.74
    assert round(QWEN.num_params / 1e9, 1) == 32.8
    assert round(preset("llama-2-70b").num_params / 1e9) == 69
    assert set(SOURCES) == set(PRESETS)


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="no preset 'gpt-2'; there are smollm2-135m, llama-7b"):
        preset("gpt-2")


# --- the one physical fact, on an H100 ---


def test_decoding_alone_costs_19_6_ms_with_and_19_1_ms_without_the_input_embedding():
    whole = 2 * QWEN.num_params / H100.bandwidth
    read = predict(decode_work(QWEN, batch=1, context=1), H100)
    assert round(1e3 * whole, 1) == 19.6 and round(1 / whole) == 51
    assert round(1e3 * read.seconds, 1) == 19.1
    assert read.bound == "bandwidth"


def test_a_prompt_of_4096_tokens_costs_273_teraflop_and_is_bound_by_compute():
    work = prefill_work(QWEN, 4096)
    prefill = predict(work, H100)
    assert f"{work.total_flops:.2e}" == "2.73e+14"
    assert round(prefill.seconds, 2) == 0.28
    assert prefill.bound == "compute"


@pytest.mark.parametrize(
    ("memory", "cards", "requests"), [(80e9, 1, 6), (81_559 * MIB, 1, 10), (80e9, 2, 73)]
)
def test_concurrency_depends_on_what_is_assumed_usable(memory, cards, requests):
    hardware = dataclasses.replace(H100, memory=memory).times(cards)
    assert capacity(QWEN, hardware, weight_bytes=2 * QWEN.num_params, context=4096, usable=0.9) == requests


def test_weights_that_do_not_fit_leave_room_for_nobody():
    assert capacity(QWEN, H100, weight_bytes=140e9, context=1) == 0


@given(context=st.integers(1, 5000), usable=st.floats(0.1, 1))
def test_capacity_is_the_largest_number_that_fits(context, usable):
    n = capacity(QWEN, H100, weight_bytes=7e9, context=context, usable=usable)
    per_request = context * QWEN.kv_bytes_per_token()
    assert 7e9 + n * per_request <= usable * H100.memory + 1 or n == 0
    assert 7e9 + (n + 1) * per_request > usable * H100.memory


# --- counted work ---


def test_decode_flops_agree_with_torchs_counter():
    batch, context = 5, 11
    with FlopCounterMode(display=False) as counter:
        _projections(TINY, tokens=batch, logits=batch)
        for _ in range(TINY.num_layers * batch):
            _attention(TINY, context)
    assert decode_work(TINY, batch, context).total_flops == counter.get_total_flops()


@pytest.mark.parametrize("window", [None, 1, 4, 99])
def test_prefill_flops_agree_with_torchs_counter_when_only_visible_pairs_are_computed(window):
    config = dataclasses.replace(TINY, sliding_window=window)
    past, new = 3, 7
    with FlopCounterMode(display=False) as counter:
        _projections(config, tokens=new, logits=1)
        for position in range(past, past + new):
            for _ in range(config.num_layers):
                _attention(config, min(position + 1, window or 99))
    assert prefill_work(config, new, past=past).total_flops == counter.get_total_flops()


def _projections(config, tokens, logits):
    """The matrix products of a forward pass, with plain tensors of a model's shapes."""

    def linear(rows, k, n):
        F.linear(torch.zeros(rows, k), torch.zeros(n, k))

    for _ in range(config.num_layers):
        linear(tokens, config.hidden_size, config.q_size + 2 * config.kv_size)
        linear(tokens, config.q_size, config.hidden_size)
        linear(tokens, config.hidden_size, 2 * config.intermediate_size)
        linear(tokens, config.intermediate_size, config.hidden_size)
    linear(logits, config.hidden_size, config.vocab_size)


def _attention(config, visible):
    """One query against its visible keys and values."""
    q = torch.zeros(config.num_heads, 1, config.head_dim)
    scores = q @ torch.zeros(config.num_heads, config.head_dim, visible)
    scores @ torch.zeros(config.num_heads, visible, config.head_dim)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weight_bytes_agree_with_the_tensors_of_the_reference_library(family, tie):
    transformers = pytest.importorskip("transformers")
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    hf = getattr(transformers, f"{names}Config")(
        vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=4, tie_word_embeddings=tie, architectures=[f"{names}ForCausalLM"], pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{names}ForCausalLM")(hf).to(torch.bfloat16)
    config = ModelConfig.from_hf(hf.to_dict())
    held = sum(p.nbytes for p in model.parameters())
    table = model.get_input_embeddings().weight
    rows = 3 * table[0].nbytes
    assert config.num_params * 2 == held
    read = held + rows if tie else held - table.nbytes + rows
    assert decode_work(config, batch=3, context=9).weight_bytes == read
    # a chunk in the middle of a prompt needs no logits, hence no head: that is the embedding again when they are tied
    without_head = read - model.get_output_embeddings().weight.nbytes
    assert prefill_work(config, 3, logits=0).weight_bytes == without_head


@given(past=st.integers(0, 60), new=st.integers(0, 60), window=st.none() | st.integers(1, 70))
def test_visible_pairs_are_those_of_the_mask(past, new, window):
    query = torch.arange(past, past + new)[:, None]
    key = torch.arange(past + new)[None, :]
    mask = (key <= query) & (query - key < (window or 10**6))
    assert visible_pairs(new, past + new, window) == int(mask.sum())


@given(config=configs, chunks=st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_chunking_a_prompt_adds_weight_and_kv_reads_but_no_flops(config, chunks):
    whole = prefill_work(config, sum(chunks))
    parts, past = Work(), 0
    for i, new in enumerate(chunks):
        parts += prefill_work(config, new, past=past, logits=int(i == len(chunks) - 1))
        past += new
    assert parts.flops == whole.flops
    assert parts.kv_write_bytes == whole.kv_write_bytes
    assert parts.kv_read_bytes >= whole.kv_read_bytes
    assert parts.weight_bytes >= whole.weight_bytes


@given(config=configs, rows=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_mixed_step_shares_the_weights_and_nothing_else(config, rows):
    together = step_work(config, rows, logits=len(rows))
    alone = [step_work(config, [row], logits=1) for row in rows]
    apart = sum(alone, Work())
    assert together.flops == apart.flops
    assert together.kv_read_bytes == apart.kv_read_bytes
    assert together.kv_write_bytes == apart.kv_write_bytes
    shared = alone[0].weight_bytes - 2 * config.hidden_size * rows[0][1]
    assert together.weight_bytes == apart.weight_bytes - (len(rows) - 1) * shared


@given(config=configs, batch=st.integers(1, 9), context=st.integers(1, 300))
def test_a_longer_context_and_a_bigger_batch_never_cost_less(config, batch, context):
    here = predict(decode_work(config, batch, context), TOY).seconds
    assert predict(decode_work(config, batch + 1, context), TOY).seconds >= here
    assert predict(decode_work(config, batch, context + 1), TOY).seconds >= here


def test_a_sliding_window_bounds_the_reading_of_a_long_context():
    windowed = dataclasses.replace(TINY, sliding_window=4)
    assert decode_work(windowed, 2, 400) == decode_work(windowed, 2, 4)
    assert decode_work(windowed, 2, 3) == decode_work(TINY, 2, 3)


def test_fewer_bits_shrink_their_own_bytes_only():
    full, quarter = decode_work(QWEN, 8, 100), decode_work(QWEN, 8, 100, bytes_per_weight=0.5, kv_bytes_per_element=1)
    assert quarter.weight_bytes == full.weight_bytes // 4
    assert quarter.kv_read_bytes == full.kv_read_bytes // 2
    assert quarter.flops == full.flops


def test_an_empty_step_does_nothing():
    assert step_work(TINY, [], logits=0) == Work()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decode_work(TINY, 0, 5), "batch must be .* got 0"),
        (lambda: decode_work(TINY, 1, 0), "context must be .* got 0"),
        (lambda: prefill_work(TINY, 0), "new must be .* got 0"),
        (lambda: prefill_work(TINY, 5, past=-1), "past must be .* got -1"),
        (lambda: prefill_work(TINY, 5, logits=6), "at most the 5 tokens of the step, got 6"),
        (lambda: prefill_work(TINY, 5, bytes_per_weight=0), "bytes_per_weight .* got 0"),
        (lambda: decode_work(TINY, 1, 5, kv_bytes_per_element=-1), "kv_bytes_per_element .* got -1"),
        (lambda: capacity(TINY, TOY, weight_bytes=1, context=5, usable=1.5), "usable .* got 1.5"),
        (lambda: attention_intensity(TINY, 6, 5), "context must be a whole number of at least 6, got 5"),
        (lambda: latency(-1, Work(), TOY), "rounds .* got -1"),
        (lambda: predict(Work(), TOY, -1.0), "overhead_s .* got -1.0"),
        (lambda: predict(Work(), TOY, held_bytes=math.nan), "held_bytes .* got nan"),
        (lambda: predict(Work({"int4": 1}), TOY), "no FLOP/s of toy for 'int4'; it has bfloat16, int8"),
    ],
)
def test_bad_arguments_name_the_value_and_the_limit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- predicted time ---


@pytest.mark.parametrize(
    ("work", "overhead", "held", "bound", "seconds"),
    [
        (Work({"bfloat16": 100}, weight_bytes=20), 0, 0, "bandwidth", 2),
        (Work({"bfloat16": 300}, weight_bytes=20), 0, 0, "compute", 3),
        (Work({"bfloat16": 300}, weight_bytes=20), 4, 0, "overhead", 7),
        (Work({"bfloat16": 300}, weight_bytes=20), 2, 0, "compute", 5),
        (Work({"bfloat16": 300}, weight_bytes=20), 4, 901, "capacity", 7),
        (Work({"bfloat16": 300, "int8": 600}), 0, 900, "compute", 6),
        (Work(kv_read_bytes=10, kv_write_bytes=20, activation_bytes=30), 0, 0, "bandwidth", 6),
        (Work(), 0, 0, "bandwidth", 0),
    ],
)
def test_the_slowest_resource_sets_the_time_and_overhead_comes_on_top(work, overhead, held, bound, seconds):
    prediction = predict(work, TOY, overhead, held_bytes=held)
    assert (prediction.bound, prediction.seconds) == (bound, seconds)


def test_each_bound_has_a_verdict_that_names_its_reason():
    decode = predict(decode_work(QWEN, 1, 4096), H100)
    assert decode.verdict().startswith("bandwidth-bound: 19.4 ms of data movement against 73.3 µs of arithmetic")
    assert predict(prefill_work(QWEN, 4096), H100).verdict().startswith("compute-bound: 276 ms of arithmetic")
    assert predict(Work({"bfloat16": 1}), H100, 0.001).verdict().startswith("overhead-bound: 1.00 ms of overhead")
    full = predict(Work(), H100, held_bytes=140e9)
    assert full.verdict() == "capacity-bound: 140 GB (130 GiB) must be held, 72.0 GB (67.1 GiB) are usable"
    assert "0 s of data movement" in predict(Work(), TOY).verdict()


def test_latency_is_rounds_times_the_slower_resource():
    work = decode_work(QWEN, 1, 1)
    assert latency(100, work, H100) == pytest.approx(100 * work.total_bytes / H100.bandwidth)
    assert latency(0, work, H100) == 0


def test_decode_crosses_to_compute_at_the_ridge():
    # one KV token per sequence: weights dominate, so the crossing sits at the ridge, and a little beyond for what KV adds
    ridge = H100.ridge("bfloat16")
    assert predict(decode_work(QWEN, int(0.99 * ridge), 1), H100).bound == "bandwidth"
    assert predict(decode_work(QWEN, int(1.05 * ridge), 1), H100).bound == "compute"


# --- attention intensity ---


def test_attention_intensity_of_decoding_is_the_query_heads_per_kv_head():
    assert attention_intensity(LLAMA, 1, 100_000) == pytest.approx(1, rel=1e-3)
    assert attention_intensity(QWEN, 1, 100_000) == pytest.approx(8, rel=1e-3)
    assert attention_intensity(QWEN, 1, 100_000, bytes_per_element=1) == pytest.approx(16, rel=1e-3)


@pytest.mark.parametrize("n", [256, 4096])
def test_attention_intensity_of_an_mha_prompt_is_a_quarter_of_its_length(n):
    assert attention_intensity(LLAMA, n, n) == pytest.approx(n / 4, rel=0.01)
