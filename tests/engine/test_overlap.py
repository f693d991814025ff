"""overlap=True: the same outputs as one step at a time, and nothing is taken from a step that is still running."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import Engine, EngineConfig, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.engine.overlap import Flight

from ..strategies import (
    EOS,
    FakeTokenizer,
    WatchedAttention,
    engine_options,
    greedy,
    models,
    poison_freed_blocks,
    run_to_end,
    scripted_llm,
    slots_needed,
    tiny_engine,
    tiny_model,
    workloads,
)

TOKENIZER = FakeTokenizer(EOS)


def ask(engine, *work, **params):
    return [engine.add_request(prompt, SamplingParams(max_tokens=n, ignore_eos=True, **params)) for prompt, n in work]


some_params = st.builds(
    SamplingParams, max_tokens=st.integers(1, 12), ignore_eos=st.booleans(), temperature=st.sampled_from([0, 0, 0.7, 3.0]),
    seed=st.integers(0, 5), top_k=st.sampled_from([0, 3]), stop=st.lists(st.sampled_from(["ab", "a", "€"]), max_size=2),
    logprobs=st.sampled_from([None, None, 2]),
)  # fmt: skip


@settings(max_examples=80)
@given(st.data(), models, workloads(some_params))
def test_outputs_are_those_of_one_step_at_a_time(data, model, work):
    """Tokens, text, reasons and log-probabilities; a step at a time has wasted nothing."""
    options = data.draw(engine_options(max(slots_needed(p, s) for p, s in work)).filter(lambda o: o["kv_cache"] != "none"))
    view = {"attention_window": model[1], "attention_sinks": model[2]}
    done, wasted = [], []
    for overlap in (False, True):
        engine = Engine(tiny_model(model[0]), TOKENIZER, EngineConfig(**(options | view | {"overlap": overlap})))
        poison_freed_blocks(engine)
        names = [engine.add_request(prompt, params) for prompt, params in work]
        outputs = run_to_end(engine)
        done.append([replace(outputs[name], delta="", num_cached_tokens=0, logprobs=rounded(outputs[name])) for name in names])
        wasted.append(engine.meter.wasted)
        pool = engine.cache.pool
        pool.check()
        assert pool.num_referenced == 0 and not engine._flights
    assert done[0] == done[1] and wasted[0] == 0
    assert wasted[1] <= sum(o.finish_reason == "stop" for o in done[1]), "a text that stops costs one token at most"


def rounded(output):
    """Batches differ, and with them the last bits."""
    return output.logprobs and tuple({t: round(p, 9) for t, p in one.items()} for one in output.logprobs)


def test_the_next_step_is_planned_while_one_runs():
    """The model waits, in the first layer of each step, for the plan of the next one: step by step it would wait forever."""

    class Waiting(TorchAttention):
        def forward(self, q, layer, store, plan):
            if layer == 0 and ahead:
                assert planned.acquire(timeout=30), "nobody plans the next step while this one runs"
            return super().forward(q, layer, store, plan)

    planned, ahead = threading.Semaphore(0), [True] * 6
    engine = tiny_engine(attention_backend=Waiting(), overlap=True)
    schedule = engine.scheduler.schedule

    def announcing():
        plan = schedule()
        if len(engine._flights) and ahead:
            ahead.pop()
            planned.release()
        return plan

    engine.scheduler.schedule = announcing
    (name,) = ask(engine, ([4, 5], 7))
    assert run_to_end(engine)[name].token_ids == greedy([4, 5], 7)
    assert not ahead, "all six later steps were planned while the one before them ran"


def test_a_length_that_is_known_ahead_wastes_nothing():
    counts = []
    for overlap in (False, True):
        engine = tiny_engine(overlap=overlap)
        ask(engine, ([4, 5], 5), ([6] * 7, 3))
        run_to_end(engine)
        m = engine.meter
        counts.append((m.steps, m.output_tokens, m.row_passes, m.tokens_computed, m.stalled_tokens, m.wasted))
    assert counts[0] == counts[1] == (5, 8, 8, 9 + 4 + 2, 0, 0), "nor does anybody stall who only waits for a last token"


@pytest.mark.parametrize("stop", [{"stop": "bc"}, {"stop_token_ids": [4]}, {}])
def test_a_text_that_stops_costs_one_token_which_nobody_sees(stop):
    """a b c d e …: the stop is found when the token after it is on its way."""
    outputs = []
    for overlap in (False, True):
        llm = scripted_llm(*"abcdefgh", eos=[] if stop else [4], overlap=overlap)
        outputs += llm.generate([[0]], SamplingParams(max_tokens=8, **stop))
        wasted, row_passes, tokens = llm.meter.wasted, llm.meter.row_passes, llm.meter.output_tokens
        assert wasted == overlap and row_passes == tokens + wasted
        assert llm.engine.cache.pool.num_referenced == 0 and not llm.engine.has_work
    assert outputs[0] == replace(outputs[1], request_id=outputs[0].request_id)


def test_an_aborted_request_keeps_its_blocks_until_its_step_has_landed():
    engine = tiny_engine(overlap=True)
    gone, stays = ask(engine, ([4] * 9, 20), ([5, 6], 6))
    for _ in range(3):
        engine.step()
    request = next(r for r in engine.scheduler.running if r.request_id == gone)
    held, pool = len(request.blocks), engine.cache.pool
    before = pool.num_free
    assert engine.abort(gone).finish_reason == "abort" and request.num_in_flight == 1
    assert pool.num_free == before and len(request.blocks) == held == 3
    engine.step()
    assert request.blocks == [] and pool.num_free >= before + held - 1 and engine.meter.wasted == 1
    assert run_to_end(engine)[stays].token_ids == greedy([5, 6], 6)


def test_aborting_the_last_request_leaves_an_engine_that_is_idle():
    engine = tiny_engine(overlap=True)
    (name,) = ask(engine, ([4] * 9, 20))
    engine.step()
    engine.abort(name)
    assert not engine.has_work and engine.cache.pool.num_free == engine.cache.pool.num_blocks and engine.step() == []


def test_an_id_may_be_used_again_while_the_step_of_its_last_owner_is_in_flight():
    engine = tiny_engine(overlap=True)
    ask(engine, ([9, 8], 12))
    engine.add_request([4, 5], SamplingParams(max_tokens=9, ignore_eos=True), "again")
    engine.step()
    engine.abort("again")
    engine.add_request([6], SamplingParams(max_tokens=4, ignore_eos=True), "again")
    assert run_to_end(engine)["again"].token_ids == greedy([6], 4)


def test_a_step_in_flight_keeps_its_own_block_tables():
    """The request's table grows when the next step is planned, and may be changed when the last one lands."""
    engine = tiny_engine(overlap=True, block_size=1, prefix_cache="radix")
    ask(engine, ([4, 5], 6), ([4, 5], 6))
    for _ in range(3):
        engine.step()
        (flight,) = engine._flights
        tables = [tuple(table) for table in flight.step.batch.tables]
        for request in engine.scheduler.running:
            request.blocks.append(request.blocks.pop(0))  # whatever is done to them
        assert [tuple(table) for table in flight.step.batch.tables] == tables
        for request in engine.scheduler.running:
            request.blocks.insert(0, request.blocks.pop())


