"""Opening models: what transformers saves must come out the same, and what cannot be run must be named."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minillm.model.config import ModelConfig
from minillm.model.fetch import DownloadError
from minillm.model.layers import rope_frequencies
from minillm.model.loader import Checkpoint, load_checkpoint

FAMILIES = ("llama", "llama tied", "mistral", "qwen2", "qwen3")
SameWeights = Callable[[Checkpoint, Any], None]
Save = Callable[..., Any]


@pytest.fixture
def folder(saved: dict[str, tuple[Path, Any]], tmp_path: Path) -> Path:
    """A copy of the llama folder, to be spoiled."""
    return Path(shutil.copytree(saved["llama"][0], tmp_path / "spoiled"))


def rewrite(path: Path, remove: tuple[str, ...] = (), **change: Any) -> None:
    raw = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in raw.items() if key not in remove}))


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_saved_by_transformers_has_its_weights_and_config(saved: Any, family: str, same_weights: SameWeights) -> None:
    folder, model = saved[family]
    checkpoint = load_checkpoint(folder)
    same_weights(checkpoint, model)
    ours, theirs = checkpoint.config, model.config
    assert (ours.family, ours.name) == (theirs.model_type, folder.name)
    assert ours.head_dim == getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads) == (2, 4, 2)
    assert (ours.norm_eps, ours.max_position) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == (theirs.sliding_window if family == "mistral" else None)
    assert ours.tie_embeddings == theirs.tie_word_embeddings and (ours.eos_token_ids, ours.bos_token_id) == ((2,), 1)
    assert ours.num_params == sum(p.numel() for p in model.parameters())
    assert checkpoint.tokenizer is None and "token ids only" in checkpoint.note


def test_16_bit_shards_keep_their_dtype_and_are_joined(tmp_path: Path, same_weights: SameWeights, save: Save) -> None:
    model = save("qwen3", tmp_path, torch.bfloat16, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    same_weights(load_checkpoint(str(tmp_path)), model)


def test_shards_without_an_index_are_joined(tmp_path: Path, same_weights: SameWeights, save: Save) -> None:
    model = save("qwen3", tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    same_weights(load_checkpoint(tmp_path), model)


# --- configurations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_absent_keys_mean_what_they_mean_to_transformers(family: str) -> None:
    given = dict(vocab_size=99, hidden_size=512, intermediate_size=64, num_hidden_layers=2, num_attention_heads=32)
    theirs = getattr(transformers, f"{family}Config")(**given)
    ours = ModelConfig.from_hf({**given, "model_type": family.lower()})
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert (ours.max_position, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert ours.tie_embeddings == theirs.tie_word_embeddings and ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, eos_token_id=2,
)  # fmt: skip
ORIGINAL = "original_max_position_embeddings"
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64},
    {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.5, "mscale_all_dim": 2.0, "truncate": False},
    {"rope_type": "yarn", "factor": None, ORIGINAL: 32},
]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type", "outside"])
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope['rope_type']}-{len(rope)}")
def test_rope_of_every_spelling_turns_like_transformers(rope: dict[str, Any], spelling: str) -> None:
    new = {**SIZES, "rope_parameters": {**rope, "rope_theta": 30_000.0}}
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(new)))
    old = {**SIZES, "rope_theta": 30_000.0, "rope_scaling": rope}
    if spelling == "type":
        old["rope_scaling"] = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    if spelling == "outside" and ORIGINAL in rope:
        old["rope_scaling"] = {key: value for key, value in rope.items() if key != ORIGINAL}
        old[ORIGINAL] = rope[ORIGINAL]
    ours = ModelConfig.from_hf({**(new if spelling == "rope_parameters" else old), "model_type": "llama"})
    frequencies, scale = rope_frequencies(ours)
    kind = rope["rope_type"]
    if kind == "default":
        expected, factor = 1 / 30_000.0 ** (torch.arange(0, 16, 2) / 16), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs)
    torch.testing.assert_close(frequencies, expected)
    assert scale == pytest.approx(factor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unknown architecture GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "unknown architecture mamba"),
        ({"architectures": [], "model_type": None}, "unknown architecture none stated"),
        ({"hidden_size": None}, "lacks hidden_size"), ({"hidden_size": "64"}, "hidden_size '64'"),
        ({"vocab_size": 1.5}, "vocab_size 1.5"), ({"num_hidden_layers": True}, "num_hidden_layers True"),
        ({"num_attention_heads": 0}, "num_heads must be.*at least 1, got 0"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"), ({"eos_token_id": "x"}, "eos_token_id"),
        ({"eos_token_id": 96}, "vocabulary of 96"), ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor must be numbers"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised .awq."),
        ({"vocab_size": 97}, r"tensor model.embed_tokens.weight of .* has shape \(96, 64\), .* asks for \(97, 64\)"),
        ({"num_hidden_layers": 3}, r"lacks tensor model.layers.2.* and \d+ more"),
        ({"num_hidden_layers": 10**9}, "too few for the 1000000000 layers"),
        ({"num_hidden_layers": 1}, "holds tensor model.layers.1.* no place"),
        ({"mlp_bias": False}, "holds tensor .*mlp.*bias"),
    ],
)  # fmt: skip
def test_config_that_cannot_be_run_is_named(folder: Path, change: dict[str, Any], message: str) -> None:
    rewrite(folder / "config.json", **change)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder)


def test_qwen_windows_per_layer_are_refused_only_where_a_layer_slides(saved: Any) -> None:
    raw = json.loads((saved["qwen2"][0] / "config.json").read_text())
    raw |= {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
    assert ModelConfig.from_hf(raw).sliding_window is None  # it would slide from layer 28 on
    for change in ({"layer_types": ["full_attention", "sliding_attention"]}, {"max_window_layers": 1}):
        with pytest.raises(ValueError, match="use_sliding_window"):
            ModelConfig.from_hf({**raw, **change})


def test_generation_config_adds_its_ends_of_text(folder: Path) -> None:
    rewrite(folder / "generation_config.json", eos_token_id=[7, 2, 9])
    assert load_checkpoint(folder).config.eos_token_ids == (2, 7, 9)
    rewrite(folder / "config.json", remove=("eos_token_id",))
    assert load_checkpoint(folder).config.eos_token_ids == (7, 2, 9)
    rewrite(folder / "generation_config.json", eos_token_id=96)
    with pytest.raises(ValueError, match=r"\[96\]"):
        load_checkpoint(folder)


# --- folders that are damaged or are none -------------------------------------------------------------------------


def spoil_header(path: Path, **change: Any) -> None:
    """Rewrite one tensor's entry in a safetensors header, leaving the data as it is."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header["model.norm.weight"].update(change)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_safetensors_header_that_lies_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for change in ({"data_offsets": [0, 10**12]}, {"data_offsets": [8, 4]}, {"shape": [65]}, {"dtype": "F16"}, {"dtype": "NONE"}):
        path.write_bytes(whole)
        spoil_header(path, **change)
        with pytest.raises(ValueError, match="model.safetensors is damaged"):
            load_checkpoint(folder)
    path.write_bytes(whole)
    spoil_header(path, dtype="I32")
    with pytest.raises(ValueError, match="model.norm.weight .*stored as I32"):
        load_checkpoint(folder)


