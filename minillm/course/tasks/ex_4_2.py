"""Exercise 4.2: absorbed attention over latents, a scale of the wrong width, and what tensor parallelism makes of a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minillm import LLM, SamplingParams
from minillm.attention import latent
from minillm.attention.latent import LatentAttention
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_raises, expect_shape, unchanged
from minillm.course.labs.gqa_mla import per_rank
from minillm.course.task import NamedCheck, Task
from minillm.model.config import ModelConfig, RopeConfig
from minillm.model.mla import softmax_scale
from minillm.model.mla_config import MLAConfig
from minillm.model.presets import preset
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=40, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=3, num_kv_heads=3, head_dim=10, max_position=64,
    mla=MLAConfig(kv_rank=12, q_rank=None, nope_dim=6, rope_dim=4, v_dim=5),
)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 6, 1, 8, 0, 3])


def _inputs(rows: int, keys: int, heads: int = 3, rank: int = 12, nope: int = 6, rope: int = 4, v_dim: int = 5) -> Any:
    """q_nope, q_rope, cached rows and the up-projection, drawn at random."""
    shapes = (rows, heads, nope), (rows, heads, rope), (rows, keys, rank + rope), (heads, nope + v_dim, rank)
    return [torch.randn(shape) / (rank**0.5 if i == 3 else 1) for i, shape in enumerate(shapes)]


def _naive(*given: Any) -> Tensor:
    """Keys and values of every head, then attention, in 64 bits. given: what the core's contract names, in its order."""
    scale, visible = given[4:]
    q_nope, q_rope, rows, up = (t.double() for t in given[:4])
    nope, rank = q_nope.shape[-1], up.shape[-1]
    made = torch.einsum("rkc,hdc->rkhd", rows[..., :rank], up)
    scores = torch.einsum("rhd,rkhd->rhk", q_nope, made[..., :nope]) + torch.einsum("rhd,rkd->rhk", q_rope, rows[..., rank:])
    weights = (scores * scale).masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    result: Tensor = torch.einsum("rhk,rkhd->rhd", weights, made[..., nope:])
    return result.float()


# 4.2 core: absorbed attention -------------------------------------------------------------------------------------------------


def _all(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool)


def _core_shape(f: Any) -> None:
    expect_shape(f(*_inputs(2, 7), 0.3, _all(2, 7)), (2, 3, 5), torch.float32, "2 rows of 7 keys, 3 heads, values 5 wide")


def _core_by_hand(f: Any) -> None:
    one = torch.ones
    rows = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])  # latents (1, 0) and (0, 1), rotated keys 0
    up = torch.tensor([[[5.0, 5.0], [4.0, 8.0]]])  # both keys are 5, so that both weigh a half; values 4 and 8
    got = f(one(1, 1, 1), one(1, 1, 1), rows, up, 1.0, _all(1, 2))
    expect_equal(got, torch.tensor([[[6.0]]]), atol=1e-6, what="two keys of equal score, values 4 and 8")
    rows[0, 1, 2] = 200.0
    got = f(one(1, 1, 1), one(1, 1, 1), rows, up, 1.0, _all(1, 2))
    expect_equal(got, torch.tensor([[[8.0]]]), atol=1e-6, what="the second rotated key is 200: its value alone")


def _core_random(f: Any) -> None:
    for rows, keys, sizes in ((1, 5, {}), (3, 33, {"heads": 4, "rank": 20}), (2, 9, {"nope": 3, "rope": 8, "v_dim": 7})):
        given = _inputs(rows, keys, **sizes)
        scale = float(torch.rand(())) + 0.1
        want = _naive(*given, scale, _all(rows, keys))
        expect_equal(f(*given, scale, _all(rows, keys)), want, atol=1e-5, what=f"{rows} rows of {keys} keys, scale {scale:.2f}")


def _core_ragged(f: Any) -> None:
    given, visible = _inputs(3, 8), torch.arange(8) < torch.tensor([[8], [3], [1]])
    want = _naive(*given, 0.3, visible)
    expect_equal(f(*given, 0.3, visible), want, atol=1e-5, what="rows that see 8, 3 and 1 of 8 keys")
    visible = torch.tensor([[1, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1]]).bool()
    want = _naive(*given, 0.3, visible)
    expect_equal(f(*given, 0.3, visible), want, atol=1e-5, what="rows that see a first key and the last, every second, the last")


