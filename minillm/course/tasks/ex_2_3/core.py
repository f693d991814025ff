"""2.3 core: write a mixture of experts without a loop over tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.model.config import ModelConfig
from minillm.model.experts import GroupedLinear
from minillm.model.layers import Operators
from minillm.model.loads import ExpertLoads
from minillm.model.moe import MoE, route
from minillm.model.moe_config import MoEConfig
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=64,
    moe=MoEConfig(6, 2, 24), name="a tiny random mixture",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 6, 1, 8, 0])


def _layer(experts: int = 5, hidden: int = 8, inner: int = 6, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, router, gate_up, down."""
    return (
        torch.randn(tokens, hidden), torch.randn(experts, hidden), torch.randn(experts, 2 * inner, hidden) / hidden**0.5,
        torch.randn(experts, hidden, inner) / inner**0.5,
    )  # fmt: skip


def _one_by_one(top_k: int, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        scores = (router @ row).softmax(0)
        best = scores.sort(descending=True, stable=True).indices[:top_k]
        for e in best.tolist():
            gate, up = (gate_up[e] @ row).chunk(2)
            out[t] += scores[e] / scores[best].sum() * (down[e] @ (F.silu(gate) * up))
    return out


def _core_compare(f: Any, what: str, top_k: int, *layer: Tensor) -> None:
    expect_equal(f(*layer, top_k), _one_by_one(top_k, *layer), atol=1e-4, what=what)


def _core_shape(f: Any) -> None:
    for dtype in (torch.float32, torch.float64):
        layer = [t.to(dtype) for t in _layer()]
        expect_shape(f(*layer, 2), [9, 8], dtype, "9 tokens of width 8")


def _core_by_hand(f: Any) -> None:
    """Two experts of width 1 that give 1 and 10 times silu(1); the router gives logits ln 3 and 0, so shares 3/4 and 1/4."""
    x, router = torch.ones(1, 1), torch.tensor([[3.0]]).log().repeat(2, 1) * torch.tensor([[1.0], [0.0]])
    gate_up, down = torch.ones(2, 2, 1), torch.tensor([[[1.0]], [[10.0]]])
    unit = F.silu(torch.tensor(1.0))
    expect_equal(f(x, router, gate_up, down, 2), (3.25 * unit).view(1, 1), atol=1e-5, what="shares 3/4 and 1/4 of 1 and 10")
    expect_equal(f(x, router, gate_up, down, 1), unit.view(1, 1), atol=1e-5, what="one expert has the whole weight")


def _core_random(f: Any) -> None:
    for top_k in (1, 2, 3):
        _core_compare(f, f"top {top_k} of 5 against a loop", top_k, *_layer())


def _core_empty_experts(f: Any) -> None:
    x, router, gate_up, down = _layer(experts=12, tokens=2)
    _core_compare(f, "2 tokens, most of 12 experts without a row", 2, x, router, gate_up, down)
    router[:] = 0
    router[7] = 5
    _core_compare(f, "all tokens of positive sum to expert 7", 1, x.abs(), router, gate_up, down)


def _core_all(f: Any) -> None:
    _core_compare(f, "top 5 of 5", 5, *_layer())


def _core_few(f: Any) -> None:
    _core_compare(f, "one token", 2, *_layer(tokens=1))
    expect_shape(f(*_layer(tokens=0), 2), [0, 8], torch.float32, "no tokens")


def _core_large(f: Any) -> None:
    x, router, gate_up, down = (t.double() for t in _layer())
    got = f(x, router * 1e4, gate_up, down, 2)
    if not bool(torch.isfinite(got).all()):
        raise Mismatch("logits near 1e4: the output holds numbers that are not finite")
    _core_compare(f, "logits near 1e4, those of one token far above another's", 2, x, router * 1e4, gate_up, down)


def _core_mates(f: Any) -> None:
    """Nobody is dropped, however many come: a token alone and among 300 copies of another, far above the mean of 32 experts."""
    x, router, gate_up, down = _layer(experts=32, tokens=2)
    router[0] = x.mean(0) * 9  # whom both choose
    crowd = torch.cat([x[:1].expand(300, -1), x[1:]])
    alone = f(x[1:], router, gate_up, down, 2)
    expect_equal(f(crowd, router, gate_up, down, 2)[-1:], alone, atol=1e-4, what="a token among 300 others, against alone")


def _core_state(f: Any) -> None:
    x, router, gate_up, down = _layer()
    with unchanged(x=x, router=router, gate_up=gate_up, down=down):
        f(x, router, gate_up, down, 2)


class _Yours(MoE):
    """The engine's layer, its forward the learner's."""

    answer: Any

    def forward(
        self, x: Tensor, operators: Operators | None = None, loads: ExpertLoads | None = None, layer: int = 0
    ) -> Tensor:
        stacked = [torch.stack(list(linears.dense())) for linears in (self.gate_up, self.down)]
        return self.answer(x, self.router.weight, *stacked, self.moe.top_k)


def _core_engine(f: Any) -> None:
    def tokens(model: Transformer) -> list[tuple[int, ...]]:
        llm = LLM(model, block_size=4, num_blocks=24, max_num_batched_tokens=7)
        return [o.token_ids for o in llm.generate(list(PROMPTS), SamplingParams(max_tokens=12, ignore_eos=True))]

    plain, yours = (Transformer.random(TINY, dtype=torch.float64) for _ in range(2))
    for layer in yours.layers:
        mlp: Any = layer.mlp
        mlp.__class__ = _Yours
        object.__setattr__(mlp, "answer", f)
    expect_equal(tokens(yours), tokens(plain), what="tokens of an engine whose experts are yours")


class _Products(TorchDispatchMode):
    """Counts matrix products, and keeps the size of the largest tensor that was made on the way."""

    count = 0
    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::_grouped_mm"):
            self.count += 1
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor):  # a view is as large as what it looks at: nothing is copied
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return made


