"""Speculation changes how many passes an answer takes, never the answer."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.quant.config import QuantConfig
from minillm.spec.draft import Draft
from minillm.spec.mtp import MTPHead, MTPProposer
from minillm.spec.train_mtp import states_of

from ..cache.dict_prefix import DictPrefixCache
from ..strategies import VOCAB, greedy, poison_freed_blocks, reference, run_to_end, tiny_engine, tiny_llm, tiny_model


class Oracle:
    """Knows the greedy answer, and says a wrong token instead wherever ``wrong`` is due."""

    def __init__(self, wrong=()):
        self.wrong, self.asked = set(wrong), []

    def propose(self, requests, lengths):
        self.asked.append(list(lengths))
        return [Draft(self.guess(r, n)) for r, n in zip(requests, lengths, strict=True)]

    def guess(self, request, n):
        done = request.num_output_tokens
        answer = greedy(request.token_ids[: request.prompt_len], done + n)[done:]
        return tuple((t + 1) % VOCAB if done + i in self.wrong else t for i, t in enumerate(answer))


class Drawn:
    """Draws drafts from a flat distribution."""

    def propose(self, requests, lengths):
        flat = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
        return [Draft(tuple(range(3, 3 + n)), flat.expand(n, VOCAB)) for n in lengths]


def mtp_proposer():
    torch.manual_seed(0)
    head = MTPHead(16, 8, torch.arange(VOCAB)).double()
    torch.nn.init.normal_(head.join.weight, std=0.3)
    return MTPProposer(head, tiny_model())


PROPOSERS = {
    "ngram": lambda: {"speculative": "ngram"},
    "layers": lambda: {"speculative": "draft", "draft_model": [0]},
    "int8": lambda: {"speculative": "draft", "draft_model": "int8"},
    "two bits": lambda: {"speculative": "draft", "draft_model": QuantConfig(bits=2, group=4)},
    "itself": lambda: {"speculative": "draft", "draft_model": tiny_model()},
    "mtp": lambda: {"speculative": mtp_proposer()},
    "oracle": lambda: {"speculative": Oracle({2, 3, 9})},
}


def serve(prompts, params, **options):
    engine = tiny_engine(**options)
    poison_freed_blocks(engine)
    each = params if isinstance(params, list) else [params] * len(prompts)
    names = [engine.add_request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    done = run_to_end(engine)
    engine.cache.pool.check()
    assert engine.cache.pool.num_referenced == 0
    return [done[name] for name in names], engine


def always(max_tokens, proposer, longest=4, **options):
    """One request whose drafts all have the same length, [2, 3] and max_tokens more."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    (out,), engine = serve([[2, 3]], params, speculative=proposer, adaptive_drafts=False, num_draft_tokens=longest, **options)
    return out, engine


some_prompts = st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=12), min_size=1, max_size=4)


@given(
    prompts=some_prompts, who=st.sampled_from(sorted(PROPOSERS)), block=st.sampled_from([1, 3, 4]), blocks=st.integers(0, 40),
    budget=st.sampled_from([1, 5, 64]), longest=st.integers(1, 6), room=st.sampled_from([2, 8, 64]), adaptive=st.booleans(),
    prefix=st.booleans(), tokens=st.integers(1, 14), view=st.sampled_from([(None, 0), (None, 0), (4, 0), (4, 3), (1, 0)]),
)  # fmt: skip
def test_greedy_output_is_that_of_decoding_without_drafts(
    prompts, who, block, blocks, budget, longest, room, adaptive, prefix, tokens, view
):
    needed = max(len(p) for p in prompts) + tokens
    options = {
        "block_size": block, "num_blocks": -(-needed // block) + blocks, "max_num_batched_tokens": budget,
        "num_draft_tokens": longest, "max_draft_batch": room, "adaptive_drafts": adaptive,
        "prefix_cache": DictPrefixCache(block) if prefix else "none", "attention_window": view[0], "attention_sinks": view[1],
    }  # fmt: skip
    outputs, _ = serve(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True), **options, **PROPOSERS[who]())
    assert [list(o.token_ids) for o in outputs] == [reference(3, *view).greedy(p, tokens) for p in prompts]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "one draft for each request, got None"), ([None], "Drafts, got None"), ([[3]], r"Drafts, got \[3\]"),
        ([Draft((1.5,))], "1.5"), ([Draft("a")], "no token ids"),
        ([Draft((3,), torch.ones(1, 5))], "5"), ([Draft((3,), torch.ones(2, VOCAB))], "2"), ([Draft((3,), [[0.5]])], "0.5"),
        ([Draft((3,), torch.eye(VOCAB)[3:4].to_sparse())], "torch.sparse_coo; probabilities are .* dense"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_draft_is_refused_by_name(answer, message):
    class Wrong:
        def propose(self, requests, lengths):
            return answer

    with pytest.raises(ValueError, match=f"proposer Wrong.*{message}"):
        always(6, Wrong())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("draft", ["a"]),
        ("draft", "01"),
        ("draft", "int3"),
        ("draft", 0),
        ("draft", [0.0]),
        ("mtp", 5),
        ("mtp", [0]),
        ("mtp", b"x"),
    ],
)
def test_a_draft_model_of_a_wrong_kind_is_refused(kind, value):
    with pytest.raises(ValueError, match=f"draft_model for speculative='{kind}' must be .*, got {re.escape(repr(value))}"):
        tiny_engine(speculative=kind, draft_model=value)


