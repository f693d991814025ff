"""A decode step at 4K context with latent attention absorbed, against making every key and value of all heads anew.

Two layers with the attention of DeepSeek-V2-Lite and a small dense MLP, random weights in float32, one request.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch

from minillm.attention.latent import LatentAttention
from minillm.bench.study import Bar
from minillm.cache.choice import plain_store
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.config import ModelConfig
from minillm.model.presets import preset
from minillm.model.transformer import Transformer

TITLE = "Latent attention at 4K context: absorbed against naive up-projection"
ROUNDS = 5
CONTEXT = 4096
BLOCK = 16
FORMS = ("absorbed", "naive")
REPEATS = {"absorbed": 10, "naive": 2}
BARS = (
    Bar("step, naive / absorbed", lambda r: r["naive_s"] / r["absorbed_s"], at_least=5.0),
    Bar("largest difference of logits, of the largest logit", lambda r: r["difference"], at_most=1e-5),
    Bar("FLOPs of attention, naive / absorbed", lambda r: r["naive_flops"] / r["absorbed_flops"]),
    Bar("bytes per token, MHA of these heads / latent", lambda r: r["mha_bytes"] / r["latent_bytes"]),
)


@dataclass(frozen=True)
class State:
    model: Transformer
    store: Any
    batch: ForwardBatch


def shape() -> ModelConfig:
    lite = preset("deepseek-v2-lite")
    small: dict[str, Any] = {"vocab_size": 1024, "intermediate_size": 1024, "num_layers": 2, "max_position": CONTEXT}
    return dataclasses.replace(lite, **small, moe=None, eos_token_ids=(), bos_token_id=None)


def prepare() -> State:
    return state_of(shape(), CONTEXT)


def state_of(config: ModelConfig, context: int) -> State:
    """A cache full of noise, as long as the context; the step computes the last token."""
    model = Transformer.random(config)
    store: Any = plain_store(config, (-(-context // BLOCK) + 1) * BLOCK, model.dtype)
    for rows in store.layers:
        rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)))
    batch = ForwardBatch.build([Row([1], context - 1, range(1, -(-context // BLOCK) + 1))], BLOCK)
    return State(model, store, batch)


@torch.inference_mode()
def measure(state: State, turn: int) -> dict[str, float]:
    model, config = state.model, state.model.config
    assert config.mla is not None
    heads = config.num_heads
    found: dict[str, float] = {
        "latent_bytes": config.kv_bytes_per_token(4),
        "mha_bytes": config.num_layers * heads * (config.mla.head_dim + config.mla.v_dim) * 4,
    }
    logits = {}
    for form in FORMS[turn % 2 :] + FORMS[: turn % 2]:
        backend = LatentAttention(form=form)
        plan = backend.plan(state.batch, model.dtype)
        logits[form] = model(state.batch, state.store, backend, plan)  # also warms up
        times = []
        for _ in range(REPEATS[form]):
            before = time.perf_counter()
            model(state.batch, state.store, backend, plan)
            times.append(time.perf_counter() - before)
        found[f"{form}_s"] = sorted(times)[len(times) // 2]
        found[f"{form}_flops"] = backend.work(state.batch, plan, config, model.dtype).total_flops
    found["difference"] = float((logits["absorbed"] - logits["naive"]).abs().max() / logits["naive"].abs().max())
    return found
