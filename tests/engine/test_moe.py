"""Mixtures of experts in the engine: what is counted, that answers stay a request's own, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minillm import LLM, ModelConfig, SamplingParams, Transformer
from minillm.model.moe_config import MoEConfig
from minillm.perf.roofline import decode_work
from minillm.quant.awq_checkpoint import save_awq
from minillm.quant.config import QuantConfig
from minillm.quant.linear import PlainLinear

from ..strategies import EXPERTS, reference, run_to_end, tiny_engine, tiny_llm, tiny_model

MOE = tiny_model(EXPERTS).config.moe
LONG = SamplingParams(max_tokens=9, ignore_eos=True)


def counts(llm: LLM) -> tuple[int, int, int, int]:
    m = llm.meter
    return m.mixtures, m.routed_rows, m.experts_touched, m.busiest_rows


def test_every_token_goes_to_two_experts_in_each_of_two_mixtures() -> None:
    llm = tiny_llm(EXPERTS)
    llm.generate([4, 5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    mixtures, routed, touched, busiest = counts(llm)
    assert (mixtures, routed) == (2 * 5, 2 * 2 * (4 + 4)), "a prompt of 4 and four decoding steps"
    assert touched >= 2 * 2 * 5 and busiest >= 2 * 4 + 2
    rows = llm.meter.expert_rows
    assert set(rows) == {0, 2}, "layer 1 is dense"
    assert all(len(r) == 5 and sum(r) == 16 for r in rows.values())
    assert llm.meter.snapshot().experts_per_step == touched / mixtures
    assert llm.meter.snapshot().by_verb()["compute less"]["experts_touched"] == touched
    llm.meter.reset()
    assert counts(llm) == (0, 0, 0, 0) and llm.meter.expert_rows == {}
    assert "mixtures" not in str(tiny_llm().meter), "a dense model does not speak of experts"


def test_a_decoding_step_reads_the_experts_that_it_touches_and_no_others() -> None:
    llm = tiny_llm(EXPERTS)
    config = llm.model.config
    llm.engine.add_request([4], LONG)
    llm.engine.step()
    before = llm.meter.snapshot()
    llm.engine.step()
    step = llm.meter.snapshot() - before
    assert (step.mixtures, step.routed_rows, step.experts_touched, step.busiest_rows) == (2, 4, 4, 2)
    norms_and_rows = (2 * 3 + 1) * 16 + 16 + 2 * 4  # norms, a row of the embedding, its cosines and sines
    biases = 2 * MOE.num_experts
    assert step.weight_bytes == 8 * (config.matmul_params + biases + norms_and_rows)
    alone = decode_work(config, 1, 2, dtype="float64", bytes_per_weight=8)
    assert step.total_flops == alone.total_flops


def test_two_equal_requests_touch_no_more_experts_than_one() -> None:
    one, two = tiny_llm(EXPERTS), tiny_llm(EXPERTS)
    one.generate([4, 5, 6], LONG)
    two.generate([[4, 5, 6], [4, 5, 6]], LONG)
    assert two.meter.routed_rows == 2 * one.meter.routed_rows and two.meter.experts_touched == one.meter.experts_touched
    assert two.meter.busiest_rows == 2 * one.meter.busiest_rows


@pytest.mark.parametrize(
    "options",
    [
        {}, {"overlap": True}, {"kv_cache": "none"}, {"batching": "static"}, {"max_num_batched_tokens": 3},
        {"prefix_cache": "radix"}, {"speculative": "ngram"}, {"speculative": "draft", "draft_model": [0, 1]},
    ],
)  # fmt: skip
def test_answers_are_the_references_under_every_technique(options: dict[str, Any]) -> None:
    engine = tiny_engine(EXPERTS, **options)
    prompts = [[4, 5] * n for n in (1, 2, 5)]
    names = [engine.add_request(p, LONG) for p in prompts]
    done = run_to_end(engine)
    assert [done[n].token_ids for n in names] == [tuple(reference(EXPERTS).greedy(p, 9)) for p in prompts]
    assert engine.meter.routed_rows == 2 * 2 * engine.meter.tokens_computed + 2 * 2 * engine.meter.padded_tokens or options


def test_padding_is_routed_like_any_token_and_counted() -> None:
    llm = tiny_llm(EXPERTS, batching="static")
    llm.generate([[4], [5] * 6], SamplingParams(max_tokens=2, ignore_eos=True))
    assert llm.meter.padded_tokens == 5
    assert llm.meter.routed_rows == 2 * 2 * (llm.meter.tokens_computed + 5)


def test_a_method_of_ones_own_stores_every_expert() -> None:
    seen = []

    class Noting(PlainLinear):
        def for_layer(self, name: str) -> PlainLinear:
            seen.append(name)
            return PlainLinear()

    llm = tiny_llm(EXPERTS, quantization=Noting())
    assert {f"model.layers.0.mlp.experts.{e}.{part}" for e in range(5) for part in ("gate_up_proj", "down_proj")} < set(seen)
    assert llm.generate([4, 5], LONG)[0].token_ids == tiny_llm(EXPERTS).generate([4, 5], LONG)[0].token_ids


WIDE = Transformer.random(
    ModelConfig(32, 64, 64, 2, 4, 2, 16, 48, moe=MoEConfig(4, 2, 64, shared_size=64), name="wide"), dtype=torch.float32
)


def test_rounding_to_nearest_packs_every_expert() -> None:
    plain, packed = LLM(WIDE, num_blocks=20), LLM(WIDE, num_blocks=20, quantization="rtn")
    assert packed.generate([4, 5], LONG)[0].finish_reason == "length"
    plain.generate([4, 5], LONG)
    assert packed.meter.weight_bytes < plain.meter.weight_bytes / 3
    before, after = (m.dense_weights()["model.layers.1.mlp.experts.3.down_proj.weight"] for m in (WIDE, packed.model))
    assert 0 < (before - after).abs().max() < 0.1


def test_fp8_packs_every_expert() -> None:
    packed = LLM(WIDE, num_blocks=20, quantization="fp8")
    assert packed.generate([4, 5], LONG)[0].finish_reason == "length"
    held = packed.model.layers[1].mlp.down.linears[3]._buffers
    assert held["e4m3"].dtype == torch.float8_e4m3fn


def test_w8a8_without_migration_fits_nothing_and_packs_every_expert() -> None:
    packed = LLM(WIDE, num_blocks=20, quantization=QuantConfig("w8a8", migration=None))
    assert packed.generate([4, 5], LONG)[0].finish_reason == "length"
    held = packed.model.layers[1].mlp.down.linears[3]._buffers
    assert held["codes"].dtype == torch.int8 and packed.meter.flops["int8"] > 0


@pytest.mark.parametrize("method", ["awq", "gptq", "w8a8"])
def test_methods_that_fit_to_a_text_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match=f"{method}.*experts of wide.*'rtn'"):
        LLM(WIDE, num_blocks=20, quantization=method)


def test_the_awq_layout_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="wide is a mixture of experts"):
        save_awq(WIDE, tmp_path)


@pytest.mark.parametrize("option", ["compile", "cuda_graphs"])
def test_what_fixes_a_step_before_it_runs_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=True.*tiny.*leave {option}=False"):
        tiny_llm(EXPERTS, **{option: True})
