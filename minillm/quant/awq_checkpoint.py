"""Checkpoints of 4-bit weights in the layout of AutoAWQ ("gemm"): written here, read by other engines, and read back.

A linear layer is the three tensors of ``minillm.quant.words``, its scales in float16; a fused layer of ours is two or three of
theirs, side by side.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Iterable, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minillm.model.config import ARCHITECTURES, ModelConfig
from minillm.model.files import check_depth, check_tensors
from minillm.model.loader import folder_config, weight_files
from minillm.model.transformer import Layer, Transformer
from minillm.model.weights import EMBED, FUSED, HEAD, NORM, expected_shapes
from minillm.quant.calibrate import LINEARS
from minillm.quant.config import QuantConfig
from minillm.quant.grid import Codes, group_size
from minillm.quant.group_linear import GroupLinear
from minillm.quant.words import pack_words, unpack_words

PARTS = ("qweight", "qzeros", "scales")


def save_awq(model: Transformer, folder: str | Path) -> Path:
    """Write config.json and model.safetensors of a model quantised to 4 bits; returns the folder.

    The embedding, norms and an untied head are float16. The tokenizer's files are the caller's to add. ValueError for other bits,
    for layers without a grid or with different ones, for shapes that the layout or config.json cannot say, and for numbers beyond
    float16; nothing is then written.
    """
    for structure, what in ((model.config.moe, "is a mixture of experts"), (model.config.mla, "has latent attention")):
        if structure is not None:
            raise ValueError(f"{model.config.name} {what}, which minillm does not write in the AWQ layout")
    folder, hf = Path(folder), _to_hf(model.config)
    tensors = {EMBED: model.embedding, NORM: model.norm.weight}
    if not model.config.tie_embeddings:
        tensors[HEAD] = model.head.dense()[0]
    methods = set()
    for i, layer in enumerate(cast(Iterable[Layer], model.layers)):
        prefix = f"model.layers.{i}"
        norms = {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm,
                 "self_attn.q_norm": layer.attention.q_norm, "self_attn.k_norm": layer.attention.k_norm}  # fmt: skip
        tensors.update({f"{prefix}.{key}.weight": norm.weight for key, norm in norms.items() if norm is not None})
        for key, find in LINEARS.items():
            linear = find(layer)
            if not isinstance(linear.method, GroupLinear) or linear.method.bits != 4:
                raise ValueError(f"{prefix}.{key} is not quantised to 4 bits, the only ones that the AWQ layout has")
            methods.add((linear.method.group, linear.method.symmetric))
            codes, bias = linear.method.codes(linear._buffers), linear.dense()[1]
            for part, rows in _parts(model.config, key):
                if len(codes.codes[rows]) % 8:
                    raise ValueError(
                        f"{prefix}.{part} has {len(codes.codes[rows])} output channels, and the AWQ layout packs 8 to a word"
                    )
                tensors.update(_to_tensors(f"{prefix}.{part}", codes, bias, rows))
    if len(methods) > 1:
        grids = " and ".join(f"groups of {g}{', symmetric' * s}" for g, s in sorted(methods))
        raise ValueError(f"layers of {model.config.name} have {grids}, and the AWQ layout has one grid for all")
    (group, symmetric) = methods.pop()
    head = model.head.method.bits if isinstance(model.head.method, GroupLinear) else None
    stored = {name: _float16(name, t) for name, t in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quant = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
             "modules_to_not_convert": None, "symmetric": symmetric, "head_bits": head}  # fmt: skip
    raw = {**hf, "torch_dtype": "float16", "quantization_config": quant}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return folder


def _parts(config: ModelConfig, key: str) -> list[tuple[str, slice]]:
    """The checkpoint's layers inside a fused one, and their rows."""
    if key not in FUSED:
        return [(key, slice(None))]
    sizes = [config.q_size, config.kv_size, config.kv_size] if "qkv" in key else [config.intermediate_size] * 2
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(part, slice(end - size, end)) for part, size, end in zip(FUSED[key], sizes, ends, strict=True)]