def test_a_limit_of_very_many_drafted_tokens_costs_nothing():
    engine = tiny_engine(speculative="ngram", num_draft_tokens=2**70, max_draft_batch=2**70)
    engine.add_request([5, 6] * 5, SamplingParams(max_tokens=6, ignore_eos=True))
    (out,) = run_to_end(engine).values()
    assert out.token_ids == greedy([5, 6] * 5, 6)


@pytest.mark.parametrize("block", [1, 4, 5])
@pytest.mark.parametrize("who", sorted(PROPOSERS))
def test_samples_of_one_prompt_draft_beside_each_other(who, block):
    llm = LLM(tiny_model(), block_size=block, num_blocks=64, **PROPOSERS[who]())
    poison_freed_blocks(llm.engine)
    prompt = [5, 9, 3, 7, 2, 8]
    for out in llm.generate([prompt], SamplingParams(n=3, max_tokens=10, ignore_eos=True)):
        assert out.token_ids == greedy(prompt, 10)
    assert llm.engine.cache.pool.num_free == 64, "no copy of a shared block is forgotten"


@pytest.mark.parametrize("who", ["ngram", "layers", "mtp", "oracle"])
def test_seeded_sampling_gives_the_same_tokens_where_drafts_are_certain(who):
    """A drafting model draws its drafts for requests that sample: there the promise is the distribution, not the tokens."""
    params = [SamplingParams(max_tokens=12, temperature=t, top_k=k, top_p=p, seed=s, ignore_eos=True)
              for s, (t, k, p) in enumerate([(0.7, 0, 1.0), (1.3, 4, 1.0), (1.0, 0, 0.8), (0.0, 0, 1.0)])]  # fmt: skip
    prompts = [[2, 3, 2, 3], [4, 5], [6], [2, 2, 2]]
    plain, _ = serve(prompts, params)
    drafted, engine = serve(prompts, params, **PROPOSERS[who]())
    if who == "layers":
        assert [len(o.token_ids) for o in drafted] == [12] * 4 and drafted[3].token_ids == plain[3].token_ids
    else:
        assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert engine.meter.drafted > 0


@pytest.mark.parametrize("max_tokens", range(1, 8))
@pytest.mark.parametrize("wrong", [(), (1,), (0, 2)])
def test_an_answer_ends_exactly_at_max_tokens(max_tokens, wrong):
    out, engine = always(max_tokens, Oracle(wrong), 5)
    assert out.token_ids == greedy([2, 3], max_tokens) and out.finish_reason == "length"
    assert engine.meter.output_tokens == max_tokens


def test_a_stop_inside_an_accepted_run_ends_there_and_what_follows_leaves_no_trace():
    answer = greedy([2, 3], 12)
    stop = next(i for i in range(2, 9) if answer[i] not in answer[:i])
    cache = DictPrefixCache(2)
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[answer[stop]])
    (out,), engine = serve([[2, 3]], params, speculative=Oracle(), adaptive_drafts=False, block_size=2, prefix_cache=cache)
    assert out.token_ids == answer[:stop] and out.finish_reason == "stop"
    longer = [2, 3, *answer[:stop], 7, 8]
    name = engine.add_request(longer, SamplingParams(max_tokens=4, ignore_eos=True))
    assert run_to_end(engine)[name].token_ids == greedy(longer, 4)


