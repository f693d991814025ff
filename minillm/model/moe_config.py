"""The shape of a mixture of experts, and the names and shapes of its tensors in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.checking import check_positive, check_whole

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class MoEConfig:
    """Which experts there are, and how a token's are chosen.

    num_experts: routed experts of a layer; each token goes to top_k of them. expert_size: their inner width.
    shared_size: inner width of the experts that every token goes to, all of them together; 0 for none.
    scoring: "softmax" over all experts (Mixtral, Qwen3-MoE), or "sigmoid" of each (DeepSeek-V3, arXiv 2412.19437).
    renormalise: whether the weights of the chosen experts sum to one. scale: factor on these weights.
    selection_bias: whether a bias per expert is added to the scores that choose; it never enters a weight.
    num_groups, top_groups: experts are chosen within the best groups only, where there is more than one group.
    dense_layers: layers that have a plain MLP instead.
    """

    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int = 0
    scoring: str = "softmax"
    renormalise: bool = True
    selection_bias: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "expert_size", "num_groups", "top_groups"):
            check_whole(name, getattr(self, name))
        check_whole("shared_size", self.shared_size, at_least=0)
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring must be 'softmax' or 'sigmoid', got {self.scoring!r}")
        for name in ("renormalise", "selection_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.60}")
        layers = self.dense_layers
        if not isinstance(layers, tuple) or not all(type(i) is int for i in layers):
            raise ValueError(f"dense_layers must be a tuple of whole numbers, got {layers!r:.60}")
        check_positive("scale", self.scale)
        if self.top_groups > self.num_groups or self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts cannot be chosen from {self.top_groups} of {self.num_groups} groups")
        if self.top_k > self.candidates:
            raise ValueError(f"top_k {self.top_k} is above the {self.candidates} experts that a token can go to")

    @property
    def candidates(self) -> int:
        """Experts among which a token's are chosen."""
        return self.num_experts // self.num_groups * self.top_groups

    def distinct_experts(self, tokens: int) -> float:
        """Experts of one layer that a step of so many tokens touches, on average, if every expert is equally likely."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens)

    def expert_params(self, hidden_size: int) -> int:
        """Weights of one routed expert."""
        return 3 * hidden_size * self.expert_size

    def common_params(self, hidden_size: int) -> int:
        """Weights of one layer that every token meets: the router and the shared experts."""
        router = self.num_experts * hidden_size + (self.num_experts if self.selection_bias else 0)
        return router + 3 * hidden_size * self.shared_size


def moe_shapes(moe: MoEConfig, hidden_size: int, family: str) -> Shapes:
    """The tensors of one mixture in a checkpoint, by their names within the layer."""
    block, (gate, up, down) = checkpoint_names(family)
    shapes: Shapes = {f"{block}.gate.weight": (moe.num_experts, hidden_size)}
    if moe.selection_bias:
        shapes[f"{block}.gate.e_score_correction_bias"] = (moe.num_experts,)
    mlps = {f"{block}.experts.{e}": moe.expert_size for e in range(moe.num_experts)}
    if moe.shared_size:
        mlps[f"{block}.shared_experts"] = moe.shared_size
    for name, size in mlps.items():
        shapes[f"{name}.{gate}.weight"] = shapes[f"{name}.{up}.weight"] = (size, hidden_size)
        shapes[f"{name}.{down}.weight"] = (hidden_size, size)
    return shapes


def moe_parts(moe: MoEConfig, family: str) -> dict[str, tuple[str, ...]]:
    """{the model's name of a tensor: the tensors of a checkpoint that are stacked into it}, both within the layer."""
    block, (gate, up, down) = checkpoint_names(family)
    parts: dict[str, tuple[str, ...]] = {"mlp.gate.weight": (f"{block}.gate.weight",)}
    if moe.selection_bias:
        parts["mlp.gate.e_score_correction_bias"] = (f"{block}.gate.e_score_correction_bias",)
    for name in [f"experts.{e}" for e in range(moe.num_experts)] + ["shared_experts"] * bool(moe.shared_size):
        stored = f"{block}.{name}"
        parts[f"mlp.{name}.gate_up_proj.weight"] = (f"{stored}.{gate}.weight", f"{stored}.{up}.weight")
        parts[f"mlp.{name}.down_proj.weight"] = (f"{stored}.{down}.weight",)
    return parts


def checkpoint_names(family: str) -> tuple[str, tuple[str, str, str]]:
    """What a family calls the mixture, and the gate, up and down projection of an expert."""
    if family == "mixtral":
        return "block_sparse_moe", ("w1", "w3", "w2")
    return "mlp", ("gate_proj", "up_proj", "down_proj")
