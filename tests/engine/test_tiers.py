"""Host and disk tiers behind the engine: output equals cold, whatever the tiers hold, lose or break. B is the block size."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minillm import LLM, EngineConfig, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.cache.tier_setup import kv_fingerprint
from minillm.cache.tiers import AROUND, DiskTier, HostTier
from minillm.engine.engine import Engine
from minillm.model.transformer import Transformer
from minillm.quant.config import QuantConfig
from minillm.quant.linear import PlainLinear
from minillm.quant.quantise import quantise_model

from ..cache.dict_prefix import DictPrefixCache
from ..strategies import (
    MAX_LEN,
    WatchedAttention,
    kv_dtypes,
    models,
    poison_freed_blocks,
    reference,
    run_to_end,
    slots_needed,
    tiny_engine,
    tiny_model,
    watched,
)

B = 4
BLOCK = 2 * 2 * 2 * 4 * 8 * B  # bytes: K and V, 2 layers, 2 KV heads of 4, float64
A = list(range(2, 15))  # 13 tokens: three full blocks and one token
KINDS = ["hash", "radix", "own"]
OTHERS = [[20 + i, *range(3, 15)] for i in range(3)]


def prefix(kind, block_size=B):
    """The prefix cache under the tiers: one of the engine's, or somebody's own."""
    return DictPrefixCache(block_size) if kind == "own" else kind


def tiered_engine(block_size=B, num_blocks=5, host=20, disk=None, kind="radix", **options) -> Engine:
    """A pool that holds one request of A's length; tiers in blocks."""
    size = BLOCK * block_size // B
    options = {"tier_policy": "always", "host_cache": host and host * size, "disk_cache": disk and disk * (size + 72)} | options
    engine = tiny_engine(prefix_cache=prefix(kind, block_size), block_size=block_size, num_blocks=num_blocks, **options)
    poison_freed_blocks(engine)
    return engine


def ask(engine, prompt, max_tokens=5):
    name = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    out = run_to_end(engine)[name]
    assert out.token_ids == tuple(reference().greedy(prompt, max_tokens)), "equals cold"
    engine.cache.pool.check()
    return out


def push_out(engine, prompts=OTHERS[:2]):
    for prompt in prompts:
        ask(engine, prompt)


@pytest.fixture(params=["host", "disk", "both", "small host over disk"])
def sizes(request, tmp_path):
    host, disk = {"host": (20, None), "disk": (None, 40), "both": (20, 40), "small host over disk": (1, 40)}[request.param]
    return {"host": host, "disk": disk, **({"disk_folder": tmp_path} if disk else {})}


@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_pool_evicted_is_loaded_and_not_computed(sizes, write, kind):
    engine = tiered_engine(cache_write=write, kind=kind, **sizes)
    ask(engine, A)
    push_out(engine)
    assert engine.cache.prefix.match(A) == [], "nothing of it is left in the pool"
    engine.meter.reset()
    with watched(engine.model) as batches:
        out = ask(engine, A)
    assert (out.num_cached_tokens, out.num_loaded_tokens) == (12, 12) and batches[0].num_tokens == 1
    assert engine.meter.loaded_tokens == engine.meter.prefix_tokens == 12 and engine.meter.tier_read_bytes == 3 * BLOCK


def test_the_pool_is_asked_first_and_a_tier_continues_what_it_has(tmp_path):
    engine = tiered_engine(num_blocks=6)
    ask(engine, A)
    engine.cache.pool.uncache(engine.cache.prefix.evict(3, lambda b: True))  # the dictionary lets the longest prefixes go first
    held = len(engine.cache.prefix.match(A))
    out = ask(engine, A)
    assert 0 < held < 3 and out.num_cached_tokens == 12 and out.num_loaded_tokens == 12 - held * B


@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_at_least_one_token_is_computed(length):
    engine, prompt = tiered_engine(), A[:length]
    ask(engine, prompt)
    push_out(engine)
    out = ask(engine, prompt)
    assert out.num_loaded_tokens == out.num_cached_tokens == (length - 1) // B * B


