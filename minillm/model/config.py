"""The shape of one model: frozen and validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

from minillm.checking import check_choice, check_count, check_positive
from minillm.model.mla_config import MLAConfig
from minillm.model.moe_config import MoEConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles (Su et al. 2021, arXiv 2104.09864) and how a model was stretched beyond its training length.

    kind: "default", "linear" (Chen et al. 2023), "dynamic" (NTK-aware), "llama3" or "yarn" (Peng et al. 2023, arXiv 2309.00071).
    The remaining fields are used by the kinds that name them, with the meaning that Hugging Face configs give them.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_choice("rope kind", self.kind, ("default", "linear", "dynamic", "llama3", "yarn"))
        for name in ("theta", "factor", "beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))
        check_count(original_max_position=self.original_max_position)
        if self.kind == "yarn" and self.theta <= 1:
            raise ValueError(f"theta must be above 1 for yarn, got {self.theta!r}")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder-only transformer. Sizes are counts of elements; nothing here depends on a dtype or device.

    moe: the mixture of experts that takes the MLP's place in all layers but its dense_layers; intermediate_size is theirs.
    mla: latent attention in every layer; num_kv_heads is then num_heads, and head_dim the width of a query.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    family: str = "llama"
    name: str = "model"

    def __post_init__(self) -> None:
        check_count(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, intermediate_size=self.intermediate_size,
            num_layers=self.num_layers, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim, max_position=self.max_position, sliding_window=self.sliding_window,
        )
        check_positive("norm_eps", self.norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        self._check_mla()
        if self.rope_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        check_choice("family", self.family, tuple(ARCHITECTURES.values()))
        if not isinstance(self.eos_token_ids, tuple) or not all(type(t) is int for t in self.eos_token_ids):
            raise ValueError(f"eos_token_ids must be a tuple of whole numbers, got {self.eos_token_ids!r:.60}")
        if not isinstance(self.rope, RopeConfig):
            raise ValueError(f"rope must be a RopeConfig, got {self.rope!r:.60}")
        self._check_moe()
        bad = [t for t in self.eos_token_ids if not 0 <= t < self.vocab_size]
        if bad:
            raise ValueError(f"eos_token_ids {bad} are outside the vocabulary of {self.vocab_size}")

    def _check_moe(self) -> None:
        if self.moe is None:
            return
        if not isinstance(self.moe, MoEConfig):
            raise ValueError(f"moe must be a MoEConfig, got {self.moe!r:.60}")
        if self.mlp_bias:
            raise ValueError("mlp_bias is not supported in a mixture of experts")
        absent = [i for i in self.moe.dense_layers if not 0 <= i < self.num_layers]
        if absent:
            raise ValueError(f"dense_layers {absent} are outside the {self.num_layers} layers")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers that have a mixture of experts."""
        return () if self.moe is None else tuple(i for i in range(self.num_layers) if i not in self.moe.dense_layers)

    def _check_mla(self) -> None:
        if self.mla is None:
            return
        if not isinstance(self.mla, MLAConfig):
            raise ValueError(f"mla must be an MLAConfig, got {self.mla!r:.60}")
        if self.head_dim != self.mla.head_dim or self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"with latent attention head_dim is nope_dim + rope_dim, {self.mla.head_dim}, and num_kv_heads is num_heads, "
                f"{self.num_heads}; got {self.head_dim} and {self.num_kv_heads}"
            )
        if self.qkv_bias or self.attention_out_bias or self.qk_norm:
            raise ValueError("latent attention has neither biases nor norms of queries and keys; leave qkv_bias and qk_norm off")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (1 = MHA, num_heads = MQA)."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rope_dim(self) -> int:
        """Width of what is rotated in a query and a key."""
        return self.mla.rope_dim if self.mla else self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements that one token leaves in the cache of one layer: K and V of the KV heads, or a latent and a rotated key."""
        return self.mla.cache_width if self.mla else 2 * self.kv_size

    @property
    def attention_params(self) -> int:
        """Weights of one layer's products around attention: fused QKV and output, or those of latent attention."""
        if self.mla:
            return self.mla.params(self.hidden_size, self.num_heads)
        return self.hidden_size * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden_size

    @property
    def layer_matmul_params(self) -> int:
        """Weights of one plain layer's matrix products: attention's, fused gate-up, down."""
        return self.attention_params + 3 * self.hidden_size * self.intermediate_size

    @property
    def layers_matmul_params(self) -> int:
        """Weights of all layers that one token is multiplied by; of the routed experts those that it goes to."""
        return self.num_layers * self.layer_matmul_params + self._sparse_excess(active=True)

    @property
    def matmul_params(self) -> int:
        """Weights that every decoding token is multiplied by: all layers and the output head, not the embedding lookup."""
        return self.layers_matmul_params + self.vocab_size * self.hidden_size

    def _sparse_excess(self, active: bool) -> int:
        """Weights that mixtures have above (below, if negative) the MLPs whose place they take. active: those of one token."""
        if self.moe is None:
            return 0
        experts = self.moe.top_k if active else self.moe.num_experts
        mixture = experts * self.moe.expert_params(self.hidden_size) + self.moe.common_params(self.hidden_size)
        if active and self.moe.selection_bias:
            mixture -= self.moe.num_experts  # added, not multiplied by
        return len(self.sparse_layers) * (mixture - 3 * self.hidden_size * self.intermediate_size)

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: all but the routed experts that it does not go to."""
        if self.moe is None:
            return self.num_params
        passed_by = self.moe.num_experts - self.moe.top_k
        return self.num_params - len(self.sparse_layers) * passed_by * self.moe.expert_params(self.hidden_size)

    @property
    def num_params(self) -> int:
        """All parameters, a tied embedding counted once."""
        per_layer = self.layer_matmul_params + 2 * self.hidden_size
        if self.qkv_bias:
            per_layer += self.q_size + 2 * self.kv_size
        if self.attention_out_bias:
            per_layer += self.hidden_size
        if self.mlp_bias:
            per_layer += 2 * self.intermediate_size + self.hidden_size
        if self.qk_norm:
            per_layer += 2 * self.head_dim
        if self.mla:
            per_layer += (self.mla.q_rank or 0) + self.mla.kv_rank
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * per_layer + self._sparse_excess(active=False) + embeddings + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_element: float = 2) -> float:
        """Bytes that one token leaves in the caches of all layers (16-bit unless said)."""
        return self.num_layers * self.kv_width * bytes_per_element

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], name: str = "model") -> "ModelConfig":
        """Read a Hugging Face config.json; see ``minillm.model.hf_config.read_config``."""
        from minillm.model.hf_config import read_config

        return read_config(raw, name)
