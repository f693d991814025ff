"""The seam for a KV store of one's own: what is refused, and that the engine runs on what the callable makes."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.cache.kv_store import PlainKVStore
from minillm.config import EngineConfig
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=50, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=64
)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def build(**options) -> LLM:
    return LLM(Transformer.random(CONFIG), dtype="float32", block_size=4, num_blocks=12, **options)


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_the_engine_runs_on_the_store_it_was_given():
    made = []

    def store(config, num_slots, dtype, device):
        made.append((config, num_slots, dtype, device))
        return PlainKVStore.allocate(config, num_slots, dtype, device)

    llm = build(kv_store=store)
    assert made == [(CONFIG, 13 * 4, torch.float32, torch.device("cpu"))]
    assert tokens(llm) == tokens(build()) == tokens(build(kv_cache="none"))


@pytest.mark.parametrize("junk", ["paged", None, 3, ["plain"]])
def test_what_cannot_be_called_is_refused(junk):
    with pytest.raises(ValueError, match="kv_store must be 'plain' or a callable"):
        EngineConfig(kv_store=junk)


def test_what_is_no_store_is_refused():
    with pytest.raises(ValueError, match="Half, is no KVStore: it lacks read, bytes_per_token"):
        build(kv_store=type("Half", (), {"__init__": lambda self, *_: None, "write": None, "num_slots": 1}))
    with pytest.raises(ValueError, match="asked for 52 slots and made 48"):
        build(kv_store=lambda config, num_slots, dtype, device: PlainKVStore.allocate(config, num_slots - 4, dtype, device))


def test_a_store_of_ones_own_excludes_recomputation_and_compilation():
    with pytest.raises(ValueError, match="kv_cache='none' keeps no KV"):
        EngineConfig(kv_store=PlainKVStore.allocate, kv_cache="none")

    class Mine(PlainKVStore):
        pass

    with pytest.raises(ValueError, match="leave attention_backend='auto' and kv_store='plain'"):
        build(kv_store=Mine.allocate, compile=True)
