"""Shapes of well-known public models, for planning and for lessons: no weights here, and no network needed."""

from __future__ import annotations

from typing import Any

from minillm.model.config import ModelConfig

_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32_000, "bos_token_id": 1, "eos_token_id": 2}

_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_DEEPSEEK: dict[str, Any] = {
    "max_position_embeddings": 163_840, "rms_norm_eps": 1e-6, "rope_theta": 10_000, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_DEEPSEEK_V2: dict[str, Any] = {
    **_DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102_400, "bos_token_id": 100_000,
    "eos_token_id": 100_001, "first_k_dense_replace": 1, "n_shared_experts": 2, "num_experts_per_tok": 6, "norm_topk_prob": False,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip

# In the words of each model's own config.json, so that a preset equals what the hub gives.
_RAW: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_LLAMA, "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0, "tie_word_embeddings": True,
    },
    "llama-7b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    },
    "llama-2-70b": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    },
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "bos_token_id": 151_643, "eos_token_id": 151_645,
        "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32_000,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151_936,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek-v2-lite": {
        **_DEEPSEEK_V2, "hidden_size": 2048, "intermediate_size": 10_944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "n_routed_experts": 64, "routed_scaling_factor": 1.0, "topk_method": "greedy",
        "q_lora_rank": None,
    },
    "deepseek-v2": {
        **_DEEPSEEK_V2, "hidden_size": 5120, "intermediate_size": 12_288, "moe_intermediate_size": 1536, "num_hidden_layers": 60,
        "num_attention_heads": 128, "n_routed_experts": 160, "routed_scaling_factor": 16.0,
        "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
    },
    "deepseek-v3": {
        **_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129_280, "bos_token_id": 0, "eos_token_id": 1,
        "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
        "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}

SOURCES: dict[str, str] = {
    "smollm2-135m": "config.json of HuggingFaceTB/SmolLM2-135M-Instruct",
    "llama-7b": "config.json of huggyllama/llama-7b; Touvron et al. 2023, arXiv 2302.13971",
    "llama-2-70b": "config.json of meta-llama/Llama-2-70b-hf; Touvron et al. 2023, arXiv 2307.09288",
    "qwen3-32b": "config.json of Qwen/Qwen3-32B; Yang et al. 2025, arXiv 2505.09388",
    "mixtral-8x7b": "config.json of mistralai/Mixtral-8x7B-v0.1; Jiang et al. 2024, arXiv 2401.04088",
    "qwen3-30b-a3b": "config.json of Qwen/Qwen3-30B-A3B; Yang et al. 2025, arXiv 2505.09388",
    "deepseek-v2-lite": "config.json of deepseek-ai/DeepSeek-V2-Lite; DeepSeek-AI 2024, arXiv 2405.04434",
    "deepseek-v2": "config.json of deepseek-ai/DeepSeek-V2; DeepSeek-AI 2024, arXiv 2405.04434",
    "deepseek-v3": "config.json of deepseek-ai/DeepSeek-V3, its MTP module left out; DeepSeek-AI 2024, arXiv 2412.19437",
}

PRESETS: dict[str, ModelConfig] = {name: ModelConfig.from_hf(raw, name) for name, raw in _RAW.items()}


def preset(name: str) -> ModelConfig:
    """The shape of a known model; an unknown name raises ValueError listing the known ones."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}") from None
