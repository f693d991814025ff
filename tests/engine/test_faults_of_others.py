"""What a caller's own parts do wrong, or another caller does, must not stop, lose or mix up anybody's work."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Sequence

import pytest
import torch

from minillm import LLM, ModelConfig, SamplingParams, Transformer

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=48
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.random(CONFIG, dtype=torch.float64)


def params(n: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=n, ignore_eos=True, **options)


def test_a_stream_ends_when_its_request_is_aborted_elsewhere_while_another_output_waits(model: Transformer) -> None:
    llm = LLM(model, block_size=4, num_blocks=40)
    stream = llm.stream([1, 2], params(10))
    next(stream)
    llm.engine.add_request([3], params(1), "other")
    next(stream)
    llm.engine.abort("request-0")
    assert list(stream) == []
    assert [o.request_id for o in llm.engine.step()] == ["other"], "the other caller's output is still there"


def test_generate_does_not_take_an_id_whose_output_nobody_has_taken_yet(model: Transformer) -> None:
    llm = LLM(model, block_size=4, num_blocks=40)
    llm.engine.add_request([9, 9, 9], params(1), "request-1")
    llm.generate([1, 2], params(3))
    assert llm.generate([7], params(4))[0].prompt_token_ids == (7,)
    assert [o.prompt_token_ids for o in llm.engine.step()] == [(9, 9, 9)]


class ForgetfulTokenizer:
    """Raises once in the middle."""

    eos_token_ids = ()
    calls = 0

    def encode(self, text: str) -> list[int]:
        return [1]

    def decode(self, ids: Sequence[int]) -> str:
        self.calls += 1
        if self.calls == 5:
            raise KeyError("decode")
        return "".join(chr(97 + i % 26) for i in ids)


def test_a_tokenizer_that_raises_ends_one_request_and_the_others_go_on(model: Transformer) -> None:
    llm = LLM(model, tokenizer=ForgetfulTokenizer(), block_size=4, num_blocks=40)
    names = [llm.engine.add_request([i, 2], params(6)) for i in (1, 4)]
    finished, raised = [], 0
    while llm.engine.has_work:
        try:
            finished += [o for o in llm.engine.step() if o.finished]
        except KeyError:
            raised += 1
    alone = LLM(model, tokenizer=ForgetfulTokenizer(), block_size=4, num_blocks=40).generate([[4, 2]], params(2))[0]
    assert raised == 1 and [o.request_id for o in finished] == names[1:]
    assert len(finished[0].token_ids) == 6 and finished[0].token_ids[:2] == alone.token_ids
    assert llm.engine.cache.pool.num_free == 40


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_whose_text_cannot_be_decoded_leaves_nothing_of_the_request(model: Transformer, overlap: bool) -> None:
    class HalfACharacter(ForgetfulTokenizer):
        broken = False

        def decode(self, ids: Sequence[int]) -> str:
            if self.broken:
                raise KeyError("decode")
            return "\ufffd" * bool(ids)  # held back until the end

    tokenizer = HalfACharacter()
    llm = LLM(model, tokenizer=tokenizer, block_size=4, num_blocks=40, overlap=overlap)
    name = llm.engine.add_request([1, 2], params(9))
    for _ in range(3):
        llm.engine.step()
    tokenizer.broken = True
    with pytest.raises(KeyError, match="decode"):
        llm.engine.abort(name)
    assert not llm.engine.knows(name) and not llm.engine.has_work
    assert llm.engine.abort(name) is None and llm.engine.cache.pool.num_free == 40


class RaisingPrefixCache:
    def match(self, token_ids: Sequence[int]) -> list[int]:
        return []

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        raise OSError("no room")

    def holds(self, block: int) -> bool:
        return False

    def evict(self, n: int, evictable: Any) -> list[int]:
        return []


def test_a_prefix_cache_that_raises_leaks_no_block_and_its_own_error_is_seen(model: Transformer) -> None:
    llm = LLM(model, block_size=4, num_blocks=4, prefix_cache=RaisingPrefixCache())
    for _ in range(3):
        with pytest.raises(OSError, match="no room"):
            llm.generate([1, 2, 3, 4, 5], params(3))
        assert llm.engine.cache.pool.num_free == 4 and not llm.engine.has_work


class NaNAttention:
    def __init__(self, inner: Any):
        self.plan, self.work = inner.plan, inner.work

    def forward(self, q: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.full_like(q, float("nan"))


def test_nan_logits_are_an_error_and_not_a_token(model: Transformer) -> None:
    from minillm.attention.torch_backend import TorchAttention

    llm = LLM(model, num_blocks=8, attention_backend=NaNAttention(TorchAttention()))
    with pytest.raises(RuntimeError, match="NaN"):
        llm.generate([1, 2], params(2))
    assert llm.engine.cache.pool.num_referenced == 0


def test_a_fraction_is_a_temperature(model: Transformer) -> None:
    same = [LLM(model).generate([1, 2], params(3, temperature=t, seed=1))[0].token_ids for t in (Fraction(1, 2), 0.5)]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    "options",
    [{"attention_backend": 5}, {"attention_backend": None}, {"prefix_cache": None}, {"prefix_cache": True}, {"quantization": 5},
     {"device": None}, {"dtype": 4}, {"num_blocks": 10**30}, {"num_blocks": 10**12}, {"kv_store": int}],
    ids=str,
)  # fmt: skip
def test_a_part_that_does_not_fit_is_refused_before_anything_runs(model: Transformer, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).split("_")[0]):
        LLM(model, **options)