@pytest.mark.parametrize("size", [0, 4, 8, 9, 200, -100, -1])
def test_truncated_safetensors_is_refused(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        load_checkpoint(folder)


def test_missing_surplus_and_doubled_tensors_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"}, path)
    with pytest.raises(ValueError, match="lacks tensor model.norm.weight"):
        load_checkpoint(folder)
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, path)
    with pytest.raises(ValueError, match="holds tensor model.layers.0.self_attn.q_norm.weight"):
        load_checkpoint(folder)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path)
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in load_checkpoint(folder).weights
    path.rename(folder / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "b.safetensors")
    with pytest.raises(ValueError, match="model.norm.weight is in b.safetensors and in another"):
        load_checkpoint(folder)


def test_index_that_does_not_match_its_shards_is_refused(tmp_path: Path, save: Save) -> None:
    save("qwen3", tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    first, last = sorted(set(table.values()))[0], sorted(set(table.values()))[-1]
    moved = next(name for name, shard in table.items() if shard == first)
    for change, kind, message in [
        ({**table, moved: last}, ValueError, f"{last} lacks tensor {moved}, which its index lists"),
        ({**table, moved: "../x.safetensors"}, ValueError, "outside its folder"),
        ({**table, moved: 5}, ValueError, "no weight_map"),
        ({}, ValueError, "no weight_map"),
        (None, ValueError, "no weight_map"),
        ({**table, moved: "gone.safetensors"}, FileNotFoundError, "lacks gone.safetensors"),
    ]:  # fmt: skip
        rewrite(index, weight_map=change)
        with pytest.raises(kind, match=message):
            load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "config.json is not valid JSON"), ("config.json", b"[]", "must hold a JSON object, not list"),
        ("config.json", b"\xff\xfe", "config.json is not valid JSON"), ("config.json", b"", "config.json is not valid JSON"),
        ("generation_config.json", b"{]", "generation_config.json is not valid JSON"),
        ("tokenizer.json", b"{}", "tokenizer.json is not a valid tokenizer"),
    ],
)  # fmt: skip
def test_broken_json_is_named(folder: Path, file: str, content: bytes, message: str) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder)


