"""Latent attention in the engine: its forms, what the meter counts of it, the seam for a store, and what it does not go with."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minillm import LLM, Engine, EngineConfig, SamplingParams
from minillm.attention.latent import LatentAttention
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.block_io import BlockIO
from minillm.cache.latent_kv import LatentKVStore
from minillm.model.config import ModelConfig
from minillm.model.mla_config import MLAConfig
from minillm.model.presets import preset
from minillm.perf.hardware import card
from minillm.perf.plan import plan
from minillm.perf.roofline import attention_intensity, decode_work
from minillm.quant.config import QuantConfig
from minillm.quant.linear import PlainLinear

from ..strategies import LATENT, reference, run_to_end, tiny_config, tiny_engine, tiny_llm, tiny_model

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
WIDTH, HEADS, LAYERS, ELEMENT = 7 + 4, 3, 2, 8


def expected(group=LATENT[0], window=None, sinks=0):
    return tuple(reference(group, window, sinks).greedy(PROMPT, 8))


@pytest.mark.parametrize("group", LATENT)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"mla": "absorbed"}, {"mla": "naive"}, {"max_num_batched_tokens": 3}, {"kv_cache": "contiguous"},
        {"kv_cache": "none"}, {"batching": "static"}, {"cuda_graphs": True}, {"overlap": True},
        {"prefix_cache": "radix", "host_cache": 10**6},
        {"speculative": "ngram"}, {"speculative": "draft", "draft_model": [0]}, {"num_blocks": 5, "block_size": 4},
    ],
)  # fmt: skip
def test_greedy_tokens_equal_the_reference_with(options, group):
    llm = tiny_llm(group, **options)
    for _ in range(2):  # the second time there may be a cache to hit
        outs = llm.generate([PROMPT, PROMPT[:3], PROMPT], GREEDY)
        assert outs[0].token_ids == outs[2].token_ids == expected(group)


@pytest.mark.parametrize("form", ["auto", "absorbed", "naive"])
def test_a_window_and_sinks_hold_in_every_form(form):
    llm = tiny_llm(LATENT[0], attention_window=4, attention_sinks=1, mla=form)
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected(window=4, sinks=1)


def test_every_step_takes_the_form_of_fewer_flops():
    shape = preset("deepseek-v3").mla
    assert not shape.absorbs(128, 4096, 4096) and not shape.absorbs(128, 1, 1)  # a whole prompt, and one token of its own
    assert shape.absorbs(128, 1, 4096) and shape.absorbs(128, 128, 4096) and not shape.absorbs(128, 256, 4096)
    for queries, keys in ((1, 2), (7, 9), (100, 5000)):
        pairs = queries * keys
        least = shape.absorbed_flops(128, queries, pairs) < shape.naive_flops(128, keys, pairs)
        assert shape.absorbs(128, queries, keys) is least


def test_kv_bytes_are_those_of_a_latent_and_a_key_per_token():
    engine = tiny_engine(LATENT[0], num_blocks=20)
    assert isinstance(engine.store, LatentKVStore) and engine.store.bytes_per_token == WIDTH * LAYERS * ELEMENT
    engine.add_request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    run_to_end(engine)
    token = WIDTH * LAYERS * ELEMENT
    assert engine.meter.kv_write_bytes == 11 * token and engine.meter.kv_read_bytes == (9 + 10 + 11) * token
    assert engine.meter.kv_pool_bytes == 20 * 4 * token


@pytest.mark.parametrize("form", ["absorbed", "naive"])
@pytest.mark.parametrize("group", LATENT)
def test_flops_beside_the_pairs_equal_torchs_own_count(group, form):
    """torch does not count its attention on a CPU: of the meter's count the pairs are taken off."""
    engine = tiny_engine(group, mla=form)
    engine.add_request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    with FlopCounterMode(display=False) as counter:
        run_to_end(engine)
    shape, pairs = tiny_config(group).mla, 9 * 10 // 2 + 10 + 11
    width = shape.cache_width + shape.kv_rank if form == "absorbed" else shape.head_dim + shape.v_dim
    assert engine.meter.total_flops - 2 * pairs * HEADS * width * LAYERS == counter.get_total_flops() > 0


