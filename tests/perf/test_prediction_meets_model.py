"""What roofline.py predicts from a config is what the model counts from its tensors."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.attention.torch_backend import TorchAttention
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.perf.roofline import decode_work, step_work

BASE = ModelConfig(
    vocab_size=31, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4, max_position=128
)
CONFIGS = {
    "plain": BASE,
    "tied": dataclasses.replace(BASE, tie_embeddings=True),
    "biased": dataclasses.replace(BASE, qkv_bias=True, family="qwen2"),
    "normed": dataclasses.replace(BASE, qk_norm=True, family="qwen3"),
    "windowed": dataclasses.replace(BASE, sliding_window=5),
}
MODELS = {name: Transformer.random(config, seed=0) for name, config in CONFIGS.items()}


def counted(model, rows):
    """The Work that the model declares for rows of (past, new) tokens, logits wanted for each row's last token."""
    batch = ForwardBatch.build([Row([0] * new, past, blocks=list(range(1, 40))) for past, new in rows], block_size=4)
    backend = TorchAttention(model.config.sliding_window)
    return model.work(batch, backend, backend.plan(batch, model.dtype))


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4))
def test_predicted_flops_and_bytes_of_a_step_are_those_of_the_tensors(name, rows):
    model = MODELS[name]
    size = model.dtype.itemsize
    dtype = str(model.dtype).removeprefix("torch.")
    work = counted(model, rows)
    guess = step_work(model.config, rows, logits=len(rows), dtype=dtype, bytes_per_weight=size, kv_bytes_per_element=size)
    assert work.flops == guess.flops
    assert work.kv_read_bytes == guess.kv_read_bytes
    assert work.kv_write_bytes == guess.kv_write_bytes
    # a config has no rotary table: the model reads a cos and a sin of head_dim for every token
    tokens = sum(new for _, new in rows)
    assert work.weight_bytes == guess.weight_bytes + 2 * tokens * model.config.head_dim * size


def test_a_decoding_step_is_a_step_of_single_tokens():
    model = MODELS["plain"]
    size = model.dtype.itemsize
    guess = decode_work(model.config, batch=3, context=8, dtype="float32", bytes_per_weight=size, kv_bytes_per_element=size)
    assert guess.total_flops == counted(model, [(7, 1)] * 3).total_flops
