"""Mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): a router sends each token to a few of many MLPs.

Rows are sorted by expert, so that each expert multiplies all its rows at once and its weights are read once a step; an expert
without a row is not read at all.
"""

from __future__ import annotations

from typing import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.layers import MLP, PLAIN, Operators
from minillm.model.loads import ExpertLoads
from minillm.model.moe_config import MoEConfig
from minillm.perf.work import Work
from minillm.quant.linear import Linear, PlainLinear


def route(logits: Tensor, moe: MoEConfig, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [tokens, experts], bias [experts] → the chosen experts, int64 [tokens, top_k], and their weights.

    A row's choice depends on that row alone; of equal scores the expert of the lower number wins.
    """
    scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if moe.num_groups > 1:
        choice = _within_best_groups(choice, moe)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    weights = scores.gather(-1, experts)
    if moe.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * moe.scale


def _within_best_groups(choice: Tensor, moe: MoEConfig) -> Tensor:
    """-inf for experts outside a token's best groups. DeepSeek-V2 ranks a group by its best expert, V3 by its best two."""
    groups = choice.unflatten(-1, (moe.num_groups, -1))
    best = min(2 if moe.scoring == "sigmoid" else 1, groups.shape[-1])
    ranked = groups.topk(best, dim=-1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
    lost = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, ranked[:, moe.top_groups :], True)
    return groups.masked_fill(lost[..., None], float("-inf")).flatten(-2)


class Router(nn.Module):
    """Scores in at least 32 bits: rounding to 16 would make ties of experts that are none."""

    weight: Tensor  # [experts, hidden]
    bias: Tensor | None  # [experts]

    def __init__(self, moe: MoEConfig, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.moe, self.stored = moe, weight.dtype
        precise = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.register_buffer("weight", weight.to(precise), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.to(precise), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] → the experts [tokens, top_k] of each token, and their weights."""
        return route(F.linear(x.to(self.weight.dtype), self.weight), self.moe, self.bias)

    def work(self, tokens: int) -> Work:
        """The product, the scores, and the sort that picks the best."""
        experts, hidden = self.weight.shape
        element, scores = self.weight.dtype.itemsize, tokens * experts
        return Work(
            flops={str(self.weight.dtype).removeprefix("torch."): 2 * scores * hidden},
            weight_bytes=self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes),
            activation_bytes=(tokens * hidden + 5 * scores) * element + 2 * tokens * self.moe.top_k * (element + 8),
            launches=4,
        )


class SegmentLinear(nn.Module):
    """One linear layer for each expert, by whichever method: a product for each expert that has rows."""

    def __init__(self, linears: Sequence[Linear]):
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.out_features, self.in_features, self.dtype = linears[0].out_features, linears[0].in_features, linears[0].dtype

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [assignments, in], sorted by expert; counts [experts] of them → [assignments, out]."""
        segments = zip(self.linears, rows.split(counts.tolist()), strict=True)
        done = [linear(segment) for linear, segment in segments if len(segment)]
        return torch.cat(done) if done else rows.new_empty(0, self.out_features)

    def dense(self) -> Iterable[Tensor]:
        return (linear.dense()[0] for linear in self.linears)  # type: ignore[operator]

    def work(self, counts: Sequence[int]) -> Work:
        """Only what the touched experts read; their results are copied into one tensor."""
        moved = 2 * sum(counts) * self.out_features * self.dtype.itemsize
        total = Work(activation_bytes=moved, launches=int(any(counts)))
        for linear, rows in zip(self.linears, counts, strict=True):
            total += linear.work(rows)  # type: ignore[operator]
        return total


class GroupedLinear(nn.Module):
    """The experts' weights in one tensor [experts, out, in], multiplied in one launch that knows where each expert's rows end."""

    weight: Tensor

    def __init__(self, weights: Sequence[Tensor]):
        super().__init__()
        self.register_buffer("weight", torch.stack(list(weights)), persistent=False)
        _, self.out_features, self.in_features = self.weight.shape
        self.dtype = self.weight.dtype

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Whether torch has a fast grouped product for such weights: bfloat16 on a GPU, rows of whole 16 bytes."""
        aligned = all(n % 8 == 0 for n in weight.shape)
        return weight.is_cuda and weight.dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm")

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """As SegmentLinear's; the counts stay on the device."""
        return torch._grouped_mm(rows, self.weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))

    def dense(self) -> Iterable[Tensor]:
        return iter(self.weight)

    def work(self, counts: Sequence[int]) -> Work:
        rows, touched = sum(counts), sum(1 for n in counts if n)
        return Work(
            flops={str(self.dtype).removeprefix("torch."): 2 * rows * self.in_features * self.out_features},
            weight_bytes=touched * self.in_features * self.out_features * self.dtype.itemsize,
            activation_bytes=rows * (self.in_features + self.out_features) * self.dtype.itemsize,
            launches=2,
        )


def expert_linear(linears: Sequence[Linear]) -> SegmentLinear | GroupedLinear:
    """The experts' products: in one launch where torch can, else one after the other."""
    if type(linears[0].method) is PlainLinear and GroupedLinear.serves(linears[0].weight):
        return GroupedLinear([linear.weight for linear in linears])
    return SegmentLinear(linears)


class MoE(nn.Module):
    """sum over a token's experts of weight · expert(x), plus the shared experts' output. Takes the place of an MLP."""

    def __init__(self, moe: MoEConfig, router: Router, gate_up: Sequence[Linear], down: Sequence[Linear], shared: MLP | None):
        super().__init__()
        self.moe, self.router, self.shared = moe, router, shared
        self.gate_up, self.down = expert_linear(gate_up), expert_linear(down)

    def forward(self, x: Tensor, operators: Operators | None = None, loads: ExpertLoads | None = None, layer: int = 0) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]. loads: where the number of rows that each expert got is noted, under layer."""
        experts, weights = self.router(x)
        counts = F.one_hot(experts.flatten(), self.moe.num_experts).sum(0)
        if loads is not None:
            loads.note(layer, counts)
        order = experts.flatten().argsort(stable=True)
        rows = x[order // self.moe.top_k]
        out = self.down((operators or PLAIN).swiglu(self.gate_up(rows, counts)), counts)
        placed = torch.empty_like(out)
        placed[order] = out  # a permutation: every row is written
        mixed = torch.bmm(weights.to(x.dtype).unsqueeze(1), placed.view(len(x), self.moe.top_k, x.shape[1])).squeeze(1)
        return mixed if self.shared is None else mixed + self.shared(x, operators)

    def work(self, tokens: int, operators: Operators | None = None) -> Work:
        """What does not depend on the choice: routing, moving the rows to their experts and back, the shared experts."""
        chosen, hidden, element = tokens * self.moe.top_k, self.down.out_features, self.down.dtype.itemsize
        counting = Work(activation_bytes=8 * (2 * chosen * self.moe.num_experts + 6 * chosen), launches=4)
        moved = Work(activation_bytes=4 * chosen * hidden * element, launches=2)
        mix = Work(
            flops={str(self.down.dtype).removeprefix("torch."): 2 * chosen * hidden},
            activation_bytes=(chosen + tokens) * hidden * element, launches=1,
        )  # fmt: skip
        total = self.router.work(tokens) + counting + moved + mix
        if self.shared is not None:
            total += self.shared.work(tokens, operators) + (operators or PLAIN).add_work(tokens, hidden, element)
        return total

    def routed_work(self, counts: Sequence[int], operators: Operators | None = None) -> Work:
        """What the experts did for so many rows each: the weights of those without a row are not read."""
        activation = (operators or PLAIN).swiglu_work(sum(counts), self.moe.expert_size, self.down.dtype.itemsize)
        return self.gate_up.work(counts) + activation + self.down.work(counts)

    def linears(self) -> dict[str, Linear]:
        """The experts' linear layers by their names within the layer; those that are held in one tensor are not among them."""
        out: dict[str, Linear] = {}
        for name, experts in {"gate_up_proj": self.gate_up, "down_proj": self.down}.items():
            if isinstance(experts, SegmentLinear):
                out |= {f"mlp.experts.{e}.{name}": linear for e, linear in enumerate(experts.linears)}  # type: ignore[misc]
        if self.shared is not None:
            out |= {name.replace("mlp.", "mlp.shared_experts."): linear for name, linear in self.shared.linears().items()}
        return out

    def dense_weights(self) -> dict[str, Tensor]:
        """The tensors that it was built from, by their names within the layer."""
        out = {"mlp.gate.weight": self.router.weight.to(self.router.stored)}
        if self.router.bias is not None:
            out["mlp.gate.e_score_correction_bias"] = self.router.bias
        for e, (gate_up, down) in enumerate(zip(self.gate_up.dense(), self.down.dense(), strict=True)):
            out[f"mlp.experts.{e}.gate_up_proj.weight"], out[f"mlp.experts.{e}.down_proj.weight"] = gate_up, down
        if self.shared is not None:
            out |= {name.replace("mlp.", "mlp.shared_experts."): t for name, t in self.shared.dense_weights().items()}
        return out