def test_a_decoding_step_is_what_the_roofline_predicts():
    engine = tiny_engine(LATENT[0])
    engine.add_request(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    before = engine.meter.snapshot()
    engine.step()
    found = engine.meter.snapshot() - before
    guess = decode_work(tiny_config(LATENT[0]), 1, 10, dtype="float64", bytes_per_weight=8, kv_bytes_per_element=8)
    assert (found.flops, found.kv_read_bytes, found.kv_write_bytes) == (guess.flops, guess.kv_read_bytes, guess.kv_write_bytes)
    assert found.weight_bytes == guess.weight_bytes + 2 * 4 * 8  # and a cos and a sin of rope_dim


def test_published_models_have_the_published_numbers():
    v2, v3 = preset("deepseek-v2"), preset("deepseek-v3")
    assert round(v3.num_params / 1e9) == 671 and round(v2.num_params / 1e9) == 236
    assert v3.kv_bytes_per_token() == 576 * 61 * 2
    assert attention_intensity(v3, 1, 10**7) == pytest.approx(128 * (576 + 512) / 576, rel=1e-3)  # nearly 242
    made = plan(v3, card("h100"), batch=1, context=4096, cards=24)
    assert made.kv_bytes_per_token == 70_272 and made.fits


class DictStore:
    """Somebody's own store: a row per slot, kept in dictionaries."""

    def __init__(self, config, num_slots, dtype, device):
        self.num_slots, self.dtype = num_slots, dtype
        self.bytes_per_token = config.kv_width * config.num_layers * dtype.itemsize
        self.kept: dict = {}
        zero = torch.zeros(1, config.mla.rope_dim, dtype=dtype), torch.zeros(1, config.mla.kv_rank, dtype=dtype)
        self.empty = zero

    def write(self, layer, slots, k, v):
        self.kept.update({(layer, s): (k[i].clone(), v[i].clone()) for i, s in enumerate(slots.tolist())})

    def read(self, layer, slots):
        found = [[self.kept.get((layer, s), self.empty) for s in row] for row in slots.tolist()]
        return tuple(torch.stack([torch.stack([kv[i] for kv in row]) for row in found]) for i in (0, 1))


def test_a_store_of_ones_own_is_given_the_rotated_key_and_the_latent():
    assert tiny_llm(LATENT[0], kv_store=DictStore).generate(PROMPT, GREEDY)[0].token_ids == expected()


def test_blocks_of_latents_leave_the_store_and_come_back_bit_for_bit():
    store = LatentKVStore.allocate(tiny_config(LATENT[0]).mla, LAYERS, 12, torch.float32)
    for rows in store.layers:
        rows.copy_(torch.randn(rows.shape))
    before, io = [rows.clone() for rows in store.layers], BlockIO(store, LAYERS, 3)
    assert io.nbytes == 3 * store.bytes_per_token
    io.put([3], io.get([1]))
    for rows, old in zip(store.layers, before, strict=True):
        assert torch.equal(rows[9:], old[3:6]) and torch.equal(rows[:9], old[:9])
    store.copy(torch.tensor([0]), torch.tensor([5]))
    assert all(torch.equal(rows[5], old[0]) for rows, old in zip(store.layers, before, strict=True))


def test_padding_reads_zeros_and_a_poisoned_slot_is_seen():
    store = LatentKVStore.allocate(tiny_config(LATENT[0]).mla, LAYERS, 8, torch.float64)
    store.poison(torch.arange(1, 8))
    key, latent = store.read(0, torch.tensor([[0, 3]]))
    assert key.shape == (1, 2, 1, 4) and latent.shape == (1, 2, 1, 7)
    assert not key[0, 0].any() and not latent[0, 0].any() and key[0, 1].isnan().all() and latent[0, 1].isnan().all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kv_dtype": "int8"}, "kv_dtype='int8' does not go with this model's latent attention"),
        ({"attention_backend": "triton"}, "attention_backend='triton' does not go with"),
        ({"attention_backend": TorchAttention()}, "attention_backend=TorchAttention .* lacks latent"),
        ({"attention_backend": LatentAttention(), "mla": "naive"}, "mla='naive' .* a backend of your own has its own form"),
        ({"sparse_blocks": 2}, "sparse_blocks=2 does not go with"),
        ({"compile": True}, "compile=True does not go with"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine(LATENT[0], **options)


@pytest.mark.parametrize("method", ["rtn", "awq", "w8a8"])
def test_quantised_weights_are_refused(method):
    config = QuantConfig(method, 8, -1, True) if method == "w8a8" else QuantConfig(method, group=-1)
    with pytest.raises(ValueError, match=f"'{method}' quantises layers with KV heads, and tiny has latent"):
        LLM(tiny_model(LATENT[0]), quantization=config)


def test_a_copy_in_few_bits_cannot_draft_and_the_refusal_names_no_option_that_was_not_given():
    with pytest.raises(ValueError, match="tiny has latent attention") as refusal:
        tiny_engine(LATENT[0], speculative="draft", draft_model="int8")
    assert "quantization=" not in str(refusal.value)


def test_how_a_checkpoint_stores_rotated_dimensions_is_true_or_false():
    with pytest.raises(ValueError, match="interleaved .* must be True or False, got 'no'"):
        MLAConfig(7, None, 3, 4, 5, interleaved="no")


def test_a_linear_method_of_ones_own_serves_all_but_the_up_projection():
    class Mine(PlainLinear):
        packed = 0

        def pack(self, weight, bias):
            Mine.packed += 1
            return super().pack(weight, bias)

    llm = LLM(tiny_model(LATENT[0]), quantization=Mine(), num_blocks=64, block_size=4)
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected()
    assert Mine.packed == 1 + LAYERS * 5 and type(llm.model.layers[0].attention.kv_up.method) is PlainLinear


@pytest.mark.parametrize("value", ["fast", None, 1])
def test_a_form_that_there_is_not_is_refused(value):
    with pytest.raises(ValueError, match="mla must be"):
        EngineConfig(mla=value)


def test_a_model_with_kv_heads_has_no_form():
    with pytest.raises(ValueError, match="mla='absorbed' is for models with latent attention"):
        tiny_engine(mla="absorbed")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 8}, "nope_dim \\+ rope_dim, 7"), ({"num_kv_heads": 1}, "num_kv_heads is num_heads"),
        ({"qk_norm": True}, "neither biases nor norms"), ({"mla": 3}, "must be an MLAConfig"),
    ],
)  # fmt: skip
def test_a_shape_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(LATENT[0], **changes)


def test_a_converted_model_answers_as_the_one_it_was_made_from():
    model = tiny_model(LATENT[0])
    engine = Engine(model.converted(torch.float64, "cpu"), None, EngineConfig(num_blocks=20))
    name = engine.add_request(PROMPT, GREEDY)
    assert run_to_end(engine)[name].token_ids == expected()
    assert isinstance(model.config, ModelConfig) and model.dense_weights().keys() == engine.model.dense_weights().keys()


def test_pairs_outside_a_window_are_not_counted():
    flops = []
    for window in (None, 4):
        engine = tiny_engine(LATENT[0], mla="absorbed", attention_window=window)
        engine.add_request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
        run_to_end(engine)
        flops.append(engine.meter.total_flops)
    all_pairs, seen = 9 * 10 // 2 + 10 + 11, (1 + 2 + 3 + 6 * 4) + 4 + 4
    assert flops[0] - flops[1] == 2 * (all_pairs - seen) * HEADS * (WIDTH + 7) * LAYERS
