"""GGUF files: what is written must come out under Hugging Face names and orders, and what is broken must be named."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minillm.model.config import RopeConfig
from minillm.model.fetch import status
from minillm.model.gguf_file import GGUFFile
from minillm.model.gguf_model import split_pairs
from minillm.model.loader import Checkpoint, load_checkpoint
from minillm.model.weights import expected_shapes

FAMILIES = ("llama", "llama tied", "mistral", "qwen2", "qwen3")
SameWeights = Callable[[Checkpoint, Any], None]
STORED = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def stored_name(name: str) -> str:
    base, kind = name.rsplit(".", 1)
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if base in fixed:
        return f"{fixed[base]}.{kind}"
    layer, base = base.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{STORED[base]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What GGUF does to a llama's Q and K: row j of the first half of a head, then row j of the second, for each j."""
    dim = len(rows) // heads
    order = [head * dim + half * dim // 2 + j for head in range(heads) for j in range(dim // 2) for half in range(2)]
    return rows[order]


def write_gguf(
    model: Any, path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32, extra: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (), tensors: dict[str, np.ndarray] | None = None, arch: str | None = None,
) -> Path:  # fmt: skip
    """Write a transformers model as a GGUF file, matrices as `kind`. extra overrides metadata; None there leaves a key out."""
    config = model.config
    permuted = config.model_type in ("llama", "mistral")
    arch = arch or ("llama" if permuted else config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope_parameters["rope_theta"],
        "attention.key_length": head_dim, "attention.value_length": head_dim,
    }  # fmt: skip
    metadata = {f"{arch}.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.eos_token_id": 2, **(extra or {})}
    writer = GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = tensor.float().numpy()
        if permuted and (".q_proj." in name or ".k_proj." in name):
            rows = interleave(rows, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        stored = stored_name(name)
        if stored in drop:
            continue
        if rows.ndim == 2:
            writer.add_tensor(stored, gguf.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(rows))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_gives_back_what_was_written(saved: Any, tmp_path: Path, family: str, same_weights: SameWeights) -> None:
    folder, model = saved[family]
    checkpoint = load_checkpoint(write_gguf(model, tmp_path / "tiny.gguf"))
    same_weights(checkpoint, model)
    ours, expected = checkpoint.config, load_checkpoint(folder).config
    different = {f for f in vars(expected) if getattr(ours, f) != getattr(expected, f)}
    assert different <= {"name", "norm_eps", "bos_token_id", "sliding_window", *({"family"} if family == "mistral" else ())}
    assert ours.norm_eps == pytest.approx(expected.norm_eps) and checkpoint.name == ours.name == "tiny"
    assert checkpoint.note == "F32 linear weights, F32 embedding" and checkpoint.tokenizer is None


@pytest.mark.parametrize("family", ["llama tied", "qwen2"])
def test_gguf_is_read_as_transformers_reads_it(saved: Any, tmp_path: Path, family: str, same_weights: SameWeights) -> None:
    # not Qwen3: transformers takes its heads to be 128 wide, whatever the file says
    kind = GGMLQuantizationType.Q8_0
    arch = family.split()[0]
    extra = {f"{arch}.vocab_size": 96, f"{arch}.rope.dimension_count": 32 if arch == "llama" else 16}
    path = write_gguf(saved[family][1], tmp_path / "tiny.gguf", kind, extra)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    checkpoint = load_checkpoint(path)
    same_weights(checkpoint, theirs)
    assert checkpoint.note == "Q8_0 linear weights, Q8_0 embedding"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_block_format_is_dequantised(saved: Any, tmp_path: Path, kind: str) -> None:
    model, stored = saved["qwen3"][1], GGMLQuantizationType[kind]
    weights = load_checkpoint(write_gguf(model, tmp_path / "tiny.gguf", stored)).weights
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"):
        expected = gguf.dequantize(gguf.quantize(model.state_dict()[name].numpy(), stored), stored)
        assert weights[name].dtype == torch.float32 and np.array_equal(weights[name].numpy(), expected)


def test_nothing_is_read_before_it_is_asked_for(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = GGUFFile.read
    monkeypatch.setattr(GGUFFile, "read", lambda file, name: read.append(name) or whole(file, name))
    weights = load_checkpoint(write_gguf(saved["llama"][1], tmp_path / "m.gguf")).weights
    assert "model.norm.weight" in weights and "model.nothing" not in weights and list(weights) and read == []
    _ = weights["model.norm.weight"]
    assert read == ["output_norm.weight"]
    for opened in (weights, load_checkpoint(saved["llama"][0]).weights):
        with pytest.raises(KeyError):
            opened["model.nothing"]


@given(heads=st.integers(1, 5), half=st.integers(1, 8), columns=st.sampled_from([(), (3,)]))
def test_splitting_pairs_undoes_interleaving(heads: int, half: int, columns: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).random((heads * half * 2, *columns))
    assert np.array_equal(split_pairs(torch.from_numpy(interleave(rows, heads)), heads).numpy(), rows)


def llama3_divisors(dim: int, theta: float, factor: float, original: int = 8192) -> np.ndarray:
    wavelength = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    blend = np.clip((original / wavelength - 1) / (4 - 1), 0, 1)
    return (1 / ((1 - blend) / factor + blend)).astype(np.float32)


def test_llama3_divisors_become_its_published_constants(saved: Any, tmp_path: Path) -> None:
    model, theta = saved["llama"][1], {"llama.rope.freq_base": 500_000.0}
    write = lambda divisors: write_gguf(model, tmp_path / "m.gguf", extra=theta, tensors={"rope_freqs.weight": divisors})  # noqa: E731
    rope = load_checkpoint(write(llama3_divisors(16, 5e5, 32.0))).config.rope
    assert rope == RopeConfig(5e5, "llama3", 32.0, 8192, 1.0, 4.0)
    assert load_checkpoint(write(np.ones(8, np.float32))).config.rope.kind == "default"
    for wrong in (llama3_divisors(16, 5e5, 8.0, 1024), np.ones(4, np.float32)):
        with pytest.raises(ValueError, match="rope_freqs.weight"):
            load_checkpoint(write(wrong))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, RopeConfig(1e4, original_max_position=128)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeConfig(1e4, original_max_position=128)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeConfig(1e4, "linear", 4.0, 128)),
        ({"rope.scale_linear": 2.0}, RopeConfig(1e4, "linear", 2.0, 128)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            RopeConfig(1e4, "yarn", 4.0, 32),
        ),
    ],
)
def test_gguf_rope_settings_are_read(saved: Any, tmp_path: Path, extra: dict[str, Any], expected: RopeConfig) -> None:
    path = write_gguf(saved["qwen2"][1], tmp_path / "m.gguf", extra={f"qwen2.{key}": value for key, value in extra.items()})
    assert load_checkpoint(path).config.rope == expected


