"""Hugging Face's config.json, in its older and its newer spelling, as a ModelConfig."""

from __future__ import annotations

from typing import Any, Mapping

from minillm.model.config import ARCHITECTURES, ModelConfig, RopeConfig
from minillm.model.mla_config import MLAConfig
from minillm.model.moe_config import MoEConfig

REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
)
_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_interleave": True,
}  # fmt: skip
# What an absent key means to transformers' configuration classes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    "deepseek_v2": {
        **_LATENT, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "n_routed_experts": 64,
        "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0,
        "topk_method": "greedy", "norm_topk_prob": False, "num_experts_per_tok": None,
    },
    "deepseek_v3": {
        **_LATENT, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "n_routed_experts": 256,
        "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    },
}
LATENT = ("deepseek_v2", "deepseek_v3")
TYPES: dict[type | tuple[type, ...], tuple[str, ...]] = {
    int: (*REQUIRED, "num_key_value_heads", "head_dim", "bos_token_id", "sliding_window",
          "original_max_position_embeddings", "max_window_layers", "num_local_experts", "num_experts", "num_experts_per_tok",
          "moe_intermediate_size", "decoder_sparse_step", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
          "v_head_dim", "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"),
    (int, float): ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "routed_scaling_factor"),
    bool: ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "rope_interleave"),
    dict: ("rope_scaling", "rope_parameters", "quantization_config"),
    list: ("layer_types", "mlp_only_layers"),
}


def read_config(raw: Mapping[str, Any], name: str = "model") -> ModelConfig:
    """Read a Hugging Face config.json, in its older and its newer spelling.

    Unknown architectures, missing keys, values of a wrong type and options that minillm lacks raise ValueError naming them.
    """
    family = _family(raw)
    raw = {**DEFAULTS[family], **raw}
    missing = [key for key in REQUIRED if raw.get(key) is None]
    if missing:
        raise ValueError(f"config of {name} lacks {', '.join(missing)}")
    _check_types(raw, name)
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config of {name} has hidden_act {raw['hidden_act']!r}; minillm has 'silu'")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise ValueError(f"{name} is stored quantised ({method}); minillm reads 16- and 32-bit weights and GGUF files")
    heads, eos = raw["num_attention_heads"], raw.get("eos_token_id")
    kv_heads, head_dim = raw.get("num_key_value_heads"), raw.get("head_dim")
    mla = _mla(raw, family, name) if family in LATENT else None
    if mla is not None:
        kv_heads, head_dim = heads, mla.head_dim
    attention_bias = family in ("llama", "qwen3", "qwen3_moe") and bool(raw.get("attention_bias"))
    return ModelConfig(
        vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"], intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"], num_heads=heads, num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=raw["hidden_size"] // max(heads, 1) if head_dim is None else head_dim,
        max_position=raw["max_position_embeddings"], norm_eps=raw.get("rms_norm_eps", 1e-6), rope=_rope(raw),
        tie_embeddings=bool(raw.get("tie_word_embeddings")),
        qkv_bias=family == "qwen2" or attention_bias, attention_out_bias=attention_bias,
        mlp_bias=family in ("llama", "deepseek_v2") and bool(raw.get("mlp_bias")), qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=_sliding_window(raw, family), moe=_moe(raw, family, name), mla=mla,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        bos_token_id=raw.get("bos_token_id"), family=family, name=name,
    )


def _moe(raw: Mapping[str, Any], family: str, name: str) -> MoEConfig | None:
    if family == "mixtral":
        return MoEConfig(raw["num_local_experts"], raw["num_experts_per_tok"], raw["intermediate_size"])
    if family in LATENT:
        return _deepseek_moe(raw, family, name)
    if family != "qwen3_moe":
        return None
    experts = next((raw[key] for key in ("num_experts", "num_local_experts") if raw.get(key) is not None), 128)
    layers, step = raw["num_hidden_layers"], raw["decoder_sparse_step"]
    if step < 1:
        raise ValueError(f"config of {name} has decoder_sparse_step {step}; it must be at least 1")
    only = raw.get("mlp_only_layers") or []
    dense = tuple(i for i in range(max(layers, 0)) if i in only or (i + 1) % step or experts == 0)
    if len(dense) == layers:
        return None
    return MoEConfig(
        experts, raw["num_experts_per_tok"], raw["moe_intermediate_size"], renormalise=bool(raw.get("norm_topk_prob")),
        dense_layers=dense,
    )  # fmt: skip


def _family(raw: Mapping[str, Any]) -> str:
    """The family that `architectures` names, or `model_type` where a config lists none."""
    stated = raw.get("architectures") or []
    architectures = [str(a) for a in stated] if isinstance(stated, (list, tuple)) else [str(stated)]
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    model_type = raw.get("model_type")
    if not architectures and model_type in ARCHITECTURES.values():
        return str(model_type)
    what = ", ".join(architectures) or model_type or "none stated"
    raise ValueError(f"unknown architecture {what}; minillm reads {', '.join(ARCHITECTURES)}")