def _core_large(f: Any) -> None:
    given = _inputs(2, 6)
    given[0] = given[0] * 1e4
    want = _naive(*given, 0.3, _all(2, 6))
    expect_equal(f(*given, 0.3, _all(2, 6)), want, atol=1e-3, what="scores of many thousands")
    one = torch.ones
    rows = torch.tensor([[[1.0, 0.0, -1e5], [0.0, 1.0, -1e5], [1.0, 1.0, 1e5], [1.0, 1.0, 0.0]]])
    up = torch.tensor([[[5.0, 5.0], [4.0, 8.0]]])
    got = f(one(1, 1, 1), one(1, 1, 1), rows, up, 1.0, torch.arange(4)[None] < 2)
    expect_equal(got, torch.tensor([[[6.0]]]), atol=1e-3, what="two visible scores near -1e5, two hidden ones far above")


def _core_state(f: Any) -> None:
    given, visible = _inputs(2, 5), torch.arange(5) < torch.tensor([[5], [2]])
    with unchanged(q_nope=given[0], q_rope=given[1], rows=given[2], up=given[3], visible=visible):
        f(*given, 0.3, visible)


class Yours(LatentAttention):
    """The engine's backend with an answer in place of its absorbed form, wherever a row has one query."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f, self.calls = f, 0

    def latent(self, q_nope: Any, q_rope: Any, up: Any, scale: Any, shape: Any, layer: Any, store: Any, plan: Any) -> Tensor:
        out = q_nope.new_empty(len(q_nope), len(up), shape.v_dim)
        for group in plan:
            rows, at = latent.latent_rows(store, layer, group.slots), group.tokens
            if group.q_len > 1:
                out[at] = latent.naive(q_nope[at], q_rope[at], rows, up, scale, group)
                continue
            seen = torch.ones(rows.shape[:2], dtype=torch.bool) if group.mask is None else group.mask[:, 0, 0] == 0
            self.calls += 1
            out[at] = self.f(q_nope[at], q_rope[at], rows, up, scale, seen)
        return out


def _core_engine(f: Any) -> None:
    model, params = Transformer.random(TINY), SamplingParams(max_tokens=8, ignore_eos=True)
    sizes: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 24}
    expected = [o.token_ids for o in LLM(model, mla="naive", **sizes).generate([list(p) for p in PROMPTS], params)]
    backend = Yours(f)
    got = [o.token_ids for o in LLM(model, attention_backend=backend, **sizes).generate([list(p) for p in PROMPTS], params)]
    expect_equal(got, expected, what="tokens of three requests, decoded by your attention")
    if not backend.calls:
        raise Mismatch("your attention was never called")


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor) and not func.is_view:
                self.elements = max(self.elements, t.numel())
        return out


def _core_budget(f: Any) -> None:
    """64 keys of 8 heads: keys of all heads would be 64 · 8 · 16 elements, the scores are 64 · 8, the cached rows 64 · 36."""
    keys, heads, rank, nope, rope, v_dim = 64, 8, 32, 16, 4, 16
    given, largest = _inputs(1, keys, heads, rank, nope, rope, v_dim), Largest()
    with FlopCounterMode(display=False) as flops, largest:
        f(*given, 0.3, _all(1, keys))
    expect_at_most(largest.elements, 64 * 36, "elements of the largest tensor made: nothing larger than the cached rows")
    needed = 2 * heads * (nope * rank + keys * (rank + rope) + keys * rank + rank * v_dim)
    expect_at_most(flops.get_total_flops(), round(1.25 * needed), "FLOPs (keys of one head after the other are keys too)")


CORE = Task(
    "4.2 core",
    "Decode over latents without making a key",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: two keys by hand", _core_by_hand, hint=2),
        NamedCheck("random: against keys and values of all heads", _core_random, hint=1),
        NamedCheck("edges: rows that see fewer keys", _core_ragged, hint=3),
        NamedCheck("edges: large scores", _core_large, hint=3),
        NamedCheck("state: inputs unchanged", _core_state, hint=3),
        NamedCheck("engine: three requests decode by your attention", _core_engine, hint=1),
        NamedCheck("budget: no key of a head is ever made", _core_budget, hint=1),
    ),
    (
        "A head's key is W_k c. Its product with a query is q · (W_k c) = (W_kᵀ q) · c: transform the one query, not the many\n"
        "keys. The same for values: Σ p (W_v c) = W_v (Σ p c).",
        "up[:, :nope] is W_k [heads, nope, rank], up[:, nope:] is W_v [heads, v_dim, rank]. W_kᵀ q is [rows, heads, rank],\n"
        "scores are [rows, heads, keys], Σ p c is [rows, heads, rank].",
        'q = einsum("rhd,hdc->rhc", q_nope, W_k); scores = q @ latentsᵀ + q_rope @ keysᵀ, times scale; masked_fill where not\n'
        'visible (visible[:, None]), softmax over keys; out = weights @ latents; einsum("rhc,hdc->rhd", out, W_v).',
    ),
    references=(latent.absorbed, latent.naive, LatentAttention),
)


# 4.2 break: a scale -----------------------------------------------------------------------------------------------------------


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


# 4.2 stretch: ranks -----------------------------------------------------------------------------------------------------------


def _ranked(f: Any, config: ModelConfig, ranks: int, expected: float, what: str) -> None:
    expect_equal(float(f(config, ranks)), float(expected), what=f"{what} on {ranks} ranks: bytes per token on each")


def _grouped(kv_heads: int, heads: int = 32) -> ModelConfig:
    return replace(TINY, mla=None, head_dim=8, num_heads=heads, num_kv_heads=kv_heads)


def _stretch_shape(f: Any) -> None:
    got = f(_grouped(4), 2)
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        raise Mismatch(f"it gives a number of bytes, got {got!r:.60}")


def _stretch_by_hand(f: Any) -> None:
    _ranked(f, preset("qwen3-32b"), 1, 2**18, "Qwen3-32B")
    _ranked(f, preset("qwen3-32b"), 8, 2**15, "Qwen3-32B")
    _ranked(f, preset("deepseek-v3"), 1, 70_272, "DeepSeek-V3")
    _ranked(f, preset("deepseek-v3"), 8, 70_272, "DeepSeek-V3, whose latent belongs to all heads,")


def _stretch_random(f: Any) -> None:
    for kv_heads in (1, 2, 4, 8, 32):
        for ranks in (1, 2, 4, 8, 16, 32):
            config = _grouped(kv_heads)
            _ranked(f, config, ranks, per_rank(config, [ranks])[ranks], f"{kv_heads} KV heads of 32")


def _stretch_edges(f: Any) -> None:
    _ranked(f, _grouped(1), 32, _grouped(1).kv_bytes_per_token(), "one KV head")
    expect_raises(ValueError, lambda: f(_grouped(4), 3), what="4 KV heads on 3 ranks")
    expect_raises(ValueError, lambda: f(_grouped(4), 6), what="4 KV heads on 6 ranks")
    expect_raises(ValueError, lambda: f(_grouped(4), 0), what="no rank")
    expect_raises(ValueError, lambda: f(_grouped(4), 64), what="32 heads on 64 ranks")
    expect_raises(ValueError, lambda: f(_grouped(4, heads=12), 6), what="12 heads, of which 4 KV heads, on 6 ranks")
    expect_raises(ValueError, lambda: f(_grouped(6, heads=12), 4), what="12 heads, of which 6 KV heads, on 4 ranks")
    expect_raises(ValueError, lambda: f(TINY, 2), what="3 heads over latents on 2 ranks")
    expect_raises(ValueError, lambda: f(TINY, 0), what="latents on no rank")


def _stretch_engine(f: Any) -> None:
    for config in (TINY, _grouped(4)):
        store = LLM(Transformer.random(config), dtype="bfloat16", num_blocks=8).engine.store
        _ranked(f, config, 1, store.bytes_per_token, "what the engine's store keeps")


STRETCH = Task(
    "4.2 stretch",
    "What tensor parallelism makes of a cache",
    (
        NamedCheck("shape", _stretch_shape, hint=2),
        NamedCheck("exact: two published models", _stretch_by_hand, hint=1),
        NamedCheck("random: KV heads and ranks", _stretch_random, hint=2),
        NamedCheck("edges: one head, and what cannot be split", _stretch_edges, hint=3),
        NamedCheck("engine: one rank keeps what the engine keeps", _stretch_engine, hint=2),
    ),
    (
        "Heads are split over ranks. A KV head goes where its query heads go; with more ranks than KV heads each rank still\n"
        "needs one, so heads are copied. A latent is read by every head.",
        "16 bits: 2 · layers · heads on the rank · 2 · head_dim bytes; for latents 2 · layers · cache_width, on every rank.",
        "ValueError unless ranks >= 1, num_heads % ranks == 0, and kv_heads % ranks == 0 or ranks % kv_heads == 0. Then\n"
        "kept = max(1, kv_heads // ranks).",
    ),
    references=(per_rank, ModelConfig.kv_bytes_per_token),
)

TASKS = (CORE, BREAK, STRETCH)
