"""Exercise 2.3: a mixture of experts with grouped rows, a bias in the wrong place, and a bias that spreads the load."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.labs.experts import balance, imbalance, skewed_logits
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


# 2.3 core: the layer ----------------------------------------------------------------------------------------------------------


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


# 2.3 break: the bias ----------------------------------------------------------------------------------------------------------


def _reference_route(logits: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return route(logits, MoEConfig(logits.shape[1], top_k, 1, scoring="sigmoid", selection_bias=True), bias)


def _routed(f: Any, logits: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    got = f(logits, bias, top_k)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Mismatch(f"route gives (experts, weights), got {got!r:.60}")
    return got


def _break_compare(f: Any, logits: Tensor, bias: Tensor, top_k: int, what: str) -> None:
    right, shares = _reference_route(logits, bias, top_k)
    experts, weights = _routed(f, logits.clone(), bias.clone(), top_k)
    expect_equal(experts.sort(-1).values, right.sort(-1).values, what=f"{what}: the chosen experts, in order of number")
    by_number, expected = (w.gather(1, e.argsort(1)) for w, e in ((weights, experts), (shares, right)))
    expect_equal(by_number, expected, atol=1e-5, what=f"{what}: their weights")


def _break_shape(f: Any) -> None:
    experts, weights = _routed(f, torch.randn(7, 6), torch.zeros(6), 2)
    expect_shape(experts, [7, 2], torch.int64, "experts")
    expect_shape(weights, [7, 2], torch.float32, "weights")


def _break_no_bias(f: Any) -> None:
    _break_compare(f, torch.tensor([[0.0, 2.0, 1.0]]), torch.zeros(3), 2, "no bias")


def _break_chooses(f: Any) -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 9.0])
    experts, _ = _routed(f, logits, bias, 2)
    expect_equal(sorted(experts[0].tolist()), [0, 3], what="a bias of 9 on the last of four experts: who is chosen")


def _break_equal_bias(f: Any) -> None:
    logits = torch.randn(5, 6)
    for size in (0.5, -0.5):
        _break_compare(f, logits, torch.full((6,), size), 3, f"a bias of {size} on every expert, which should change nothing")


def _break_random(f: Any) -> None:
    for top_k in (1, 2, 4):
        _break_compare(f, torch.randn(20, 8), torch.randn(8) * 0.3, top_k, f"random logits and bias, top {top_k}")


def _break_negative(f: Any) -> None:
    experts, weights = _routed(f, torch.randn(4, 3), torch.full((3,), -2.0), 2)
    if not bool(((weights > 0) & (weights < 1)).all()):
        raise Mismatch(f"a bias of -2 everywhere: weights are shares between 0 and 1, got {weights[0].tolist()}")


def _break_state(f: Any) -> None:
    logits, bias = torch.randn(4, 5), torch.randn(5)
    with unchanged(logits=logits, bias=bias):
        f(logits, bias, 2)


def _break_one_row(f: Any) -> None:
    logits, bias = torch.randn(30, 6), torch.randn(6)
    _, weights = _routed(f, logits.clone(), bias, 2)
    alone = _routed(f, logits[11:12].clone(), bias, 2)[1]
    expect_equal(alone, weights[11:12], atol=1e-6, what="token 11 alone, against among 30")


BREAK = Task(
    "2.3 break",
    "Find the fault in a router",
    (
        NamedCheck("shape", _break_shape),
        NamedCheck("exact: without a bias", _break_no_bias),
        NamedCheck("exact: the bias chooses", _break_chooses, hint=1),
        NamedCheck("exact: an equal bias changes nothing", _break_equal_bias, hint=2),
        NamedCheck("random: experts and weights", _break_random, hint=3),
        NamedCheck("edges: a negative bias", _break_negative, hint=3),
        NamedCheck("edges: a token alone", _break_one_row, hint=2),
        NamedCheck("state: inputs unchanged", _break_state),
    ),
    (
        "The bias is there to spread the load. What should a token's output be if the same experts are chosen with another bias?",
        "choice [tokens, experts] decides; scores [tokens, experts] weigh. Which of the two is renormalised?",
        "weights = scores.gather(1, experts): the scores before the bias.",
    ),
    references=(route,),
)


# 2.3 stretch: the bias that spreads the load ----------------------------------------------------------------------------------

SHAPE = MoEConfig(16, 2, 1, scoring="sigmoid", selection_bias=True)


def _new(f: Any, bias: Tensor, chosen: list[list[int]], rate: float) -> Tensor:
    new = f(bias, torch.tensor(chosen, dtype=torch.int64).view(len(chosen), -1), rate)
    expect_shape(new, list(bias.shape), torch.float32, "the new bias")
    return new


def _stretch_shape(f: Any) -> None:
    _new(f, torch.zeros(4), [[0, 1], [2, 3]], 0.1)


def _stretch_by_hand(f: Any) -> None:
    """Loads 3, 2, 1, 2 of a mean of 2."""
    expected = torch.tensor([-0.1, 0.5, 0.1, 0.0])
    got = _new(f, torch.tensor([0.0, 0.5, 0.0, 0.0]), [[0, 1], [0, 1], [0, 3], [2, 3]], 0.1)
    expect_equal(got, expected, atol=1e-6, what="loads 3, 2, 1, 2")


def _stretch_random(f: Any) -> None:
    for tokens in (40, 41, 43, 5, 40):  # the mean need not be a whole number
        bias, chosen = torch.randn(12), torch.randint(0, 12, (tokens, 3))
        expected = bias + 0.05 * torch.sign(tokens * 3 / 12 - torch.bincount(chosen.flatten(), minlength=12))
        expect_equal(f(bias, chosen, 0.05), expected, atol=1e-6, what="random choices")


def _stretch_unchosen(f: Any) -> None:
    got = _new(f, torch.zeros(6), [[0, 1], [0, 1]], 0.5)
    expect_equal(got, torch.tensor([-0.5, -0.5, 0.5, 0.5, 0.5, 0.5]), atol=1e-6, what="four of six experts never chosen")


def _stretch_no_tokens(f: Any) -> None:
    bias = torch.randn(4)
    expect_equal(f(bias, torch.zeros(0, 2, dtype=torch.int64), 0.1), bias, what="a step without tokens")


def _stretch_state(f: Any) -> None:
    bias, chosen = torch.randn(4), torch.tensor([[0, 1], [0, 2]])
    with unchanged(bias=bias, chosen=chosen):
        f(bias, chosen, 0.1)


def _stretch_router(f: Any) -> None:
    """Sixty steps of a router that likes some experts better."""
    bias, seen = torch.zeros(SHAPE.num_experts), []
    for step in range(60):
        experts, _ = route(skewed_logits(128, SHAPE.num_experts, 1.0, step), SHAPE, bias)
        seen.append(imbalance(torch.bincount(experts.flatten(), minlength=SHAPE.num_experts).tolist()))
        bias = f(bias, experts, 0.02)
    ours = balance(SHAPE, 1.0, 60, 0.02, tokens=128)[0]
    last, right = sum(seen[-10:]) / 10, sum(ours[-10:]) / 10
    expect_at_most(round(last, 2), round(1.05 * right, 2), f"busiest expert by the mean after 60 steps, from {seen[0]:.1f}")


STRETCH = Task(
    "2.3 stretch",
    "Spread the load with a bias",
    (
        NamedCheck("shape", _stretch_shape),
        NamedCheck("exact: four experts by hand", _stretch_by_hand, hint=1),
        NamedCheck("random: against the rule", _stretch_random, hint=2),
        NamedCheck("edges: experts that nobody chose", _stretch_unchosen, hint=3),
        NamedCheck("edges: no tokens", _stretch_no_tokens, hint=2),
        NamedCheck("state: inputs unchanged", _stretch_state, hint=3),
        NamedCheck("engine: a router that likes some experts better", _stretch_router, hint=1),
    ),
    (
        "Who has more than the mean becomes a little less attractive, who has less a little more. By how much more or less\n"
        "does not matter.",
        "chosen [tokens, top_k] → counts [experts], also of those that nobody chose; their mean is tokens · top_k / experts.",
        "counts = torch.bincount(chosen.flatten(), minlength=len(bias));\n"
        "bias + rate * torch.sign(counts.float().mean() - counts)",
    ),
    references=(balance,),
)  # fmt: skip

TASKS = (CORE, BREAK, STRETCH)
