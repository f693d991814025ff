"""Shapes of a model and options of an engine: frozen, validated, and the only place where an option is declared."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass, field
from typing import Any, Literal, Mapping

import torch

from minillm.model.mla_config import MLAConfig
from minillm.model.moe_config import MoEConfig
from minillm.quant.config import as_config

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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


def _check_positive(**values: int | float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
            raise ValueError(f"{name} must be a positive, finite number, got {value!r:.60}")


def _check_parts(name: str, thing: object, parts: tuple[str, ...], otherwise: str) -> None:
    lacks = [part for part in parts if not callable(getattr(thing, part, None))]
    if lacks:
        raise ValueError(f"{name} must be {otherwise}, got {thing!r:.60}, which lacks {', '.join(lacks)}")


def _check_count(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


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
        _check_choice("rope kind", self.kind, ("default", "linear", "dynamic", "llama3", "yarn"))
        _check_positive(theta=self.theta, factor=self.factor, beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        _check_count(original_max_position=self.original_max_position)
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
        _check_count(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, intermediate_size=self.intermediate_size,
            num_layers=self.num_layers, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim, max_position=self.max_position, sliding_window=self.sliding_window,
        )
        _check_positive(norm_eps=self.norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        self._check_mla()
        if self.rope_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        _check_choice("family", self.family, tuple(ARCHITECTURES.values()))
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


@dataclass(frozen=True)
class EngineConfig:
    """Every option of an engine. One switch per technique; the default is the plain, fast path of this machine.

    dtype: "auto" picks what is fast here (bfloat16 where the CPU or GPU multiplies it natively, float32 elsewhere).
    device: "auto" is "cuda" when torch sees a GPU, else "cpu".
    max_model_len: tokens of prompt plus output of one request; None is the model's own limit.
    max_num_seqs: requests that run at once. max_num_batched_tokens: the token budget of one step.
    block_size: tokens per KV block. num_blocks or kv_memory (bytes): size of the KV pool; both None picks a default.
    kv_cache: "paged"; "contiguous" gives each request one strip of neighbouring blocks; "none" recomputes everything.
    allocation: "paged" gives a request blocks as it grows (a contiguous cache reserves instead); "reserve" gives it a strip of
        max_model_len tokens when it is admitted; "exact" one of prompt + max_tokens - 1, an oracle where ignore_eos is set.
    attention_backend: "torch"; "triton" runs this project's kernels, on a GPU or in Triton's interpreter; "auto" chooses.
    attention_window: keys that a token sees, its own and those before it; None is the model's own window, if it has one.
    attention_sinks: keys at the beginning of a request that are seen beside the window.
    sparse_blocks: None reads every key; a number lets each token read the blocks around it and so many of those before, the best
        by an indexer's summaries. It is a lossy technique, and block_size, its grain, then changes answers.
    sparse_window: keys before and with a token's own whose blocks it always reads (64 unless said).
    sparse_indexer: "bounds" summarises a block by each dimension's extremes, "mean" by its mean key; or an Indexer of one's own.
    sparse_share_layers: layers in a row that read what the first of them chose.
    mla: how latent attention is computed, for models that have it: "absorbed" compares queries with the latents, "naive" makes
        keys and values of them, "auto" takes what needs fewer FLOPs.
    batching: "continuous"; "sequential" runs one request at a time; "static" admits a batch, pads it and waits for its slowest
        request; "static-sorted" does so with requests of similar max_tokens; or an object with ``grants`` (BatchingPolicy).
    prefill: "chunked" gives prompts what decoding requests leave of the budget; "first" lets everyone wait for them.
    queue_order: "arrival"; "cache" starts waiting requests with the longest cached prefix first, within bounds.
    kv_dtype: "auto" keeps KV in the model's dtype; "int8" or "fp8" in one byte per element and a scale per token and head.
    kv_store: "plain", or a callable (config, num_slots, dtype, device) that makes a KVStore: a class of one's own.
    attention_backend, prefix_cache: a name, or an object that implements the seam.
    quantization: None, "rtn", "awq" or "gptq" (4 bits, groups of 64, the head in 8 bits), "w8a8" or "fp8" (8 bits, activations
        too), a QuantConfig, or a LinearMethod.
    prefix_cache: "none"; "hash" (a table of blocks) or "radix" (a tree) keep what finished and running requests computed.
    host_cache, disk_cache: bytes of memory and of disk for KV that the pool has no room for, or a Tier object; they need a prefix
    cache. disk_folder: where the files lie; None is a folder of the user's cache. cache_write: "back" copies a block down when
    the pool evicts it, "through" as soon as it is computed. tier_policy: "auto" loads what is predicted to be faster loaded than
    computed, "always" whatever is found; or a callable (LoadOffer) → blocks to load.
    compile: compile the decode step ahead of time (a minute the first time, kept on disk).
    cuda_graphs: record decode steps of a few sizes and replay them (on a CPU: pad and call); True, or a Padding of one's own.
    overlap: plan the next step and sort out the last one while one runs; a text that stops costs one wasted token.
    speculative: None; "ngram" looks drafts up in the text so far; "draft" lets draft_model decode ahead; "mtp" uses a trained
        head; or an object with ``propose`` (Proposer). The answer stays the same, see minillm.spec.verify.
    draft_model: for "draft" a Transformer of the same vocabulary, the target in few bits ("int8", "int4" or a QuantConfig), or
        numbers of the target's layers that draft; for "mtp" the file of a head, None takes the one that comes with the model.
    num_draft_tokens: tokens of one draft at most. adaptive_drafts: choose their number by each request's own acceptance.
    accept_rule: None, or an AcceptRule of one's own (minillm.spec.verify) that judges drafts which were drawn.
    max_draft_batch: no drafts in a step of that many tokens or more: there they are no longer nearly free.
    """

    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | None = None
    kv_cache: Literal["paged", "contiguous", "none"] = "paged"
    allocation: Literal["paged", "reserve", "exact"] = "paged"
    attention_window: int | None = None
    attention_sinks: int = 0
    sparse_blocks: int | None = None
    sparse_window: int | None = None
    sparse_indexer: Any = "bounds"
    sparse_share_layers: int = 1
    mla: Literal["auto", "absorbed", "naive"] = "auto"
    batching: Any = "continuous"
    prefill: Literal["chunked", "first"] = "chunked"
    queue_order: Literal["arrival", "cache"] = "arrival"
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    kv_store: Any = "plain"
    attention_backend: Any = "auto"
    prefix_cache: Any = "none"
    quantization: Any = None
    host_cache: Any = None
    disk_cache: Any = None
    disk_folder: Any = None
    cache_write: Literal["back", "through"] = "back"
    tier_policy: Any = "auto"
    compile: bool = False
    cuda_graphs: Any = False
    overlap: bool = False
    speculative: Any = None
    draft_model: Any = None
    num_draft_tokens: int = 8
    adaptive_drafts: bool = True
    max_draft_batch: int = 16
    accept_rule: Any = None

    def __post_init__(self) -> None:
        for name in ("dtype", "device", "kv_cache", "kv_dtype", "allocation", "prefill", "queue_order", "mla"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r:.60}")
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("kv_cache", self.kv_cache, ("paged", "contiguous", "none"))
        _check_choice("kv_dtype", self.kv_dtype, ("auto", "int8", "fp8"))
        _check_choice("allocation", self.allocation, ("paged", "reserve", "exact"))
        _check_choice("prefill", self.prefill, ("chunked", "first"))
        _check_choice("queue_order", self.queue_order, ("arrival", "cache"))
        _check_choice("mla", self.mla, ("auto", "absorbed", "naive"))
        self._check_batching()
        sizes = "max_num_seqs max_num_batched_tokens block_size num_draft_tokens max_draft_batch sparse_share_layers"
        for name in sizes.split():
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be a whole number of at least 1, got None")
        _check_count(
            max_model_len=self.max_model_len, max_num_seqs=self.max_num_seqs, block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens, num_blocks=self.num_blocks, kv_memory=self.kv_memory,
            num_draft_tokens=self.num_draft_tokens, max_draft_batch=self.max_draft_batch,
            attention_window=self.attention_window, sparse_blocks=self.sparse_blocks, sparse_window=self.sparse_window,
            sparse_share_layers=self.sparse_share_layers,
        )
        sinks = self.attention_sinks
        if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
            raise ValueError(f"attention_sinks must be a whole number of at least 0, got {sinks!r}")
        if self.kv_cache == "none" and self.allocation != "paged":
            raise ValueError(f"kv_cache='none' keeps nothing from step to step that allocation={self.allocation!r} could reserve")
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ValueError(f"give num_blocks ({self.num_blocks}) or kv_memory ({self.kv_memory}), not both")
        if self.kv_store != "plain" and not callable(self.kv_store):
            raise ValueError(f"kv_store must be 'plain' or a callable that makes a KVStore, got {self.kv_store!r}")
        if self.kv_store != "plain" and self.kv_dtype != "auto":
            raise ValueError(f"kv_dtype={self.kv_dtype!r} is minillm's own store; beside another kv_store leave kv_dtype='auto'")
        if self.kv_store != "plain" and self.kv_cache == "none":
            raise ValueError("kv_cache='none' keeps no KV that a store of one's own could hold; leave kv_store='plain'")
        if isinstance(self.attention_backend, str):
            _check_choice("attention_backend", self.attention_backend, ("auto", "torch", "triton"))
        else:
            parts = ("plan", "forward", "work")
            _check_parts("attention_backend", self.attention_backend, parts, "a name or an AttentionBackend")
        if isinstance(self.prefix_cache, str):
            _check_choice("prefix_cache", self.prefix_cache, ("none", "hash", "radix"))
        else:
            _check_parts("prefix_cache", self.prefix_cache, ("match", "insert", "holds", "evict"), "a name or a PrefixCache")
        self._check_tiers()
        if self.prefix_cache != "none" and self.strips:
            raise ValueError(
                f"a prefix cache hands out single blocks, which a strip cannot hold (kv_cache={self.kv_cache!r}, "
                f"allocation={self.allocation!r}); leave both 'paged'"
            )
        if self.quantization is not None and as_config(self.quantization) is None and not hasattr(self.quantization, "for_layer"):
            parts = ("pack", "apply", "unpack")
            _check_parts("quantization", self.quantization, parts, "None, a name, a QuantConfig or a LinearMethod")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {self.seed!r}")
        for name in ("compile", "overlap", "adaptive_drafts"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.60}")
        if not isinstance(self.cuda_graphs, bool):
            _check_parts("cuda_graphs", self.cuda_graphs, ("bucket", "pad"), "True, False or a Padding")
        if self.overlap and self.kv_cache == "none":
            raise ValueError("kv_cache='none' takes a step's KV back before the next is planned; overlap=True plans it earlier")

        self._check_speculation()
        self._check_sparse()

    def _check_sparse(self) -> None:
        if isinstance(self.sparse_indexer, str):
            _check_choice("sparse_indexer", self.sparse_indexer, ("bounds", "mean"))
        else:
            _check_parts("sparse_indexer", self.sparse_indexer, ("summarise", "score"), "a name or an Indexer")
        if self.sparse_blocks is None:
            for name, neutral in (("sparse_window", None), ("sparse_indexer", "bounds"), ("sparse_share_layers", 1)):
                # an indexer of one's own may wait for sparse_blocks: a part of an engine that is not asked for
                if isinstance(getattr(self, name), (int, str)) and getattr(self, name) != neutral:
                    raise ValueError(f"{name}={getattr(self, name)!r:.60} is of sparse attention; set sparse_blocks")
            return
        hides, records = "hides keys from the indexer", "records the keys that a step reads"
        reasons = {"attention_window": hides, "attention_sinks": hides, "compile": records, "cuda_graphs": records}
        for name, why in reasons.items():
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r:.40} {why}; with sparse_blocks={self.sparse_blocks} leave it")
        if self.attention_backend not in ("auto", "torch"):
            raise ValueError(
                f"sparse_blocks={self.sparse_blocks} is served by minillm's own torch backend, not by attention_backend="
                f"{self.attention_backend!r:.60}; leave attention_backend='auto'"
            )

    def _check_speculation(self) -> None:
        if self.accept_rule is not None and not callable(self.accept_rule):
            raise ValueError(f"accept_rule must be None or a callable (p, q, token, u, w), got {self.accept_rule!r:.60}")
        if self.speculative is None:
            if self.draft_model is not None:
                raise ValueError("draft_model drafts for speculative='draft' or 'mtp'; speculative is None")
            return
        if isinstance(self.speculative, str):
            _check_choice("speculative", self.speculative, ("ngram", "draft", "mtp"))
        else:
            _check_parts("speculative", self.speculative, ("propose",), "None, a name or a Proposer")
        named = self.speculative if isinstance(self.speculative, str) else "object"
        if named == "draft" and self.draft_model is None:
            what = "a Transformer, 'int8', 'int4', or numbers of the target's layers"
            raise ValueError(f"speculative='draft' needs a draft_model: {what}")
        if named not in ("draft", "mtp") and self.draft_model is not None:
            raise ValueError(f"draft_model drafts for speculative='draft' or 'mtp', not for {named!r}")
        if self.kv_cache == "none":
            raise ValueError("kv_cache='none' computes a request anew in every step; there is no pass for drafts to save")
        if self.overlap:
            raise ValueError("overlap=True plans a step before it knows which drafts of the last one were accepted; choose one")
        if getattr(self.batching, "padded", False) or str(self.batching).startswith("static"):
            raise ValueError(f"batching={self.batching!r} pads every row to the longest, drafts included; use 'continuous'")

    def _check_batching(self) -> None:
        if isinstance(self.batching, str):
            _check_choice("batching", self.batching, ("sequential", "static", "static-sorted", "continuous"))
            if self.batching == "static-sorted" and self.queue_order != "arrival":
                raise ValueError(f"batching='static-sorted' orders by length; queue_order={self.queue_order!r} cannot hold")
            return
        _check_parts("batching", self.batching, ("grants",), "a name or a BatchingPolicy")
        _check_choice("order of the batching policy", getattr(self.batching, "order", "arrival"), ("arrival", "length", "cache"))
        if self.prefill != "chunked":
            raise ValueError(f"a batching policy of one's own decides who computes prompts; prefill={self.prefill!r} cannot hold")

    def _check_tiers(self) -> None:
        for name, size in (("host_cache", self.host_cache), ("disk_cache", self.disk_cache)):
            if size is None:
                continue
            if isinstance(size, (int, float, str)):
                _check_count(**{name: size})  # type: ignore[arg-type]
            else:
                _check_parts(name, size, ("has", "use", "read", "write"), "a number of bytes or a Tier")
            if isinstance(self.prefix_cache, str) and self.prefix_cache == "none":
                raise ValueError(f"{name} keeps what a prefix cache evicts; with prefix_cache='none' there is nothing to keep")
        if self.disk_folder is not None:
            if not isinstance(self.disk_folder, (str, os.PathLike)) or not str(self.disk_folder):
                raise ValueError(f"disk_folder must be a path, got {self.disk_folder!r:.60}")
            if self.disk_cache is None:
                raise ValueError(f"disk_folder is {str(self.disk_folder)!r}, but disk_cache, its size in bytes, is not given")
        if not isinstance(self.cache_write, str):
            raise ValueError(f"cache_write must be a string, got {self.cache_write!r:.60}")
        _check_choice("cache_write", self.cache_write, ("back", "through"))
        if isinstance(self.tier_policy, str):
            _check_choice("tier_policy", self.tier_policy, ("auto", "always"))
        elif not callable(self.tier_policy):
            raise ValueError(f"tier_policy must be 'auto', 'always' or a callable, got {self.tier_policy!r:.60}")

    @property
    def strips(self) -> Literal["reserve", "exact"] | None:
        """How long the strip of neighbouring blocks is that a request gets at its admission; None: single blocks, as it grows."""
        if self.allocation == "paged":
            return "reserve" if self.kv_cache == "contiguous" else None
        return self.allocation

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Build from keywords; an unknown one is a ValueError that suggests the nearest name."""
        known = {f.name for f in dataclasses.fields(cls)}
        for option in options:
            if option not in known:
                near = difflib.get_close_matches(option, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; options are {', '.join(sorted(known))}"
                raise ValueError(f"unknown option {option!r}{hint}")
        return cls(**options)