def test_requests_that_push_each_other_out_say_what_they_would_alone():
    engine = tiny_engine(num_blocks=6, overlap=True)
    poison_freed_blocks(engine)
    work = [([t] * 6, 10) for t in (4, 5, 6)]
    names = ask(engine, *work)
    requests = list(engine.scheduler.waiting)
    done = run_to_end(engine)
    assert [done[n].token_ids for n in names] == [greedy(p, k) for p, k in work]
    assert sum(r.num_preemptions for r in requests) > 0


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("after", range(6))
def test_a_step_that_fails_is_planned_again_with_the_one_behind_it(after, error):
    backend = WatchedAttention()
    engine = tiny_engine(attention_backend=backend, overlap=True, max_num_batched_tokens=4, prefix_cache="radix")
    poison_freed_blocks(engine)
    work = [([4] * 6, 5), ([4] * 6, 7), ([7], 3)]
    names = ask(engine, *work)
    backend.fail_after(after, error)
    done, raised = {}, 0
    while engine.has_work:
        try:
            done.update({o.request_id: o.token_ids for o in engine.step() if o.finished})
        except (RuntimeError, KeyboardInterrupt) as seen:
            assert seen is error and not engine._flights
            assert all(not r.num_in_flight and not r.num_pending for r in engine.scheduler.running)
            raised += 1
    assert raised == 1 and [done[n] for n in names] == [greedy(p, k) for p, k in work]
    assert engine.cache.pool.num_referenced == 0


def test_an_interrupt_of_the_wait_loses_nothing(monkeypatch):
    engine = tiny_engine(overlap=True)
    (name,) = ask(engine, ([4, 5], 6))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Flight, "result", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert run_to_end(engine)[name].token_ids == greedy([4, 5], 6)


def test_a_tokenizer_that_raises_ends_its_request_and_not_the_step_behind_it():
    class Raises(FakeTokenizer):
        def decode(self, ids):
            if 9 in ids and len(seen) < 1:
                seen.append(ids)
                raise KeyError("decode")
            return super().decode(ids)

    seen: list = []
    llm = scripted_llm(*"abcdefghijklm", overlap=True)
    llm.engine.tokenizer = Raises(pieces=[b"?", *(bytes([c]) for c in b"abcdefghijklm")])
    names = [llm.engine.add_request([start], SamplingParams(max_tokens=4)) for start in (0, 7)]
    done = {}
    with pytest.raises(KeyError, match="decode"):
        while llm.engine.has_work:
            done.update({o.request_id: o for o in llm.engine.step() if o.finished})
    done.update(run_to_end(llm.engine))
    assert list(done) == names[:1] and done[names[0]].text == "abcd"
    assert llm.engine.cache.pool.num_referenced == 0


@pytest.mark.parametrize(
    "options, message",
    [({"overlap": 1}, "overlap must be True or False, got 1"), ({"overlap": True, "kv_cache": "none"}, "kv_cache='none'")],
)
def test_what_cannot_overlap_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_the_thread_ends_with_its_engine():
    before = threading.active_count()
    engine = tiny_engine(overlap=True)
    ask(engine, ([4, 5], 3))
    run_to_end(engine)
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("minillm-model")][-1:]
    del engine
    import gc

    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive() and threading.active_count() <= before
