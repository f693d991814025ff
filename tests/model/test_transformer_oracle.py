"""The one transformer against `transformers`: tiny random models of each family, saved there, loaded here, in 32 bits."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, Iterator, Sequence

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm import LLM, ModelConfig, SamplingParams, Transformer
from minillm.attention.choice import torch_attention
from minillm.cache.choice import plain_store
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.loader import load_checkpoint

TOLERANCE = 1e-4  # of logits whose spread is near 1
FAMILIES = {
    "llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig, "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config, "mixtral": transformers.MixtralConfig, "qwen3_moe": transformers.Qwen3MoeConfig,
}  # fmt: skip
LATENT = {"deepseek_v2": transformers.DeepseekV2Config, "deepseek_v3": transformers.DeepseekV3Config}
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True},
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3 of short reach": {**LLAMA3, "original_max_position_embeddings": 8, "high_freq_factor": 2.0, "factor": 32.0},
    "yarn": YARN,
    "yarn without truncation": {**YARN, "truncate": False},
    "yarn with an attention factor": {**YARN, "attention_factor": 0.7},
    "yarn with mscale": {**YARN, "mscale": 0.5, "mscale_all_dim": 1.3},
    "yarn with one mscale only": {**YARN, "mscale": 0.5},
    "yarn with betas": {**YARN, "beta_fast": 1.0, "beta_slow": 0.25, "original_max_position_embeddings": 32},
}


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """One thread: on models this small a second one only waits for the first. No progress bars."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
    torch.set_num_threads(threads)


def save(folder: Path | str, family: str, seed: int = 0, **sizes: Any) -> Path:
    """A random model whose weights keep the scale of what passes through them: transformers' own start is nearly zero."""
    config = (FAMILIES | LATENT)[family](**{**SIZES, **EXPERTS.get(family, {}), **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise / p.shape[-1] ** 0.5 if p.dim() > 1 else 1 + 0.2 * noise if "norm" in name else 0.3 * noise)
    model.save_pretrained(folder)
    return Path(folder)


def oracle(folder: Path) -> Any:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # its grouped product wants rows of 16 bytes
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager).eval()


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    checkpoint = load_checkpoint(folder)
    return Transformer.from_weights(checkpoint.config, checkpoint.weights, dtype)


class Paged:
    """A model over a paged cache of its own; every token's logits are asked for. Block tables run backwards and interleave."""

    def __init__(self, model: Transformer, rows: int = 1, block_size: int = 4, form: str = "auto"):
        blocks = -(-model.config.max_position // block_size)
        self.model, self.block_size = model, block_size
        self.store = plain_store(model.config, (rows * blocks + 1) * block_size, model.dtype)
        self.store.poison(torch.arange(1, self.store.num_slots))
        self.backend = torch_attention(model.config, model.config.sliding_window, form=form)
        self.tables = [[b * rows + r + 1 for b in reversed(range(blocks))] for r in range(rows)]

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[int, Sequence[int], int]]) -> Tensor:
        """chunks: (row, token ids, position of the first). → logits [tokens, vocab]."""
        rows = [Row(ids, start, self.tables[r]) for r, ids, start in chunks]
        batch = ForwardBatch.build(rows, self.block_size)
        batch = dataclasses.replace(batch, logit_indices=torch.arange(batch.num_tokens))
        return self.model(batch, self.store, self.backend, self.backend.plan(batch, self.model.dtype))


def prompt(length: int, vocab: int = SIZES["vocab_size"], seed: int = 1) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference(folder: Path, ids: Sequence[int]) -> Tensor:
    """transformers' logits of one sequence, [tokens, vocab]."""
    return oracle(folder)(torch.tensor([list(ids)])).logits[0]


