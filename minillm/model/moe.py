"""Mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): a router sends each token to a few of many MLPs."""

from __future__ import annotations

from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.experts import Places, expert_linears
from minillm.model.layers import MLP, PLAIN, Operators
from minillm.model.loads import ExpertLoads
from minillm.model.moe_config import MoEConfig
from minillm.perf.work import Work
from minillm.quant.linear import Linear


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


class MoE(nn.Module):
    """sum over a token's experts of weight · expert(x), plus the shared experts' output. Takes the place of an MLP."""

    def __init__(self, moe: MoEConfig, router: Router, gate_up: Sequence[Linear], down: Sequence[Linear], shared: MLP | None):
        super().__init__()
        self.moe, self.router, self.shared = moe, router, shared
        self.gate_up, self.down = expert_linears(gate_up, down)

    def forward(self, x: Tensor, operators: Operators | None = None, loads: ExpertLoads | None = None, layer: int = 0) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]. loads: where the number of rows that each expert got is noted, under layer."""
        experts, weights = self.router(x)
        flat = experts.flatten()
        counts = flat.new_zeros(self.moe.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        if loads is not None:
            loads.note(layer, counts)
        places = Places.find(experts, counts, None if self.gate_up.ragged else self.gate_up.runs(counts.tolist()))
        inner = (operators or PLAIN).swiglu(self.gate_up(x.index_select(0, places.tokens), places))
        out = self.down(inner, places)
        # the rows of each token, weighted and summed as they are read
        mixed = F.embedding_bag(places.slots, out, mode="sum", per_sample_weights=weights.to(x.dtype))
        return mixed if self.shared is None else mixed + self.shared(x, operators)

    def work(self, tokens: int, operators: Operators | None = None) -> Work:
        """What does not depend on the choice: routing, sorting, the weighted sum, the shared experts."""
        chosen, hidden, element = tokens * self.moe.top_k, self.down.out_features, self.down.dtype.itemsize
        mix = Work(activation_bytes=(chosen + tokens) * hidden * element, launches=1)
        total = self.router.work(tokens) + Places.work(chosen) + mix
        if self.shared is not None:
            total += self.shared.work(tokens, operators) + (operators or PLAIN).add_work(tokens, hidden, element)
        return total

    def routed_work(self, counts: Sequence[int], operators: Operators | None = None) -> Work:
        """What the experts did for so many rows each: the weights of those without a row are not read."""
        runs, element = self.gate_up.runs(counts), self.down.dtype.itemsize
        rows = runs[-1].stop if runs else 0
        moved = Work(activation_bytes=2 * rows * self.down.out_features * element, launches=1)
        if rows > sum(counts):
            moved += Work(launches=6)  # where the padding shifts the rows to
        activation = (operators or PLAIN).swiglu_work(rows, self.moe.expert_size, element)
        return moved + self.gate_up.work(runs) + activation + self.down.work(runs)

    def linears(self) -> dict[str, Linear]:
        """The experts' linear layers by their names within the layer."""
        out: dict[str, Linear] = {}
        for name, experts in {"gate_up_proj": self.gate_up, "down_proj": self.down}.items():
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