def test_written_back_bytes_are_counted_once_and_a_block_that_is_there_is_not_copied_again():
    engine = tiered_engine()
    ask(engine, A)
    assert engine.meter.tier_write_bytes == 0, "nothing was evicted yet"
    push_out(engine)
    ask(engine, A)
    before = engine.meter.tier_write_bytes
    push_out(engine, OTHERS[:1])
    assert before % BLOCK == 0 and engine.meter.tier_write_bytes - before <= 3 * BLOCK
    again = engine.meter.tier_write_bytes
    ask(engine, A)
    push_out(engine, OTHERS[:1])
    ask(engine, A)
    assert engine.meter.tier_write_bytes == again


def test_written_through_eviction_copies_nothing():
    engine = tiered_engine(cache_write="through")
    ask(engine, A)
    assert engine.meter.tier_write_bytes == 4 * BLOCK  # 13 + 4 tokens: four full blocks
    engine.cache.pool.uncache(engine.cache.prefix.evict(9, lambda b: True))
    engine.add_request(OTHERS[0], SamplingParams(max_tokens=1))
    engine.step()
    assert engine.meter.tier_write_bytes == 4 * BLOCK + 3 * BLOCK


def test_a_restarted_engine_finds_what_was_written_through_to_disk(tmp_path):
    ask(tiered_engine(host=None, disk=40, disk_folder=tmp_path, cache_write="through"), A)
    out = ask(tiered_engine(host=None, disk=40, disk_folder=tmp_path), A)
    assert out.num_loaded_tokens == 12


@pytest.mark.parametrize("change", ["weights", "block size", "dtype", "attention", "kv_dtype"])
def test_kv_of_another_model_or_engine_is_never_found(tmp_path, change):
    ask(tiered_engine(host=None, disk=40, disk_folder=tmp_path, cache_write="through"), A)
    model, options = tiny_model(), {"block_size": B}
    if change == "weights":
        model = Transformer.random(model.config, seed=99, dtype=model.dtype)
    elif change == "block size":
        options["block_size"] = 2
    elif change == "dtype":
        options["dtype"] = "float32"
    elif change == "kv_dtype":
        options["kv_dtype"] = "int8"
        other = tiered_engine(host=None, disk=40, disk_folder=tmp_path, cache_write="through", kv_dtype="fp8")
        other.add_request(A, SamplingParams(max_tokens=1))
        run_to_end(other)
    else:
        options["attention_backend"] = WatchedAttention()
    llm = LLM(model, prefix_cache=DictPrefixCache(options["block_size"]), disk_cache=10**6, disk_folder=tmp_path, num_blocks=20,
              tier_policy="always", **options)  # fmt: skip
    assert llm.generate(A, SamplingParams(max_tokens=1))[0].num_loaded_tokens == 0


def test_kv_of_the_same_weights_multiplied_in_another_way_is_never_found(tmp_path):
    """The weights of "rtn" and "w8a8" are equal to the last bit; only the second rounds what they are multiplied by."""
    grids = QuantConfig("rtn", bits=8, group=-1, symmetric=True), QuantConfig("w8a8", migration=None)
    options = {"prefix_cache": "radix", "disk_cache": 10**6, "disk_folder": tmp_path, "cache_write": "through"}
    fixed = {"num_blocks": 20, "block_size": B, "tier_policy": "always"}
    ways = [(tiny_model(), {"quantization": grid}) for grid in grids] + [(quantise_model(tiny_model(), g), {}) for g in grids]
    for model, how in ways:
        found = [LLM(model, **options, **fixed, **how).generate(A, SamplingParams(max_tokens=1)) for _ in range(2)]
        assert [outs[0].num_loaded_tokens for outs in found] == [0, 12], "its own is found again"


def test_two_windows_of_one_class_of_attention_give_kv_of_different_names():
    def name(window):
        engine = tiny_engine(attention_backend=TorchAttention(window), num_blocks=20)
        return kv_fingerprint(engine.model, engine.options, engine.store, engine.runner.backend, B)

    assert name(4) != name(9) and name(9) == name(9)