def assert_agrees(folder: Path, length: int = 40) -> None:
    """Prefill, decoding token by token, and a chunk after a cached prefix give the logits that transformers gives."""
    model = ours(folder)
    ids = prompt(length, model.config.vocab_size)
    expected = reference(folder, ids)
    assert expected.std() > 0.3, "logits this small would agree whatever the code does"
    torch.testing.assert_close(Paged(model).step([(0, ids, 0)]), expected, rtol=0, atol=TOLERANCE)
    one_by_one = Paged(model)
    decoded = torch.cat([one_by_one.step([(0, [t], i)]) for i, t in enumerate(ids)])
    torch.testing.assert_close(decoded, expected, rtol=0, atol=TOLERANCE)
    chunked, cuts = Paged(model, block_size=16), [0, 1, 7, 24, length]
    chunks = [chunked.step([(0, ids[a:b], a)]) for a, b in zip(cuts, cuts[1:])]
    torch.testing.assert_close(torch.cat(chunks), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_agrees_with_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    more = {"sliding_window": 7} if family == "mistral" else {}
    folder = save(tmp_path, family, tie_word_embeddings=tied, **more)
    config = load_checkpoint(folder).config
    assert (config.family, config.tie_embeddings) == (family, tied)
    assert (config.qkv_bias, config.qk_norm, config.sliding_window) == (
        family == "qwen2",
        family in ("qwen3", "qwen3_moe"),
        more.get("sliding_window"),
    )
    assert_agrees(folder)


@pytest.mark.parametrize("window", [1, 2, 5, 39, 40, 41, None])
def test_mistrals_window_may_be_shorter_or_longer_than_the_prompt(window: int | None, tmp_path: Path) -> None:
    assert_agrees(save(tmp_path, "mistral", sliding_window=window))


@pytest.mark.parametrize("kind", ROPES)
def test_each_kind_of_rope_in_its_new_spelling(kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path, "llama", rope_parameters={"rope_theta": 500.0, **ROPES[kind]}, head_dim=32)
    assert "rope_parameters" in json.loads((folder / "config.json").read_text())
    assert_agrees(folder)


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ROPES)
def test_each_kind_of_rope_in_its_old_spelling(kind: str, kind_key: str, tmp_path: Path) -> None:
    folder = save(tmp_path, "llama", head_dim=32)
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    scaling = {kind_key if key == "rope_type" else key: value for key, value in ROPES[kind].items()}
    raw.update(rope_theta=500.0, rope_scaling=None if kind == "default" else scaling)
    (folder / "config.json").write_text(json.dumps(raw))
    assert_agrees(folder)


def test_kinds_of_rope_differ() -> None:
    # or the tests above would compare one kind eleven times; within its trained length dynamic is the default
    raw = {**SIZES, "architectures": ["LlamaForCausalLM"], "head_dim": 32}
    with_rope = {
        k: Transformer.random(ModelConfig.from_hf({**raw, "rope_parameters": {"rope_theta": 500.0, **r}}))
        for k, r in ROPES.items()
    }
    tables = {k: m.rope[:40] for k, m in with_rope.items()}
    equal = {frozenset((a, b)) for a in tables for b in tables if a != b and torch.equal(tables[a], tables[b])}
    assert equal == {frozenset(("default", "dynamic")), frozenset(("yarn", "yarn with one mscale only"))}


@pytest.mark.parametrize("head_dim", [2, 16, 80])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 2), (6, 1)])
def test_head_dims_and_groups_that_hidden_size_does_not_tell(head_dim: int, heads: int, kv_heads: int, tmp_path: Path) -> None:
    assert_agrees(save(tmp_path, "qwen3", head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=kv_heads))


def test_head_dim_is_hidden_size_by_heads_where_a_config_is_silent(tmp_path: Path) -> None:
    folder = save(tmp_path, "llama", hidden_size=60, head_dim=None)
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("head_dim")
    (folder / "config.json").write_text(json.dumps(raw))
    assert load_checkpoint(folder).config.head_dim == 10
    assert_agrees(folder)


@pytest.mark.parametrize("biases", [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}])
def test_llama_may_have_biases(biases: dict[str, bool], tmp_path: Path) -> None:
    folder = save(tmp_path, "llama", **biases)
    config = load_checkpoint(folder).config
    assert config.qkv_bias == config.attention_out_bias == biases.get("attention_bias", False) and config.mlp_bias == biases.get(
        "mlp_bias", False
    )
    assert_agrees(folder)


def test_qwen3_may_have_attention_biases(tmp_path: Path) -> None:
    assert_agrees(save(tmp_path, "qwen3", attention_bias=True))


@pytest.mark.parametrize("vocab", [1, 2, 31, 97, 1003])
def test_odd_vocabularies(vocab: int, tmp_path: Path) -> None:
    folder = save(tmp_path, "llama", vocab_size=vocab)
    if vocab > 2:
        return assert_agrees(folder)
    expected = reference(folder, prompt(9, vocab))  # a spread of one or two logits says nothing
    torch.testing.assert_close(Paged(ours(folder)).step([(0, prompt(9, vocab), 0)]), expected, rtol=0, atol=TOLERANCE)


