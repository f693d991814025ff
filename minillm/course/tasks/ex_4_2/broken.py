"""4.2 break: find the fault in a softmax scale, which takes the wrong width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_equal
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_4_2.common import PROMPTS, TINY
from minillm.model.config import ModelConfig, RopeConfig
from minillm.model.mla import softmax_scale
from minillm.model.mla_config import MLAConfig
from minillm.model.presets import preset
from minillm.model.transformer import Transformer


def _config(**changes: Any) -> ModelConfig:
    shape = MLAConfig(**{"kv_rank": 12, "q_rank": None, "nope_dim": 6, "rope_dim": 4, "v_dim": 5} | changes)
    return replace(TINY, mla=shape, head_dim=shape.head_dim)


def _stretched(config: ModelConfig, factor: float, mscale_all_dim: float | None) -> ModelConfig:
    rope = RopeConfig(kind="yarn", factor=factor, original_max_position=16, mscale=1.0, mscale_all_dim=mscale_all_dim)
    return replace(config, rope=rope)


def _scaled(f: Any, config: ModelConfig, what: str) -> None:
    expect_equal(float(f(config)), softmax_scale(config), rtol=1e-9, what=what)


def _break_shape(f: Any) -> None:
    got = f(TINY)
    if not isinstance(got, float):
        raise Mismatch(f"it gives a float, got {got!r:.60}")


def _break_by_hand(f: Any) -> None:
    expect_equal(f(preset("deepseek-v2-lite")) / (0.1 * 0.707 * 3.6888794541139363 + 1) ** 2, 192**-0.5, rtol=1e-6,
                 what="DeepSeek-V2-Lite, its YaRN factor taken off: 1 / √(128 + 64)")  # fmt: skip


def _break_random(f: Any) -> None:
    for _ in range(20):
        nope, half, rank = (int(torch.randint(1, 20, ())) for _ in range(3))
        _scaled(f, _config(nope_dim=nope, rope_dim=2 * half, kv_rank=rank), f"nope {nope}, rope {2 * half}, latent {rank}")


def _break_edges(f: Any) -> None:
    _scaled(f, _config(kv_rank=6), "a latent as wide as the part of a key that is not rotated")
    _scaled(f, _stretched(TINY, 4.0, 0.8), "stretched 4 times, mscale_all_dim 0.8")
    _scaled(f, _stretched(TINY, 4.0, None), "stretched 4 times, no mscale_all_dim")
    _scaled(f, _stretched(TINY, 1.0, 0.8), "stretched once, which is not at all")
    unused = RopeConfig(factor=4.0, mscale_all_dim=0.8)
    _scaled(f, replace(TINY, rope=unused), "mscale_all_dim 0.8 beside positions that are not stretched")


def _break_engine(f: Any) -> None:
    model = Transformer.random(TINY)
    answers = []
    for scale in (f(TINY), softmax_scale(TINY)):
        for layer in model.layers:
            layer.attention.scale = scale  # type: ignore[union-attr]
        llm = LLM(model, dtype="float32", num_blocks=24)
        outs: Any = llm.generate([list(p) for p in PROMPTS], SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1))
        answers.append([[max(step.values()) for step in o.logprobs] for o in outs])
    expect_equal(answers[0], answers[1], atol=1e-5, what="log-probabilities of an engine with your scale")


BREAK = Task(
    "4.2 break",
    "Find the fault in a softmax scale",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: a published model", _break_by_hand, hint=1),
        NamedCheck("random: 20 shapes", _break_random, hint=2),
        NamedCheck("edges: stretched positions", _break_edges, hint=3),
        NamedCheck("engine: what a model says with your scale", _break_engine, hint=1),
    ),
    (
        "Absorbing changes how a score is computed, not what it is. The score is the product of a query and a key of one head.",
        "A query of a head is nope_dim + rope_dim wide, whatever the latent's width.",
        "(mla.nope_dim + mla.rope_dim) ** -0.5, times the square of 0.1 · mscale_all_dim · ln(factor) + 1 where a model is\n"
        "stretched by YaRN and says mscale_all_dim.",
    ),
    references=(softmax_scale,),
)