class Coarse(PlainLinear):
    """A learner's method that rounds what it multiplies; the weights are as they were."""

    def __init__(self, levels: int):
        self.levels = levels

    def apply(self, packed, x):
        return super().apply(packed, (x * self.levels).round() / self.levels)


def test_two_roundings_by_one_linear_method_give_kv_of_different_names():
    def name(levels):
        model = Transformer.random(tiny_model().config, dtype=torch.float64, linear_method=Coarse(levels))
        engine = Engine(model, None, EngineConfig(num_blocks=20, block_size=B))
        return kv_fingerprint(model, engine.options, engine.store, engine.runner.backend, B)

    assert name(4) != name(16) and name(4) == name(4)


def test_a_preempted_request_loads_its_own_old_blocks():
    engine = tiered_engine(num_blocks=4, max_num_seqs=2)
    names = [
        engine.add_request(p, SamplingParams(max_tokens=8, ignore_eos=True)) for p in (list(range(2, 10)), list(range(12, 19)))
    ]
    done = run_to_end(engine)
    assert engine.meter.loaded_tokens > 0
    assert [done[n].token_ids for n in names] == [
        tuple(reference().greedy(p, 8)) for p in (list(range(2, 10)), list(range(12, 19)))
    ]


# --- damage ---


def spoil(engine, how):
    (tier,) = [t for t in engine.cache.tiers.tiers if isinstance(t, DiskTier)]
    files = sorted(tier.folder.iterdir(), key=lambda f: f.stat().st_mtime_ns)
    assert len(files) >= 3
    for file in files if how != "one" else files[1:2]:
        if how == "missing":
            file.unlink()
        else:
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 1
            file.write_bytes(raw if how != "cut" else raw[: len(raw) // 2])


@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "one"])
@pytest.mark.parametrize("host", [None, 1])
def test_damaged_blocks_are_computed_again(tmp_path, how, host):
    engine = tiered_engine(host=host, disk=40, disk_folder=tmp_path)
    ask(engine, A)
    push_out(engine)
    spoil(engine, how)
    assert ask(engine, A).num_loaded_tokens <= 12
    push_out(engine)
    assert ask(engine, A).num_loaded_tokens == 12, "written again, whole"


def test_a_load_that_fails_half_way_writes_nothing_and_loads_what_is_before_the_fault(tmp_path):
    engine = tiered_engine(host=None, disk=40, disk_folder=tmp_path)
    ask(engine, A)
    push_out(engine)
    tiers = engine.cache.tiers
    found = tiers.find(A, 0, 3)
    tiers.tiers[0].path(found.keys[1]).write_bytes(b"half")
    put, calls = tiers.io.put, []
    tiers.io.put = lambda blocks, contents: (calls.append(len(blocks)), put(blocks, contents))
    out = ask(engine, A)
    assert calls == [1] and out.num_loaded_tokens == B


def test_a_store_that_fails_while_it_is_filled_costs_the_load_and_not_the_request(caplog):
    engine = tiered_engine()
    ask(engine, A)
    push_out(engine)

    def broken(*_):
        raise RuntimeError("copy engine is on fire")

    engine.cache.tiers.io.put = broken
    with caplog.at_level(logging.WARNING):
        assert ask(engine, A).num_loaded_tokens == 0
    assert "computed again" in caplog.text and engine.cache.pool.num_referenced == 0