def _mv_flops(matrix: Any, vector: Any, out_shape: Any = None, **_: Any) -> int:
    return int(2 * matrix[0] * matrix[1])


def _grouped_flops(rows: Any, weights: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * rows[0] * rows[1] * weights[-1])


UNCOUNTED = {torch.ops.aten.mv: _mv_flops, torch.ops.aten._grouped_mm: _grouped_flops}
"""Products that torch's counter does not know."""


def _core_budget(f: Any) -> None:
    hidden, inner, top_k = 16, 12, 2
    for tokens, experts in ((64, 8), (2, 24)):  # of the second, at least 20 experts have no row
        layer, what = _layer(experts, hidden, inner, tokens), f"{tokens} tokens and {experts} experts"
        products = _Products()
        with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as flops, products:
            f(*layer, top_k)
        needed, made = 2 * tokens * hidden * (experts + 3 * inner * top_k), flops.get_total_flops()
        expect_at_most(made, round(1.1 * needed), f"FLOPs for {what}: the router, and two experts for each token")
        if made < 0.99 * needed:
            raise Mismatch(f"{what}: your matrix products do {made} FLOPs of {needed}; the rest is multiplied number by number")
        expect_at_most(products.count, 2 * experts + 4, f"matrix products for {what}")
        if tokens > experts:  # else a mere view of the weights is larger than all rows
            rows = tokens * top_k * 2 * inner * layer[0].itemsize
            what = "bytes of your largest tensor (a copy of an expert's weights for each token?)"
            expect_at_most(products.largest, 4 * rows, what)


CORE = Task(
    "2.3 core",
    "Write a mixture of experts without a loop over tokens",
    (
        NamedCheck("shape", _core_shape, hint=2),
        NamedCheck("exact: two experts by hand", _core_by_hand, hint=1),
        NamedCheck("random: against a loop over tokens", _core_random, hint=2),
        NamedCheck("edges: experts without a row", _core_empty_experts, hint=3),
        NamedCheck("edges: every expert chosen", _core_all, hint=2),
        NamedCheck("edges: one token, and none", _core_few, hint=3),
        NamedCheck("edges: large logits", _core_large, hint=1),
        NamedCheck("edges: a crowded expert drops nobody", _core_mates, hint=1),
        NamedCheck("state: inputs unchanged", _core_state),
        NamedCheck("engine: the same tokens", _core_engine, hint=3),
        NamedCheck("budget: FLOPs and products", _core_budget, hint=1),
    ),
    (
        "There are tokens · top_k pairs of a token and an expert. Sort the pairs by expert: then each expert's rows lie side by\n"
        "side, and one product serves them all. An expert without a row is skipped.",
        "scores [tokens, experts] → chosen, weights [tokens, top_k] → order [tokens · top_k] → rows x[order // top_k];\n"
        "counts [experts] say where each expert's rows end. Then results[order] = …,\n"
        "and view(tokens, top_k, hidden).",
        "order = chosen.flatten().argsort(stable=True); counts = torch.bincount(chosen.flatten(), minlength=experts);\n"
        "for e, rows in enumerate(x[order // top_k].split(counts.tolist())): if len(rows): …",
    ),
    references=(MoE, GroupedLinear, route),
)