def test_end_of_turn_is_an_end_of_text_and_one_count_per_layer_is_read(saved: Any, tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.bos_token_id": 1, "qwen3.attention.head_count_kv": [2, 2]}
    config = load_checkpoint(write_gguf(saved["qwen3"][1], tmp_path / "m.gguf", extra=extra)).config
    assert (config.eos_token_ids, config.bos_token_id, config.num_kv_heads) == ((2, 5), 1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "gemma"}, "unknown architecture 'gemma'.*llama, qwen2, qwen3"),
        ({"drop": ("blk.1.attn_k.weight",)}, "lacks tensor blk.1.attn_k.weight"),
        ({"drop": ("token_embd.weight",)}, "lacks tensor token_embd.weight"),
        ({"extra": {"qwen3.block_count": 1}}, "holds tensor blk.1.* no place"),
        ({"extra": {"qwen3.block_count": None}}, "lacks the metadata key qwen3.block_count"),
        ({"extra": {"qwen3.block_count": 10**9}}, "too few for the 1000000000 layers"),
        ({"extra": {"qwen3.embedding_length": 32}}, r"shape \(96, 64\)"),
        ({"extra": {"qwen3.embedding_length": "x"}}, "embedding_length .*'x', which is not usable"),
        ({"extra": {"qwen3.attention.head_count_kv": [1, 2]}}, "head_count_kv .*not usable"),
        ({"extra": {"qwen3.rope.dimension_count": 16}}, "rope.dimension_count .* is 16; .* 32"),
        ({"extra": {"qwen3.rope.scaling.type": "longrope"}}, "'longrope'"),
        ({"extra": {"qwen3.expert_count": 8}}, "mixture of experts"),
        ({"extra": {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.yarn_attn_factor": 2.0}}, "yarn_attn_factor .*only 1"),
        ({"extra": {"split.count": 2}}, "split model"), ({"extra": {"tokenizer.ggml.eos_token_id": 500}}, r"\[500\]"),
        ({"tensors": {"blk.0.attn_q.bias": np.zeros(128, np.float32)}}, "lacks tensor blk.0.attn_k.bias"),
        ({"tensors": {"surplus": np.zeros(4, np.float32)}}, "holds tensor surplus"),
    ],
)  # fmt: skip
def test_gguf_that_cannot_be_run_is_named(saved: Any, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write_gguf(saved["qwen3"][1], tmp_path / "m.gguf", **options)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_broken_gguf_headers_are_named(saved: Any, tmp_path: Path) -> None:
    path = write_gguf(saved["qwen3"][1], tmp_path / "m.gguf")
    whole = path.read_bytes()
    for begin, patch, message in [
        (0, b"GGML", "is not a GGUF file"), (4, struct.pack("<I", 1), "version 1"), (4, struct.pack(">I", 3), "big-endian"),
        (16, struct.pack("<Q", 2**63), "broken header"), (8, struct.pack("<Q", 2**63), "broken header"),
        (24, struct.pack("<Q", 2**60), "bytes announced"),
    ]:  # fmt: skip
        path.write_bytes(whole[:begin] + patch + whole[begin + len(patch) :])
        with pytest.raises(ValueError, match=message):
            load_checkpoint(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="truncated"):
        load_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a GGUF file"):
        load_checkpoint(path)


@pytest.fixture(scope="module")
def small_files(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = write_gguf(saved["qwen3"][1], tmp_path_factory.mktemp("small") / "m.gguf")
    return {"gguf": path, "safetensors": Path(shutil.copytree(saved["qwen3"][0], path.parent / "folder")) / "model.safetensors"}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["gguf", "safetensors"]), at=st.floats(0, 1), byte=st.integers(0, 255), cut=st.booleans())
def test_any_cut_or_changed_byte_of_a_header_loads_or_is_a_value_error(
    small_files: dict[str, Path], tmp_path: Path, kind: str, at: float, byte: int, cut: bool
) -> None:
    whole = small_files[kind].read_bytes()
    data = bytearray(whole)
    place = int(at * (len(data) if cut else 4000))
    if cut:
        del data[place:]
    else:
        data[place] = byte
    source = small_files["safetensors"].parent if kind == "safetensors" else small_files[kind]
    small_files[kind].write_bytes(data)
    try:
        checkpoint = load_checkpoint(source)
        assert {name: tuple(t.shape) for name, t in checkpoint.weights.items()} == expected_shapes(checkpoint.config)
        assert not cut or len(data) == len(whole)
    except ValueError:
        pass
    finally:
        small_files[kind].write_bytes(whole)


# --- the default model --------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_default_model_is_opened_by_its_name() -> None:
    checkpoint = load_checkpoint("smollm2-135m")
    path = status()[1]
    theirs = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    ours = checkpoint.config
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (49_152, 576, 1536)
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads, ours.head_dim) == (30, 9, 3, 64)
    assert (ours.rope.theta, ours.rope.kind, ours.norm_eps) == (1e5, "default", theirs.rms_norm_eps)
    assert (ours.max_position, ours.tie_embeddings) == (theirs.max_position_embeddings, True)
    assert (ours.eos_token_ids, ours.bos_token_id) == ((theirs.eos_token_id,), theirs.bos_token_id)
    assert ours.num_params == 134_515_008 and ours.name == checkpoint.name == "smollm2-135m"
    assert checkpoint.note == "Q4_1 linear weights, Q8_0 embedding"
    assert checkpoint.tokenizer is not None and checkpoint.tokenizer.vocab_size == 49_152


@pytest.mark.model
@pytest.mark.slow
def test_our_header_of_the_default_model_equals_the_librarys() -> None:
    file, reader = GGUFFile(status()[1]), gguf.GGUFReader(status()[1])
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == theirs
    assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.kind, ours.offset, ours.size) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
    key = next(tensor for tensor in reader.tensors if tensor.name == "blk.7.attn_k.weight")
    expected = gguf.dequantize(key.data, key.tensor_type).reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
    weights = load_checkpoint("smollm2-135m").weights
    assert np.array_equal(weights["model.layers.7.self_attn.k_proj.weight"].numpy(), expected)
