"""5.1 break: find the fault in what a request computes next, a phase that is guessed."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.course.expect import Mismatch, expect_equal, is_whole
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_5_1.common import TINY, draw
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.runner import ModelRunner
from minillm.model.transformer import Transformer


def _next(prompt_len: int, num_tokens: int, num_computed: int, budget: int) -> tuple[int, bool]:
    left = num_tokens - num_computed
    return (left, True) if left <= budget else (budget, False)


def _compare(f: Any, prompt_len: int, num_tokens: int, num_computed: int, budget: int, what: str) -> None:
    case = f"{what}: prompt_len={prompt_len}, num_tokens={num_tokens}, num_computed={num_computed}, budget={budget}"
    expected = _next(prompt_len, num_tokens, num_computed, budget)
    expect_equal(tuple(f(prompt_len, num_tokens, num_computed, budget)), expected, what=case)


def _break_shape(f: Any) -> None:
    got = f(5, 5, 0, 8)
    if not isinstance(got, tuple) or len(got) != 2 or not is_whole(got[0]) or not isinstance(got[1], bool):
        raise Mismatch(f"it gives (tokens, samples), a whole number and True or False, got {got!r:.60}")


def _break_prompt(f: Any) -> None:
    """33 tokens, 8 at a time: 8, 8, 8, 8, 1."""
    done, seen = 0, []
    for _ in range(5):
        n, samples = f(33, 33, done, 8)
        seen.append((int(n), samples))
        done += n
    expect_equal(seen, [(8, False)] * 4 + [(1, True)], what="a prompt of 33 in chunks of 8")


def _break_decode(f: Any) -> None:
    for output in (1, 2, 7):
        _compare(f, 5, 5 + output, 5 + output - 1, 8, f"{output} tokens are out, one is to be computed")


def _break_random(f: Any) -> None:
    for _ in range(60):
        prompt = draw(1, 40)
        _compare(f, prompt, prompt, draw(0, prompt - 1), draw(1, 50), "a prompt, drawn at random")


def _break_preempted(f: Any) -> None:
    _compare(f, 6, 9, 0, 64, "three tokens are out, and its KV was taken away")
    _compare(f, 6, 9, 0, 4, "the same, and the budget is small")
    _compare(f, 6, 9, 4, 4, "the second chunk of the same: it ends inside the output")
    _compare(f, 6, 9, 8, 4, "the last chunk of the same")
    _compare(f, 1, 40, 0, 64, "a prompt of one token, preempted late")


def _break_no_budget(f: Any) -> None:
    _compare(f, 5, 5, 0, 0, "no budget is left for a prompt")
    _compare(f, 5, 7, 6, 0, "no budget is left for one that decodes")


def _answer(model: Transformer, f: Any, prompt: Sequence[int], tokens: int, chunk: int, preempt_at: Sequence[int]) -> list[int]:
    """Greedy tokens of one request on a loop of its own; when so many are out, its KV is thrown away."""
    store = PlainKVStore.allocate(model.config, 97, torch.float32)
    runner = ModelRunner(model, store, TorchAttention(), 96)
    ids, computed, to_preempt = list(prompt), 0, set(preempt_at)
    for _ in range(400):
        out = len(ids) - len(prompt)
        if out == tokens:
            return ids[len(prompt) :]
        if out in to_preempt:
            to_preempt.remove(out)
            computed = 0
            store.poison(torch.arange(1, 97))
        n, samples = f(len(prompt), len(ids), computed, chunk)
        if not n:
            raise Mismatch(f"nothing is computed although {chunk} tokens of budget are left")
        row = Row(ids[computed : computed + n], computed, [0], wants_logits=bool(samples))
        with torch.inference_mode():
            logits, _ = runner.forward(ForwardBatch.build([row], 96))
        computed += n
        if samples:
            ids.append(int(logits[0].argmax()))
    raise Mismatch(f"the request has not ended after 400 steps; it has {len(ids) - len(prompt)} of {tokens} tokens")


def _break_engine(f: Any) -> None:
    model = Transformer.random(TINY)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    expected = list(LLM(model, num_blocks=8).generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids)
    for chunk, preempt_at in ((64, ()), (4, ()), (64, (3,)), (4, (3, 7))):
        got = _answer(model, f, prompt, 12, chunk, preempt_at)
        when = f", preempted after {' and '.join(map(str, preempt_at))} tokens" if preempt_at else ""
        expect_equal(got, expected, what=f"tokens, at most {chunk} a step{when}")


BREAK = Task(
    "5.1 break",
    "Find the fault in what a request computes next",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: a prompt of 33 in chunks of 8", _break_prompt, hint=2),
        NamedCheck("exact: one token after another", _break_decode, hint=2),
        NamedCheck("random: prompts and budgets", _break_random, hint=2),
        NamedCheck("edges: preempted after three tokens", _break_preempted, hint=1),
        NamedCheck("edges: no budget is left", _break_no_budget, hint=3),
        NamedCheck("engine: the same tokens, preempted or not", _break_engine, hint=1),
    ),
    (
        "The code asks whether there is output yet, and takes the answer for the phase. Which request has output and still has\n"
        "its whole prompt to compute?",
        "tokens = how many of num_tokens - num_computed fit into the budget. samples = whether nothing is left after them: a\n"
        "token can be sampled only from the logits of the last one. prompt_len says nothing about either.",
        "left = num_tokens - num_computed; n = min(left, budget); return n, ... Which n means that the request has caught up?\n"
        "And is that true when n is 0?",
    ),
    references=(_next,),
)