def test_a_prompt_may_fill_every_position(tmp_path: Path) -> None:
    assert_agrees(save(tmp_path, "llama", rope_parameters={"rope_theta": 500.0, **ROPES["dynamic"]}), length=64)


@st.composite
def models(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A family and sizes that are rarely powers of two."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 6]))
    width = draw(
        st.integers(max(1, 8 // (kv_heads * group)), 72 // (kv_heads * group))
    )  # transformers wants a multiple of the heads
    sizes = {
        "vocab_size": draw(st.integers(20, 130)), "hidden_size": kv_heads * group * width,
        "intermediate_size": draw(st.integers(8, 70)),
        "num_hidden_layers": draw(st.integers(1, 3)), "num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * group,
        "head_dim": 2 * draw(st.integers(2, 40)), "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "rope_parameters": {"rope_theta": draw(st.sampled_from([100.0, 1e4, 1e6]))} | ROPES[draw(st.sampled_from(sorted(ROPES)))],
    }  # fmt: skip
    if family in ("mistral", "mixtral"):
        sizes["sliding_window"] = draw(st.none() | st.integers(1, 50))
    if family in EXPERTS:
        experts = draw(st.integers(1, 7))
        sizes |= {"num_local_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts))}
    if family == "qwen3_moe":
        sizes |= {"norm_topk_prob": draw(st.booleans()), "moe_intermediate_size": draw(st.integers(1, 30))}
        sizes |= {"decoder_sparse_step": draw(st.integers(1, 2)), "mlp_only_layers": draw(st.sampled_from([[], [0], [0, 2]]))}
    if family in ("llama", "qwen3", "qwen3_moe"):
        sizes["attention_bias"] = draw(st.booleans())
    if family == "llama":
        sizes["mlp_bias"] = draw(st.booleans())
    return family, sizes


@settings(max_examples=25)
@given(models(), st.integers(0, 99))
def test_any_model_agrees_with_transformers(drawn: tuple[str, dict[str, Any]], seed: int) -> None:
    family, sizes = drawn
    with tempfile.TemporaryDirectory() as folder:
        assert_agrees(save(folder, family, seed, **sizes), length=30)


@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("dense", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {}])
def test_qwen3s_experts_may_renormalise_and_skip_layers(dense: dict[str, Any], renormalised: bool, tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3_moe", norm_topk_prob=renormalised, num_hidden_layers=3, **dense)
    config = load_checkpoint(folder).config
    assert config.sparse_layers == {"mlp_only_layers": (0, 2), "decoder_sparse_step": (1,)}.get(next(iter(dense), ""), (0, 1, 2))
    assert config.moe is not None and config.moe.renormalise == renormalised
    assert_agrees(folder)


def test_rows_of_a_mixed_batch_agree_each_with_its_own_reference(tmp_path: Path) -> None:
    folder = save(tmp_path, "mistral", sliding_window=6)
    a, b, c = prompt(20, seed=1), prompt(13, seed=2), prompt(9, seed=3)
    paged = Paged(ours(folder), rows=3)
    steps = [
        [(0, a[:9], 0), (1, b[:12], 0)],
        [(1, b[12:], 12), (2, c[:4], 0), (0, a[9:19], 9)],  # decoding, a new prompt and a chunk together
        [(0, a[19:], 19), (2, c[4:], 4)],
    ]
    got: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    for step in steps:
        logits = paged.step(step)
        for row, part in zip(step, logits.split([len(ids) for _, ids, _ in step])):
            got[row[0]].append(part)
    for row, ids in enumerate((a, b, c)):
        torch.testing.assert_close(torch.cat(got[row]), reference(folder, ids), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_of_the_engine_are_those_of_generate(family: str, tmp_path: Path) -> None:
    more = {"sliding_window": 7} if family == "mistral" else {}
    folder = save(tmp_path, family, **more)
    prompts = [prompt(n, seed=n) for n in (1, 4, 17)]
    outputs = LLM(folder, dtype="float32", block_size=4, max_num_batched_tokens=8).generate(
        prompts, SamplingParams(max_tokens=24)
    )
    peer = oracle(folder)
    for ids, output in zip(prompts, outputs, strict=True):
        full = peer.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=24, do_sample=False
        )
        assert list(output.token_ids) == full[0, len(ids) :].tolist()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_a_model_stored_in_16_bits_is_computed_in_32_where_asked(stored: torch.dtype, tmp_path: Path) -> None:
    folder = save(tmp_path, "llama")
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(folder)
    assert {t.dtype for t in load_checkpoint(folder).weights.values()} == {stored}
    assert_agrees(folder)
