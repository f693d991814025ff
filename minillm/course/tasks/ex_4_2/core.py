"""4.2 core: decode over latents without making a key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minillm import LLM, SamplingParams
from minillm.attention import latent
from minillm.attention.latent import LatentAttention
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_4_2.common import PROMPTS, TINY
from minillm.model.transformer import Transformer


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