def test_folders_without_a_model_say_what_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="only pytorch_model.bin: a pickle, which can run any code"):
        load_checkpoint(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match="no .*safetensors"):
        load_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no config.json$"):
        load_checkpoint(folder)
    (folder / "x.gguf").touch()
    with pytest.raises(FileNotFoundError, match="has no config.json; it holds x.gguf: give that file"):
        load_checkpoint(folder)


@pytest.mark.parametrize("source", ["", "  ", None, 5, ["smollm2-135m"]])
def test_no_source_lists_what_may_be_given(source: Any) -> None:
    with pytest.raises(ValueError, match="'smollm2-135m', a .gguf file, a folder"):
        load_checkpoint(source)


@pytest.mark.parametrize(
    "source",
    ["nowhere", "./no/where", "/no/where", "a/b/c", "a/b.gguf", Path("org/name"), "x\0y", pytest.param("n" * 5000, id="long")],
)
def test_path_that_does_not_exist_is_named_and_never_downloaded(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError, match="no model at"):
        load_checkpoint(source)


@pytest.mark.parametrize(
    ("file", "message"), [("w.safetensors", "give its folder"), ("w.bin", "pickle"), ("w.txt", "not a GGUF file")]
)
def test_files_that_are_no_model_are_refused(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).write_bytes(b"abcdefgh")
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / file)


# --- the hub ------------------------------------------------------------------------------------------------------


def test_hub_id_is_downloaded_without_pickles_and_named_after_the_id(
    saved: Any, monkeypatch: pytest.MonkeyPatch, same_weights: SameWeights
) -> None:
    folder, model = saved["mistral"]
    asked: dict[str, Any] = {}
    download = lambda repo, **options: asked.update(repo=repo, **options) or str(folder)  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = load_checkpoint("org/name")
    same_weights(checkpoint, model)
    assert checkpoint.name == checkpoint.config.name == asked["repo"] == "org/name"
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["allow_patterns"])


def test_offline_hub_id_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="could not download 'org/name'.*local folder.*HF_HUB_OFFLINE.*smollm2-135m"):
        load_checkpoint("org/name")


def test_invalid_hub_id_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="'org/na..me' is neither a local path nor a valid hub id"):
        load_checkpoint("org/na..me")