@pytest.mark.parametrize("method", ["has", "use", "read", "write"])
def test_a_tier_of_ones_own_that_raises_is_switched_off_and_nobody_notices(method, caplog):
    mine = HostTier(10**6)
    engine = tiered_engine(host_cache=mine)
    ask(engine, A)
    push_out(engine, OTHERS[:1])
    setattr(mine, method, lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        push_out(engine)
        ask(engine, A)
        push_out(engine)
    assert "switched off" in caplog.text and engine.cache.pool.num_referenced == 0


@pytest.mark.parametrize("method", ["read", "write"])
def test_a_tier_of_ones_own_that_raises_while_it_is_measured_is_switched_off(method, caplog):
    mine = HostTier(10**6)
    setattr(mine, method, lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        engine = tiered_engine(host_cache=mine, tier_policy="auto")
    assert "switched off" in caplog.text
    for prompt in (A, *OTHERS, A):
        ask(engine, prompt)


def test_a_tier_that_promises_and_never_delivers_is_computed_around():
    class Liar(HostTier):
        def read(self, key):
            return None

    class Wrong(HostTier):
        def read(self, key):
            return super().read(key)[:-1]

    for kind in (Liar, Wrong):
        engine = tiered_engine(host_cache=kind(10**6))
        ask(engine, A)
        push_out(engine)
        assert ask(engine, A).num_loaded_tokens == 0


# --- a copy under way ---


def test_a_block_about_to_be_loaded_is_not_pushed_out_by_the_eviction_that_makes_room_for_it():
    """The host has room for three blocks; room in the pool for the three it holds is made by evicting three others into it."""
    engine = tiered_engine(num_blocks=4, host=3)
    ask(engine, A, max_tokens=1)
    ask(engine, OTHERS[0], max_tokens=1)
    assert len(engine.cache.tiers.find(A, 0, 3)) == 3
    assert ask(engine, A, max_tokens=1).num_loaded_tokens == 12


def test_an_interrupt_while_a_load_is_pending_leaves_a_request_that_can_be_aborted():
    engine = tiered_engine()
    ask(engine, A)
    push_out(engine)
    tiers, pool = engine.cache.tiers, engine.cache.pool
    put = tiers.io.put

    def interrupted(blocks, contents):
        put(blocks[:1], contents[:1])
        raise KeyboardInterrupt

    tiers.io.put = interrupted
    name = engine.add_request(A, SamplingParams(max_tokens=3))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert pool.num_referenced == 0 and not tiers._pending
    pool.check()
    assert engine.abort(name).finish_reason == "abort"
    tiers.io.put = put
    assert ask(engine, A).num_loaded_tokens == 12


def test_an_abort_right_after_a_load_gives_everything_back():
    engine = tiered_engine(max_num_batched_tokens=1)
    ask(engine, A)
    push_out(engine)
    name = engine.add_request(A, SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    engine.abort(name)
    assert engine.cache.pool.num_referenced == 0
    assert ask(engine, A).num_cached_tokens == 12


def test_a_request_that_must_wait_for_room_has_changed_nothing():
    engine = tiered_engine(num_blocks=7, max_num_seqs=2)
    ask(engine, A)
    engine.cache.pool.uncache(engine.cache.prefix.evict(9, lambda b: True))
    first = engine.add_request(OTHERS[0], SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    second = engine.add_request(A, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    waiting = [r for r in engine.scheduler.waiting if r.request_id == second]
    assert waiting and waiting[0].blocks == [] and waiting[0].num_computed_tokens == 0 and engine.meter.tier_read_bytes == 0
    done = run_to_end(engine)
    assert done[second].token_ids == tuple(reference().greedy(A, 3)) and first in done and done[second].num_loaded_tokens == 12


# --- the decision ---


@pytest.mark.parametrize("answer", [0, 1, 2, 3])
def test_any_decision_gives_the_same_tokens(answer):
    offers = []

    def policy(offer):
        offers.append(offer)
        return min(answer, len(offer.tiers))

    engine = tiered_engine(tier_policy=policy)
    ask(engine, A)
    push_out(engine)
    offers.clear()
    assert ask(engine, A).num_loaded_tokens == answer * B
    assert offers[0].tiers == ("host",) * 3 and (offers[0].past, offers[0].rest) == (0, 1) and offers[0].block_bytes == BLOCK
    assert offers[0].load_seconds(3) > 0 and offers[0].prefill_seconds(0) > 0, "links and prefill were measured"


@pytest.mark.parametrize("answer", [-1, 4, True, None, 1.5, "all"])
def test_a_decision_that_makes_no_sense_is_an_error_that_changes_nothing(answer):
    engine = tiered_engine(tier_policy=lambda offer: answer)
    ask(engine, A)
    push_out(engine)
    name = engine.add_request(A, SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match="how many of the 3 offered blocks"):
        engine.step()
    assert engine.cache.pool.num_referenced == 0
    engine.abort(name)
    ask(engine, [5])


def test_the_automatic_decision_is_measured_and_equals_cold(tmp_path):
    engine = tiered_engine(host=2, disk=40, disk_folder=tmp_path, tier_policy="auto")
    assert set(engine.cache.tiers.links) == {"host", "disk"} and engine.cache.tiers.prefill is not None
    assert engine.meter.steps == 0 and engine.meter.tier_write_bytes == 0, "measuring is not work done for anybody"
    for prompt in (A, *OTHERS, A, *OTHERS):
        ask(engine, prompt)
    assert not any(f.suffix == ".part" for f in tmp_path.rglob("*"))


def test_always_reads_no_clock(monkeypatch):
    import minillm.cache.tier_setup as setup

    monkeypatch.setattr(setup.time, "perf_counter", lambda: 1 / 0)
    tiered_engine(tier_policy="always")


# --- options ---


@pytest.mark.parametrize(
    "options, message",
    [
        ({"host_cache": 10**6}, "host_cache keeps what a prefix cache evicts; with prefix_cache='none'"),
        ({"disk_cache": 10**6}, "disk_cache keeps what a prefix cache evicts"),
        ({"host_cache": 0, "prefix_cache": DictPrefixCache(B)}, "host_cache must be a whole number of at least 1, got 0"),
        ({"disk_cache": 1.5, "prefix_cache": DictPrefixCache(B)}, "disk_cache must be a whole number of at least 1, got 1.5"),
        ({"host_cache": True, "prefix_cache": DictPrefixCache(B)}, "host_cache must be a whole number of at least 1, got True"),
        ({"host_cache": object(), "prefix_cache": DictPrefixCache(B)}, "host_cache must be a number of bytes or a Tier"),
        ({"cache_write": "around"}, "cache_write must be one of 'back', 'through', got 'around'"),
        ({"tier_policy": "never"}, "tier_policy must be one of 'auto', 'always', got 'never'"),
        ({"tier_policy": 3}, "tier_policy must be 'auto', 'always' or a callable, got 3"),
        ({"disk_folder": "x", "prefix_cache": DictPrefixCache(B)}, "disk_folder is 'x', but disk_cache"),
        ({"disk_folder": 3, "disk_cache": 10, "prefix_cache": DictPrefixCache(B)}, "disk_folder must be a path, got 3"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize("name, block", [("host_cache", BLOCK), ("disk_cache", BLOCK + 72)])
def test_a_tier_too_small_for_one_block_is_refused(name, block):
    with pytest.raises(ValueError, match=f"{name} of {block - 1} bytes is less than one block of {B} tokens, {block} bytes"):
        tiny_engine(prefix_cache=DictPrefixCache(B), block_size=B, **{name: block - 1})


def test_a_host_tier_of_one_block_works():
    engine = tiered_engine(host=1)
    for prompt in (A, *OTHERS, A):
        ask(engine, prompt)


def test_a_store_that_cannot_return_what_it_held_is_refused():
    class Rounding(PlainKVStore):
        def write(self, layer, slots, k, v):
            super().write(layer, slots, k * 0.999, v)

    with pytest.raises(ValueError, match="Rounding does not keep what it gave out"):
        tiered_engine(kv_store=Rounding.allocate)


def test_a_learners_own_store_and_tier_serve():
    class Mine(PlainKVStore):
        pass

    mine = HostTier(10**6)
    engine = tiered_engine(kv_store=Mine.allocate, host_cache=mine)
    ask(engine, A)
    push_out(engine)
    assert ask(engine, A).num_loaded_tokens == 12 and len(mine) > 0


# --- any history ---

few = st.lists(st.integers(2, 3), min_size=1, max_size=18)
turns = st.lists(st.lists(st.tuples(few, st.integers(1, 8)), min_size=1, max_size=4), min_size=2, max_size=4)


@settings(max_examples=60)
@given(models, turns, st.integers(1, 5), st.integers(0, 3), st.integers(1, 40), st.integers(1, 5), st.integers(1, 9),
       st.sampled_from([None, 1, 3, 40]), st.sampled_from(["back", "through"]), st.integers(0, 9),
       st.sampled_from(KINDS), kv_dtypes)  # fmt: skip
def test_output_equals_cold_under_any_history(
    tmp_path_factory, model, turns, block_size, slack, budget, seqs, host, disk, write, stops, kind, kv_dtype
):
    needed = max(slots_needed(p, SamplingParams(max_tokens=n)) for turn in turns for p, n in turn)
    config = tiny_model(model[0]).config
    block = int(config.kv_bytes_per_token(8)) * block_size
    folder = tmp_path_factory.mktemp("kv")
    options = EngineConfig(
        prefix_cache=prefix(kind, block_size), block_size=block_size, num_blocks=-(-needed // block_size) + slack,
        max_num_batched_tokens=budget, max_num_seqs=seqs, host_cache=host * block, cache_write=write,
        attention_window=model[1], attention_sinks=model[2], kv_dtype=kv_dtype,
        disk_cache=disk and disk * (block + 72), disk_folder=folder if disk else None,
        tier_policy=lambda offer: len(offer.tiers) if stops else len(offer.tiers) // 2,
    )  # fmt: skip
    engine = Engine(tiny_model(model[0]), None, options)
    poison_freed_blocks(engine)
    for turn in turns:
        names = [engine.add_request(p, SamplingParams(max_tokens=n, ignore_eos=True)) for p, n in turn]
        done = run_to_end(engine)
        for name, (prompt, n) in zip(names, turn, strict=True):
            assert done[name].token_ids == tuple(reference(*model, kv_dtype).greedy(prompt, min(n, MAX_LEN - len(prompt))))
            assert done[name].num_loaded_tokens <= done[name].num_cached_tokens < len(prompt) + n
        pool = engine.cache.pool
        pool.check()
        assert pool.num_referenced == 0 and not engine.cache.tiers._pending and len(engine.cache.tiers.tiers) == 1 + bool(disk)
        if disk and stops % 3 == 1:  # somebody damages a file between two turns
            for file in sorted(folder.rglob("*.kv"))[:1]:
                file.write_bytes(file.read_bytes()[:-1] + b"?")
    event("something was loaded" if engine.meter.loaded_tokens else "nothing was loaded")


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_kv_comes_back_as_it_was_and_moves_its_own_bytes_only(kv_dtype, tmp_path):
    """A token's row in a head is 4 values of one byte and a float32; in float64 it is 32 bytes."""
    few = BLOCK * (4 + 4) // 32
    engine = tiered_engine(host=None, disk=40, kv_dtype=kv_dtype, disk_folder=tmp_path, cache_write="through")
    cold = [tuple(reference(kv_dtype=kv_dtype).greedy(p, 5)) for p in (A, *OTHERS[:2], A)]
    done = []
    for prompt in (A, *OTHERS[:2], A):
        name = engine.add_request(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
        done.append(run_to_end(engine)[name])
    assert [out.token_ids for out in done] == cold and done[-1].num_loaded_tokens == 12
    assert engine.meter.tier_read_bytes == 3 * few
    files = [file.stat().st_size for file in tmp_path.rglob("*.kv")]
    assert engine.meter.tier_write_bytes == len(files) * few and set(files) == {few + AROUND}


@pytest.mark.parametrize("overlap", [False, True])
def test_evicting_and_loading_while_a_step_is_in_flight_equals_cold(overlap):
    engine = tiered_engine(num_blocks=9, max_num_seqs=2, overlap=overlap)
    for _ in range(3):
        names = [engine.add_request(p, SamplingParams(max_tokens=6, ignore_eos=True)) for p in (A, *OTHERS)]
        done = run_to_end(engine)
        assert [done[n].token_ids for n in names] == [tuple(reference().greedy(p, 6)) for p in (A, *OTHERS)]
    assert engine.meter.loaded_tokens > 0 and engine.cache.pool.num_referenced == 0
