"""Two engines in one process share weights and nothing else, and the weights stay as they are."""

from __future__ import annotations

import threading

import torch

from minillm import EngineConfig, SamplingParams
from minillm.engine.engine import Engine

from ..strategies import greedy, reference, run_to_end, tiny_engine, tiny_model


def test_two_engines_over_one_model_are_independent():
    """Interleaved steps, different options; each gives what it gives alone."""
    a = tiny_engine(seed=1, block_size=3, num_blocks=9, max_num_batched_tokens=4)
    b = tiny_engine(seed=2, batching="static", kv_cache="contiguous")
    hot = SamplingParams(max_tokens=6, temperature=1.2, ignore_eos=True)

    def load(engine):
        for prompt in ([4, 5], [6] * 7, [8, 9, 10]):
            engine.add_request(prompt, hot)

    def finished(engine):
        return {o.request_id: o.token_ids for o in engine.step() if o.finished}

    load(a), load(b)
    together = ({}, {})
    while a.has_work or b.has_work:
        for engine, done in zip((a, b), together, strict=True):
            done.update(finished(engine))
    for done, options in zip(
        together,
        (
            {"seed": 1, "block_size": 3, "num_blocks": 9, "max_num_batched_tokens": 4},
            {"seed": 2, "batching": "static", "kv_cache": "contiguous"},
        ),
        strict=True,
    ):
        one = tiny_engine(**options)
        load(one)
        assert {n: o.token_ids for n, o in run_to_end(one).items()} == done
    assert together[0] != together[1], "their seeds differ"


def test_two_engines_of_different_precision_and_shape_are_independent():
    models = {"a": tiny_model(3).converted(torch.float32, "cpu"), "b": tiny_model(1), "c": tiny_model(2, 4)}
    engines = {k: Engine(m, None, EngineConfig(num_blocks=20, block_size=3)) for k, m in models.items()}
    names = {k: e.add_request([4, 5, 6, 7, 8], SamplingParams(max_tokens=8, ignore_eos=True)) for k, e in engines.items()}
    done: dict = {}
    while any(e.has_work for e in engines.values()):
        for k, e in engines.items():
            for out in e.step():
                done[k] = out
    assert done["b"].token_ids == tuple(reference(1).greedy([4, 5, 6, 7, 8], 8))
    assert done["c"].token_ids == tuple(reference(2, 4).greedy([4, 5, 6, 7, 8], 8))
    assert len({id(e.store) for e in engines.values()}) == 3 and len(names) == 3


def test_engines_in_two_threads_do_not_disturb_each_other():
    results: dict[int, tuple[int, ...]] = {}

    def work(t):
        engine = tiny_engine()
        name = engine.add_request([t, 5], SamplingParams(max_tokens=10, ignore_eos=True))
        results[t] = run_to_end(engine)[name].token_ids

    threads = [threading.Thread(target=work, args=(t,)) for t in (4, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {t: greedy([t, 5], 10) for t in (4, 9)}


def test_the_model_is_unchanged_after_use():
    before = {name: t.clone() for name, t in tiny_model().dense_weights().items()}
    engine = tiny_engine()
    engine.add_request([4, 5], SamplingParams(max_tokens=5, temperature=1.0, seed=1, logprobs=2))
    run_to_end(engine)
    after = tiny_model().dense_weights()
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