def _to_tensors(name: str, codes: Codes, bias: Tensor | None, rows: slice) -> dict[str, Tensor]:
    out = {
        f"{name}.qweight": pack_words(codes.codes[rows].T.contiguous()),
        f"{name}.qzeros": pack_words(codes.zeros[rows].T.contiguous()),
        f"{name}.scales": codes.scales[rows].T.contiguous(),
    }
    if bias is not None:
        out[f"{name}.bias"] = bias[rows]
    return out


def _float16(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.contiguous()
    half = tensor.to("cpu", torch.float16).contiguous().clone()
    if not torch.isfinite(half).all():
        raise ValueError(f"{name} holds a number beyond float16, in which the AWQ layout stores it")
    return half


def _to_hf(c: ModelConfig) -> dict[str, Any]:
    """What a config.json says of this model. ValueError for what its family's has no words for."""
    raw = _spelled(c)
    try:
        read = ModelConfig.from_hf(raw, c.name)
    except ValueError as error:
        raise ValueError(f"config.json of family {c.family!r} cannot say what {c.name} is: {error}") from error
    written, back = (replace(x, rope=replace(x.rope, original_max_position=x.rope.original_max_position or x.max_position))
                     for x in (c, read))  # fmt: skip
    lost = [f"{f.name} {getattr(written, f.name)!r:.60}" for f in fields(c) if getattr(written, f.name) != getattr(back, f.name)]
    if lost:
        raise ValueError(f"config.json of family {c.family!r} cannot say what {c.name} has: {', '.join(lost)}")
    return raw


def _spelled(c: ModelConfig) -> dict[str, Any]:
    rope = {"rope_type": c.rope.kind, "rope_theta": c.rope.theta}
    if c.rope.kind != "default":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
                "mscale_all_dim", "truncate")  # fmt: skip
        rope.update({key: getattr(c.rope, key) for key in keys if getattr(c.rope, key) is not None})
        rope["original_max_position_embeddings"] = c.rope.original_max_position
    family = {v: k for k, v in ARCHITECTURES.items()}[c.family]
    raw: dict[str, Any] = {
        "architectures": [family], "model_type": c.family, "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim, "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.norm_eps, "rope_theta": c.rope.theta, "rope_parameters": rope, "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": c.qkv_bias and c.family != "qwen2", "mlp_bias": c.mlp_bias, "hidden_act": "silu",
        "eos_token_id": list(c.eos_token_ids), "bos_token_id": c.bos_token_id, "sliding_window": c.sliding_window,
        "use_sliding_window": c.sliding_window is not None,
    }  # fmt: skip
    return raw