def test_passes_tokens_and_drafts_add_up():
    out, engine = always(13, Oracle({5}))
    # prompt: 1 token. then 4 + 1 (places 1..5, of which 5 is wrong: accepted 1..4 and the model's own), 4 + 1, and the last 2
    assert (engine.meter.steps, engine.meter.output_tokens) == (4, 13)
    stats = out.drafts
    assert (stats.passes, stats.drafted, stats.accepted) == (4, engine.meter.drafted, engine.meter.accepted)
    assert stats.accepted + stats.passes == 13 and engine.meter.wasted == stats.drafted - stats.accepted
    assert engine.meter.passes_per_token == pytest.approx(4 / 13)


def test_both_acceptance_rates_of_a_refused_draft():
    out, _ = always(6, Oracle({1, 2, 3, 4, 5}), 3)
    assert out.drafts.alpha == 0 == out.drafts.accepted_share and out.drafts.tokens_per_pass == 1.0
    out, _ = always(8, Oracle({3}))
    # places 1, 2 accepted, 3 refused, 4 never judged; then 4, 5, 6 accepted, and 7 is the target's
    assert (out.drafts.drafted, out.drafts.accepted, out.drafts.tried) == (4 + 3, 2 + 3, 3 + 3)


def test_a_full_step_gets_no_drafts():
    oracle = Oracle()
    serve([[2 + i, 3] for i in range(6)], SamplingParams(max_tokens=8, ignore_eos=True), speculative=oracle, max_draft_batch=6)
    assert oracle.asked == []
    serve([[2 + i, 3] for i in range(6)], SamplingParams(max_tokens=8, ignore_eos=True), speculative=oracle, max_draft_batch=18)
    assert oracle.asked and max(max(lengths) for lengths in oracle.asked) == 2, "what is left is shared"


def test_a_drafted_token_never_pushes_a_request_out():
    prompts = [[2, 3, 4], [5, 6, 7]]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    _, plain = serve(prompts, params, block_size=1, num_blocks=24)
    outputs, drafted = serve(prompts, params, block_size=1, num_blocks=24, speculative=Oracle(range(20)), adaptive_drafts=False)
    assert plain.scheduler.num_preemptions == drafted.scheduler.num_preemptions == 0
    assert [o.token_ids for o in outputs] == [greedy(p, 10) for p in prompts]


def test_the_target_as_its_own_drafter_is_always_right_also_behind_a_full_acceptance():
    """The drafter's KV lacks the last accepted token unless it is fed; then its next guess would be wrong."""
    out, engine = always(20, "draft", draft_model=tiny_model())
    assert out.drafts.alpha == 1.0 and engine.meter.wasted == 0


def test_a_drawn_draft_keeps_to_tokens_that_the_filters_allow():
    params = [SamplingParams(max_tokens=8, temperature=1.0, top_k=1, seed=s, ignore_eos=True) for s in range(3)]
    outputs, engine = serve([[2, 3]] * 3, params, speculative=Drawn())
    assert {o.token_ids for o in outputs} == {greedy([2, 3], 8)} and engine.meter.drafted > engine.meter.accepted


def test_an_accept_rule_of_ones_own_judges_the_drawn_drafts_of_the_engine():
    asked = []

    def never(p, q, token, u, w):
        asked.append((float(p.sum()), float(q.sum()), token))
        return int(p.argmax()), False

    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)
    (out,), engine = serve([[2, 3]], params, speculative=Drawn(), accept_rule=never, adaptive_drafts=False, num_draft_tokens=2)
    assert engine.meter.accepted == 0 and len(asked) == 4, "first token and last: nothing is drafted; each other pass refuses"
    assert all(p == pytest.approx(1) and q == pytest.approx(1) for p, q, _ in asked) and len(out.token_ids) == 6
    with pytest.raises(ValueError, match="accept_rule must be None or a callable .* got 3"):
        tiny_engine(accept_rule=3)


