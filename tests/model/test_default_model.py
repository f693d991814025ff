"""The default model, weights and text, against `transformers` with the same weights; and what 16 bits change."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

import pytest
import torch
import transformers
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.engine.batch import ForwardBatch, Row
from minillm.model.loader import load_checkpoint

from ..strategies import one_thread  # noqa: F401 - two threads that wait for each other on a busy machine take minutes

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "1, 1, 2, 3, 5, 8,",
    "Q: Why is the sky blue?\nA:",
    "Die Hauptstadt von Deutschland ist",
    "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
    "a",
    "In 1969, humans first walked on the Moon. " * 6 + "The mission was called",
]
NEW = 64
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
NEAR_TIE = 0.75  # the best two of 49,152 logits, half of the time 2.2 apart; bfloat16 chose another token at up to 0.19


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM("smollm2-135m", dtype="float32", kv_memory=2**28)


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, 64 greedy ids) of the engine, all ten at once."""
    outputs = llm.generate(PROMPTS, GREEDY)
    return [(list(o.prompt_token_ids), list(o.token_ids)) for o in outputs]


@pytest.fixture(scope="module")
def peer() -> Iterator[Any]:
    checkpoint = load_checkpoint("smollm2-135m")
    c = checkpoint.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, max_position_embeddings=c.max_position,
        rms_norm_eps=c.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta}, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    lacking, spare = model.load_state_dict(dict(checkpoint.weights), strict=False)
    assert lacking == ["lm_head.weight"] and not spare
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no weights, and came out empty
    yield model.eval()


@torch.inference_mode()
def all_logits(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Logits of every token of every sequence, float32, in one batch each."""
    out = []
    for ids in sequences:
        store = PlainKVStore.allocate(model.config, 16 * 20, model.dtype)
        batch = ForwardBatch.build([Row(ids, 0, range(1, 20))], 16)
        batch = dataclasses.replace(batch, logit_indices=torch.arange(len(ids)))
        backend = TorchAttention()
        out.append(model(batch, store, backend, backend.plan(batch, model.dtype)).float())
    return out


@pytest.fixture(scope="module")
def in_32_bits(llm: LLM, texts: list[tuple[list[int], list[int]]]) -> list[Tensor]:
    return all_logits(llm.model, [prompt + text for prompt, text in texts])


def margin(logits: Tensor) -> Tensor:
    """[tokens, vocab] → how far the best token is ahead of the second, [tokens]."""
    best, second = logits.topk(2).values.unbind(-1)
    return best - second


def test_64_greedy_tokens_of_ten_prompts_are_those_of_transformers(texts: list[tuple[list[int], list[int]]], peer: Any) -> None:
    width = max(len(prompt) for prompt, _ in texts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in texts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in texts])
    full = peer.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    for (_, text), theirs, prompt in zip(texts, full[:, width:].tolist(), PROMPTS, strict=True):
        assert text == theirs, prompt


def test_logits_are_those_of_transformers(texts: list[tuple[list[int], list[int]]], in_32_bits: list[Tensor], peer: Any) -> None:
    for (prompt, text), logits in list(zip(texts, in_32_bits, strict=True))[-3:]:
        with torch.inference_mode():
            theirs = peer(torch.tensor([prompt + text])).logits[0]
        assert theirs.abs().max() > 10
        torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-3)  # measured: 9e-5


def test_bfloat16_moves_logits_little_and_changes_the_best_token_at_near_ties_only(
    llm: LLM, texts: Any, in_32_bits: list[Tensor]
) -> None:
    model = llm.model.converted(torch.bfloat16, "cpu")
    exact, rounded = torch.cat(in_32_bits), torch.cat(all_logits(model, [prompt + text for prompt, text in texts]))
    error = (exact - rounded).abs()
    log_p, log_q = exact.log_softmax(-1), rounded.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    flips = exact.argmax(-1) != rounded.argmax(-1)
    # measured over 813 positions, logits up to 43: mean 0.11, worst 2.0; KL mean 0.0010, worst 0.035; 9 flips.
    # transformers in bfloat16, against the same 32-bit logits: mean 0.12, worst 2.6; KL mean 0.0012, worst 0.050; 17 flips.
    assert error.mean() < 0.25 and error.max() < 5
    assert divergence.mean() < 0.003 and divergence.max() < 0.15
    assert flips.float().mean() < 0.03 and (margin(exact)[flips] < NEAR_TIE).all()
    assert margin(exact).median() > 2


def test_a_question_in_the_chat_template_is_answered(llm: LLM) -> None:
    (answer,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=40))
    assert "Paris" in answer.text and answer.finish_reason == "stop"
    assert not any(mark in answer.text for mark in ("<|im_end|>", "<|im_start|>", "assistant"))
