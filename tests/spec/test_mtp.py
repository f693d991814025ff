"""MTP heads: kept in a file, used with a model, refused where they do not belong to it."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.spec.mtp import HEADS, MTPHead, MTPProposer

from ..strategies import VOCAB, tiny_engine, tiny_model


def head_of(size: int = 16, vocab: object = range(VOCAB)) -> MTPHead:
    torch.manual_seed(1)
    head = MTPHead(size, 8, torch.tensor(list(vocab)))
    torch.nn.init.normal_(head.join.weight, std=0.3)
    torch.nn.init.normal_(head.down.weight, std=0.3)
    return head


def test_a_proposer_guesses_what_the_head_says_and_leaves_the_head_as_it_was():
    head, model = head_of(vocab=range(3, VOCAB)), tiny_model()
    before = {name: t.clone() for name, t in head.state_dict().items()}
    proposer = MTPProposer(head, model)
    state, embedded = torch.randn(5, 16, dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)
    assert torch.equal(proposer.head(state, embedded), head.double()(state, embedded))
    assert proposer.output.out_features == VOCAB - 3
    assert all(torch.equal(t, before[name].to(t.dtype)) for name, t in head.state_dict().items())
    assert {t.dtype for t in head_of().parameters()} == {torch.float32}


def test_its_work_reads_what_it_holds():
    proposer = MTPProposer(head_of(), tiny_model())
    assert proposer.work(3).weight_bytes == proposer.weight_bytes
    numbers = 16 * 32 + 16 * 16 + 8 * 16 + VOCAB * 16
    assert proposer.work(3).total_flops == 2 * 3 * numbers and proposer.weight_bytes == 8 * numbers


def test_a_head_comes_back_from_its_file_in_sixteen_bits(tmp_path):
    head = head_of(vocab=[5, 3, 9])
    head.save(tmp_path / "head", {"seed": "1"})
    again = MTPHead.load(tmp_path / "head")
    assert again.get_buffer("vocab").tolist() == [5, 3, 9]
    for name, t in head.named_parameters():
        assert torch.equal(again.state_dict()[name], t.to(torch.bfloat16).float())


@pytest.mark.parametrize("what", [b"", b"no safetensors at all", b"\xff" * 64])
def test_a_file_that_is_no_head_is_named(tmp_path, what):
    file = tmp_path / "head"
    file.write_bytes(what)
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} holds no MTP head"):
        MTPHead.load(file)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vocab", lambda t: t[0], r"vocab is a list of whole numbers, got int32 \[\]"),
        ("vocab", lambda t: t.reshape(4, -1), r"got int32 \[4, 8\]"),
        ("vocab", lambda t: t + 0.5, r"got float32 \[32\]"),
        ("join.weight", lambda t: t * float("nan"), "join.weight holds a number that is not finite"),
        ("down.weight", lambda t: t + float("inf"), "down.weight holds a number that is not finite"),
    ],
)
def test_a_head_that_could_not_draft_is_refused_when_it_is_loaded(tmp_path, name, change, message):
    file = tmp_path / "head"
    head_of().save(file, {})
    tensors = load_file(file)
    save_file(tensors | {name: change(tensors[name]).contiguous()}, file)
    with pytest.raises(ValueError, match=f"holds no MTP head: .*{message}"):
        tiny_engine(speculative="mtp", draft_model=file)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (lambda: head_of(8), "states of 8, the model's have 16"),
        (lambda: head_of(vocab=[2, VOCAB]), f"guesses tokens .*{VOCAB}.*the model's are 0 to {VOCAB - 1}"),
        (lambda: head_of(vocab=[-1, 2]), "guesses tokens .*-1"),
        (lambda: head_of(vocab=[]), "guesses tokens"),
    ],
)
def test_a_head_of_another_model_is_refused(head, message):
    with pytest.raises(ValueError, match=message):
        MTPProposer(head(), tiny_model())


@pytest.mark.model
@pytest.mark.skipif(not (HEADS / "smollm2-135m.safetensors").exists(), reason="no head was trained yet")
def test_the_head_that_comes_with_the_default_model_is_found_and_saves_passes():
    llm = LLM(speculative="mtp", dtype="float32", num_blocks=32)
    (out,) = llm.chat([{"role": "user", "content": "Why do cats sleep so much?"}], SamplingParams(max_tokens=48))
    assert out.drafts.accepted > 8 and out.drafts.passes < len(out.token_ids) - 8