def is_awq_folder(source: Any) -> bool:
    """Whether this is a folder whose config.json speaks of AWQ weights of 4 bits."""
    if not isinstance(source, (str, Path)) or not str(source).strip():
        return False
    file = Path(source).expanduser() / "config.json"
    try:
        return file.is_file() and is_awq(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def is_awq(raw: Any) -> bool:
    """Whether a config.json says that its weights are in this layout."""
    if not isinstance(raw, dict):
        return False
    quant = raw.get("quantization_config")
    return isinstance(quant, dict) and quant.get("quant_method") == "awq" and quant.get("bits") == 4


def load_awq(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    kernel: Literal["auto", "torch", "triton"] = "auto",
) -> Transformer:  # fmt: skip
    """The model in a folder that save_awq or AutoAWQ wrote: its codes as they are, everything else in dtype; kernel as in
    QuantConfig.

    ValueError: another format, a damaged file, a tensor that is missing, of a wrong shape or dtype, or one too many.
    """
    from minillm.quant.quantise import QuantMethods, describe

    asked = QuantConfig("awq", kernel=kernel)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point torch.dtype, got {dtype!r:.60}")
    folder = Path(folder).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no folder with a config.json")
    raw = folder_config(folder)
    if not is_awq(raw):
        raise ValueError(f"{folder} holds no AWQ weights of 4 bits: it has {raw.get('quantization_config')!r:.80}")
    quant = raw.pop("quantization_config")
    if quant.get("version", "gemm") != "gemm":
        raise ValueError(f"{folder} is in the AWQ layout {quant.get('version')!r:.60}; minillm reads 'gemm'")
    config = ModelConfig.from_hf(raw, folder.resolve().name)
    for part, what in ((config.moe, "is a mixture of experts"), (config.mla, "has latent attention")):
        if part is not None:
            raise ValueError(f"{folder} {what}, which minillm does not read from the AWQ layout")
    try:
        grid = {"group": quant.get("group_size", 128), "symmetric": quant.get("symmetric", False)}
        chosen = replace(asked, bits=4, head_bits=quant.get("head_bits"), **grid)
    except ValueError as error:
        raise ValueError(f"quantization_config of {folder}: {error}") from None
    tensors = _read_tensors(folder, config, chosen.group)
    codes = {f"model.layers.{i}.{key}": _read_codes(tensors, f"model.layers.{i}", _parts(config, key))
             for i in range(config.num_layers) for key in LINEARS}  # fmt: skip
    weights = {name: t.float() for name, t in tensors.items() if not name.endswith(PARTS)}
    for name, found in codes.items():
        weights[f"{name}.weight"] = found.dequantise()
        prefix, key = name.split(".", 3)[:3], name.split(".", 3)[3]
        biases = [weights.pop(f"{'.'.join(prefix)}.{part}.bias", None) for part, _ in _parts(config, key)]
        if all(b is not None for b in biases):
            weights[f"{name}.bias"] = torch.cat([b for b in biases if b is not None])
    weights = {name: t.to(device=device, dtype=dtype) for name, t in weights.items()}
    model = Transformer(config, weights, QuantMethods(chosen, dtype, device, codes)).eval()
    model.storage = describe(model, chosen)
    return model


def _read_tensors(folder: Path, config: ModelConfig, group: int) -> dict[str, Tensor]:
    """Every tensor of a folder, and no other than the configuration asks for; ValueError where one does not fit."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        twice = next((name for name in found if name in tensors), None)
        if twice is not None:
            raise ValueError(f"tensor {twice} is in {path.name} and in another file of {folder}")
        tensors |= found
    for name in list(tensors):  # both follow from the rest
        if name.endswith(".rotary_emb.inv_freq") or (name == HEAD and config.tie_embeddings):
            del tensors[name]
    check_depth(config.num_layers, len(tensors), folder)
    check_tensors(_shapes(config, group), {name: tuple(t.shape) for name, t in tensors.items()}, folder)
    for name, tensor in tensors.items():
        words = name.endswith(PARTS[:2])
        if tensor.dtype != torch.int32 if words else not tensor.is_floating_point():
            has, wants = str(tensor.dtype).removeprefix("torch."), "int32" if words else "floating-point"
            raise ValueError(f"tensor {name} of {folder} is {has}; the layout has {wants} there")
        if name.endswith(PARTS[2]) and not torch.isfinite(tensor).all():
            raise ValueError(f"tensor {name} of {folder} holds a scale that is not finite")
    return tensors


def _shapes(config: ModelConfig, group: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint in this layout."""
    linears = tuple(f".{part}.weight" for key in LINEARS for part in FUSED.get(key, (key,)))
    out: dict[str, tuple[int, ...]] = {}
    for name, shape in expected_shapes(config).items():
        if not name.endswith(linears):
            out[name] = shape
            continue
        layer, (rows, width) = name.removesuffix(".weight"), shape
        groups = width // group_size(width, group, layer)
        out |= {f"{layer}.qweight": (width, rows // 8), f"{layer}.qzeros": (groups, rows // 8), f"{layer}.scales": (groups, rows)}
    return out


def _read_codes(tensors: dict[str, Tensor], prefix: str, parts: list[tuple[str, slice]]) -> Codes:
    found = []
    for part, _ in parts:
        words, zeros, scales = (tensors[f"{prefix}.{part}.{kind}"] for kind in PARTS)
        found.append((unpack_words(words).T, scales.float().T, unpack_words(zeros).T))
    codes, scales, zeros = (torch.cat(kind).contiguous() for kind in zip(*found, strict=True))
    return Codes(codes, scales, zeros, 4)
