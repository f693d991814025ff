"""A request with a seed gets the same tokens whoever runs beside it and however the engine cuts its work into steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minillm import EngineConfig, SamplingParams
from minillm.engine.engine import Engine

from ..strategies import (
    engine_options,
    models,
    poison_freed_blocks,
    run_to_end,
    slots_needed,
    tiny_engine,
    tiny_model,
    workloads,
)

seeded_params = st.builds(
    SamplingParams, max_tokens=st.integers(1, 10), temperature=st.sampled_from([0.7, 1.0, 2.0]), top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.6, 1.0]), seed=st.integers(0, 2**63 - 1), ignore_eos=st.booleans(),
)  # fmt: skip


def alone(model, prompt, params):
    """The tokens of a request that has a roomy engine to itself."""
    engine = tiny_engine(model[0], attention_window=model[1], attention_sinks=model[2])
    engine.add_request(prompt, params)
    (out,) = run_to_end(engine).values()
    return out.token_ids, out.finish_reason


@settings(max_examples=80)
@given(st.data(), models, workloads(seeded_params, max_requests=7))
def test_seeded_tokens_do_not_depend_on_batch_order_chunks_cache_or_preemption(data, model, work):
    options = data.draw(engine_options(max(slots_needed(p, s) for p, s in work)))
    view = {"attention_window": model[1], "attention_sinks": model[2]}
    engine = Engine(tiny_model(model[0]), None, EngineConfig(seed=data.draw(st.integers(0, 5)), **options, **view))
    poison_freed_blocks(engine)
    order = data.draw(st.permutations(range(len(work))))
    names = {i: engine.add_request(*work[i]) for i in order}
    requests = list(engine.scheduler.waiting)
    done = run_to_end(engine)
    event("somebody was preempted" if any(r.num_preemptions for r in requests) else "nobody was preempted")
    for i, (prompt, params) in enumerate(work):
        out = done[names[i]]
        assert (out.token_ids, out.finish_reason) == alone(model, prompt, params)


PROMPT, PARAMS = [3, 9, 4, 11, 27], SamplingParams(max_tokens=12, temperature=1.5, seed=41, ignore_eos=True)


def six_others(with_seeds: bool) -> list[tuple[list[int], SamplingParams]]:
    return [
        ([i + 2] * (i + 1), SamplingParams(max_tokens=9, temperature=i / 3, seed=i if with_seeds else None, ignore_eos=True))
        for i in range(6)
    ]


@pytest.mark.parametrize("with_seeds", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 2},
        {"num_blocks": 6, "block_size": 3},
        {"batching": "static", "max_num_seqs": 4},
        {"kv_cache": "none", "max_num_batched_tokens": 40},
    ],
    ids=["batch of 7", "chunked", "preempted", "static", "recomputed"],
)
def test_the_same_tokens_alone_and_in_a_shuffled_batch_of_7(options, with_seeds):
    work = [(PROMPT, PARAMS), *six_others(with_seeds)]
    random.Random(5).shuffle(work)
    engine = tiny_engine(**options)
    mine = [engine.add_request(*w) for w in work][work.index((PROMPT, PARAMS))]
    requests = list(engine.scheduler.waiting)
    assert run_to_end(engine)[mine].token_ids == alone((3, None, 0), PROMPT, PARAMS)[0]
    if options.get("num_blocks"):
        assert sum(r.num_preemptions for r in requests) > 0, "this pool was meant to be too small"


def test_different_seeds_give_different_tokens_and_no_seed_draws_one_from_the_engine():
    def run(engine_seed=0, **params):
        engine = tiny_engine(seed=engine_seed)
        engine.add_request(PROMPT, SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True, **params))
        (out,) = run_to_end(engine).values()
        return out.token_ids

    assert run(seed=1) != run(seed=2)
    assert run(engine_seed=7, seed=1) == run(engine_seed=8, seed=1)
    assert run(engine_seed=7) == run(engine_seed=7) != run(engine_seed=8)


def test_requests_without_a_seed_differ_from_each_other():
    engine = tiny_engine()
    for _ in range(4):
        engine.add_request(PROMPT, SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True))
    assert len({o.token_ids for o in run_to_end(engine).values()}) == 4