def _check_types(raw: Mapping[str, Any], name: str) -> None:
    for kind, keys in TYPES.items():
        for key in keys:
            value = raw.get(key)
            if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
                raise ValueError(f"config of {name} has {key} {value!r}, which is not a valid value")
    eos = raw.get("eos_token_id")
    for token in eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"config of {name} has eos_token_id {eos!r}; it must be a token id or a list of them")


def _deepseek_moe(raw: Mapping[str, Any], family: str, name: str) -> MoEConfig | None:
    """V2 chooses by softmax, V3 by sigmoid with a bias, both within the best groups of experts."""
    dense, shared = raw["first_k_dense_replace"] or 0, raw["n_shared_experts"] or 0
    if not raw["n_routed_experts"] or dense >= raw["num_hidden_layers"]:
        return None
    if raw.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"config of {name} has moe_layer_freq {raw['moe_layer_freq']}; minillm has experts in every layer, 1")
    third = family == "deepseek_v3"
    if not third and raw["norm_topk_prob"]:
        raise ValueError(f"config of {name} has norm_topk_prob beside the routing of DeepSeek-V2; it must be false")
    grouped = third or raw["topk_method"] == "group_limited_greedy"
    return MoEConfig(
        raw["n_routed_experts"], raw["num_experts_per_tok"], raw["moe_intermediate_size"],
        shared_size=(raw["moe_intermediate_size"] or 0) * shared, scoring="sigmoid" if third else "softmax",
        renormalise=bool(raw["norm_topk_prob"]), selection_bias=third, scale=raw["routed_scaling_factor"],
        num_groups=raw.get("n_group") or 1 if grouped else 1, top_groups=raw.get("topk_group") or 1 if grouped else 1,
        dense_layers=tuple(range(dense)),
    )  # fmt: skip


def _mla(raw: Mapping[str, Any], family: str, name: str) -> MLAConfig:
    if raw.get("attention_bias"):
        raise ValueError(f"config of {name} has attention_bias beside latent attention, which minillm lacks; it must be false")
    if raw.get("num_key_value_heads") not in (None, raw["num_attention_heads"]):
        kv, heads = raw["num_key_value_heads"], raw["num_attention_heads"]
        raise ValueError(f"config of {name} has {kv} KV heads for {heads} heads; latent attention makes keys for every head")
    widths = {key: raw[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    absent = [key for key, value in widths.items() if value is None]
    if absent:
        raise ValueError(f"config of {name} has no {', '.join(absent)}, which latent attention needs")
    return MLAConfig(
        kv_rank=raw["kv_lora_rank"], q_rank=raw["q_lora_rank"], nope_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"], v_dim=raw["v_head_dim"],
        interleaved=family == "deepseek_v2" or bool(raw["rope_interleave"]),
    )  # fmt: skip


def _sliding_window(raw: Mapping[str, Any], family: str) -> int | None:
    if family == "llama" or family in LATENT:
        return None
    window: int | None = raw.get("sliding_window")
    if family in ("mistral", "mixtral"):
        return window
    # Qwen slides in some layers only: those that layer_types marks, or, before it existed, those from max_window_layers on.
    slides = raw.get("use_sliding_window", False) and window is not None
    if raw.get("layer_types") is not None:
        slides = slides and "sliding_attention" in raw["layer_types"]
    else:
        slides = slides and raw.get("max_window_layers", 28) < raw["num_hidden_layers"]
    if slides:
        raise ValueError("use_sliding_window with per-layer windows is not supported; set it to false")
    return None


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Newer configs keep everything in rope_parameters; older ones have rope_theta beside rope_scaling."""
    max_position = raw["max_position_embeddings"]
    given = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"rope parameters per layer type ({', '.join(given)}) are not supported")
    kind = str(given.get("rope_type") or given.get("type") or "default")
    rotated = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotated not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor {rotated} is not supported; it must be 1.0")
    original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or max_position
    if kind == "dynamic":  # the NTK-aware base is stretched from max_position_embeddings, whatever else is stated
        original = max_position
    if kind == "yarn" and given.get("factor") is None:
        given["factor"] = max_position / original
    required = {"linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    missing = [key for key in required.get(kind, ()) if given.get(key) is None]
    if missing:
        raise ValueError(f"rope type {kind!r} lacks {', '.join(missing)}")
    theta = given.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    names = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow",
             "mscale", "mscale_all_dim", "truncate")
    values = {name: given[name] for name in names if given.get(name) is not None}
    bad = [name for name, value in {"rope_theta": theta, **values}.items() if not isinstance(value, (int, float))]
    if bad:
        raise ValueError(f"rope parameters {', '.join(bad)} must be numbers")
    return RopeConfig(theta=theta, kind=kind, original_max_position=original, **values)