@pytest.mark.parametrize("answer", [None, {}, {0: 3}, "ab", (3,), (torch.tensor([3, 4]), True), (3, torch.tensor([True, False]))])
def test_what_is_no_answer_of_an_accept_rule_is_refused_and_the_engine_goes_on(answer):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)
    llm = tiny_llm(speculative=Drawn(), accept_rule=lambda *_: answer, adaptive_drafts=False)
    with pytest.raises(ValueError, match="an accept_rule gives"):
        llm.generate([[2, 3]], params)
    assert llm.generate([[2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids == greedy([2, 3], 3)


def test_the_work_of_a_drafting_model_is_counted():
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    _, plain = serve([[2, 3]], params)
    _, drafted = always(8, "draft", draft_model=tiny_model())
    assert drafted.meter.weight_bytes > plain.meter.weight_bytes and drafted.meter.steps < plain.meter.steps
    assert drafted.meter.weight_bytes_held == 2 * plain.meter.weight_bytes_held


def row_of(probs):
    """[1, vocab]: these probabilities, 0 elsewhere."""
    row = torch.zeros(1, VOCAB, dtype=torch.float64)
    for token, p in probs.items():
        row[0, token] = p
    return row


def test_a_copy_in_few_bits_holds_its_codes_and_the_embedding_of_the_target():
    plain = tiny_engine()
    engine = tiny_engine(speculative="draft", draft_model="int8")
    drafter, model = engine.speculation.proposer, engine.model
    assert drafter.model.embedding is model.embedding
    beside = engine.weight_bytes - plain.weight_bytes
    assert 0 < beside < plain.weight_bytes - model.embedding.nbytes, "codes of a byte against numbers of eight"
    assert 1 / 8 < drafter.price < 1 / 4
    before = {name: t.clone() for name, t in model.dense_weights().items()}
    engine.add_request([2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
    run_to_end(engine)
    assert all(torch.equal(t, before[name]) for name, t in model.dense_weights().items())


def test_layers_of_the_target_hold_nothing_and_cost_their_share():
    engine = tiny_engine(speculative="draft", draft_model=[0])
    assert engine.weight_bytes == tiny_engine().weight_bytes
    c = engine.model.config
    share = (c.layer_matmul_params + c.vocab_size * c.hidden_size) / c.matmul_params
    assert engine.speculation.proposer.price == pytest.approx(share)


class Faulty(Oracle):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def propose(self, requests, lengths):
        return self.make(requests, lengths)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r, n: [], "returned 0 drafts for 1 requests"),
        (lambda r, n: [Draft((VOCAB,))], f"drafted token {VOCAB}, outside the vocabulary of {VOCAB}"),
        (lambda r, n: [Draft((2,) * (n[0] + 1))], "drafted 9 tokens where at most 8 were asked for"),
        (lambda r, n: [Draft((2,), row_of({2: float("nan")}))], "gave the probability nan to token 2 at place 0"),
        (lambda r, n: [Draft((2,), row_of({3: 1.0}))], "drafted token 2 at place 0, to which its own probs give 0.0"),
    ],
)
def test_a_proposer_that_breaks_its_promise_is_named(make, message):
    engine = tiny_engine(speculative=Faulty(make), adaptive_drafts=False)
    engine.add_request([2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    with pytest.raises(ValueError, match=f"proposer Faulty .*{message}"):
        engine.step()
    engine.speculation = None
    (out,) = run_to_end(engine).values()
    assert out.token_ids == greedy([2, 3], 20), "the request lives on"


def with_parts(**parts):
    oracle = Oracle()
    vars(oracle).update(parts)
    return oracle


def fail(*_):
    raise RuntimeError("my own fault")


@pytest.mark.parametrize("part", ["observe", "take_work", "forget"])
def test_a_part_of_a_proposer_that_fails_costs_nobody_a_token(part):
    engine = tiny_engine(speculative=with_parts(wants_hidden=part == "observe", observe=fail), adaptive_drafts=False)
    setattr(engine.speculation.proposer, part, fail)
    engine.add_request([2, 3], SamplingParams(max_tokens=12, ignore_eos=True))
    done = []
    for _ in range(20):
        try:
            done += [o for o in engine.step() if o.finished]
        except RuntimeError as fault:
            assert "my own fault" in str(fault) and part != "forget"
    assert [o.token_ids for o in done] == [greedy([2, 3], 12)]


@pytest.mark.parametrize("room", range(1, 9))
def test_an_accepted_run_ends_at_the_models_length(room):
    """A limit of the engine and the end of the positions are the same rule: nothing is drafted behind the last token."""
    for limit, prompt in ((2 + room, [2, 3]), (48, [2, 3] * 20 + [4] * (8 - room))):
        engine = tiny_engine(speculative=Oracle(), adaptive_drafts=False, num_draft_tokens=5, max_model_len=limit)
        engine.add_request(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
        (out,) = run_to_end(engine).values()
        assert out.token_ids == greedy(prompt, room) and out.finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": "eagle"}, "'ngram', 'draft', 'mtp'"),
        ({"speculative": 3}, "lacks propose"),
        ({"speculative": "draft"}, "needs a draft_model"),
        ({"speculative": "ngram", "draft_model": [0]}, "not for 'ngram'"),
        ({"draft_model": [0]}, "speculative is None"),
        ({"speculative": "draft", "draft_model": [7]}, r"at least one of 0 to 1, got \[7\]"),
        ({"speculative": "draft", "draft_model": "int4"}, "draft_model='int4' cannot be a copy .* not a multiple of group 64"),
        ({"speculative": "draft", "draft_model": "int8", "group": -1}, "draft_model='int8' cannot .* tiny has latent attention"),
        ({"speculative": "ngram", "kv_cache": "none"}, "kv_cache='none'"),
        ({"speculative": "ngram", "overlap": True}, "overlap=True"),
        ({"speculative": "ngram", "batching": "static"}, "batching='static'"),
        ({"speculative": "ngram", "num_draft_tokens": 0}, "num_draft_tokens"),
        ({"speculative": "ngram", "num_draft_tokens": None}, "num_draft_tokens must be a whole number of at least 1, got None"),
        ({"speculative": "ngram", "max_draft_batch": None}, "max_draft_batch must be a whole number of at least 1, got None"),
        ({"max_num_seqs": None}, "max_num_seqs must be a whole number of at least 1, got None"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens must be a whole number"),
        ({"block_size": None}, "block_size must be a whole number"),
        ({"speculative": "mtp"}, "no trained MTP head for 'tiny'"),
        ({"speculative": "mtp", "draft_model": "/nowhere/head"}, "/nowhere/head holds no MTP head"),
        ({"speculative": with_parts(price=-0.5)}, "price of proposer Oracle.* got -0.5"),
        ({"speculative": with_parts(price=float("nan"))}, "price of proposer Oracle.* got nan"),
        ({"speculative": with_parts(price="free")}, "price of proposer Oracle.* got 'free'"),
        ({"speculative": with_parts(wants_hidden=True)}, r"proposer Oracle wants_hidden, and has no observe"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine(**options)


def test_a_drafter_of_another_vocabulary_is_refused():
    config = replace(tiny_model().config, vocab_size=VOCAB + 1)
    with pytest.raises(ValueError, match=f"{VOCAB + 1} tokens, the target {VOCAB}"):
        tiny_engine(speculative="draft", draft_model=type(tiny_model()).random(config))


def test_a_drafting_model_drafts_what_it_would_say_itself_also_after_refusals_and_preemptions():
    """Its KV holds tokens that were refused, and blocks that were taken away: none of it may be used."""
    shallow = tiny_model().skipping([0])
    engine = tiny_engine(speculative="draft", draft_model=[0], adaptive_drafts=False, num_blocks=13, block_size=2)
    proposer, checked = engine.speculation.proposer, 0

    def propose(requests, lengths):
        nonlocal checked
        drafts = type(proposer).propose(proposer, requests, lengths)
        for request, draft in zip(requests, drafts, strict=True):
            params = SamplingParams(max_tokens=max(len(draft), 1), ignore_eos=True)
            alone = LLM(shallow, num_blocks=40, block_size=4).generate([request.token_ids], params)[0].token_ids
            assert draft.token_ids == alone[: len(draft)]
            checked += len(draft)
        return drafts

    proposer.propose = propose
    for prompt in ([2, 3, 4], [5, 6, 7, 8]):
        engine.add_request(prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    run_to_end(engine)
    assert checked > 20 and engine.meter.wasted > 0 and engine.scheduler.num_preemptions > 0


class Watcher(Oracle):
    """Compares the state that it is shown with the one of a pass over the whole text."""

    wants_hidden = True
    seen = 0

    def observe(self, requests, states):
        for request, state in zip(requests, states, strict=True):
            ids = request.token_ids[:-1]
            assert torch.allclose(state, states_of(tiny_model(), ids)[-1].double(), atol=1e-5)
            self.seen += 1


def test_a_proposer_is_shown_the_state_that_gave_the_last_token():
    watcher = Watcher({2, 3, 9})
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs, _ = serve([[2, 3], [4, 5, 6]], params, speculative=watcher, num_draft_tokens=4)
    assert [o.token_ids for o in outputs] == [greedy([2, 3], 12), greedy([4, 5, 6], 12)] and watcher.seen > 6
