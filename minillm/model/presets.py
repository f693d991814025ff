"""Shapes of well-known public models, for planning and for lessons: no weights here, and no network needed."""

from __future__ import annotations

from typing import Any

from minillm.config import ModelConfig

_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32_000, "bos_token_id": 1, "eos_token_id": 2}

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
}

SOURCES: dict[str, str] = {
    "smollm2-135m": "config.json of HuggingFaceTB/SmolLM2-135M-Instruct",
    "llama-7b": "config.json of huggyllama/llama-7b; Touvron et al. 2023, arXiv 2302.13971",
    "llama-2-70b": "config.json of meta-llama/Llama-2-70b-hf; Touvron et al. 2023, arXiv 2307.09288",
    "qwen3-32b": "config.json of Qwen/Qwen3-32B; Yang et al. 2025, arXiv 2505.09388",
    "mixtral-8x7b": "config.json of mistralai/Mixtral-8x7B-v0.1; Jiang et al. 2024, arXiv 2401.04088",
    "qwen3-30b-a3b": "config.json of Qwen/Qwen3-30B-A3B; Yang et al. 2025, arXiv 2505.09388",
}

PRESETS: dict[str, ModelConfig] = {name: ModelConfig.from_hf(raw, name) for name, raw in _RAW.items()}


def preset(name: str) -> ModelConfig:
    """The shape of a known model; an unknown name raises ValueError listing the known ones."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}") from None
