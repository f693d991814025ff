"""1.1 break: find the fault in attention over a cache, whose causal mask is right only for prompts."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from minillm.attention.torch_backend import TorchAttention, attend
from minillm.course.expect import Mismatch, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_1_1.common import TOLERANCE, Through, causal, generated, oracle, row_slots
from minillm.engine.batch import ForwardBatch


def _qkv(new: int, past: int, heads: int = 2, kv_heads: int = 2, dim: int = 8) -> tuple[Tensor, ...]:
    """q, k, v of the new tokens and keys and values of the past ones."""
    return (
        torch.randn(new, heads, dim), *torch.randn(2, new, kv_heads, dim).unbind(), *torch.randn(2, past, kv_heads, dim).unbind()
    )  # fmt: skip


def _attend_and_compare(f: Any, new: int, past: int, what: str, scale: float = 1.0, **sizes: int) -> None:
    q, k, v, past_k, past_v = _qkv(new, past, **sizes)
    q = q * scale
    all_k, all_v = torch.cat([past_k, k]), torch.cat([past_v, v])
    expected = causal(q, all_k, all_v, past)
    got = f(q, k, v, past_k, past_v)
    expect_equal(got[0], expected, atol=TOLERANCE * max(1.0, scale / 10), what=f"out, {what}")
    expect_equal(tuple(got[1:]), (all_k, all_v), what=f"keys and values, {what}")


def _break_shapes(f: Any) -> None:
    got = f(*_qkv(3, 5, heads=6, kv_heads=2, dim=4))
    if not isinstance(got, tuple) or len(got) != 3:
        raise Mismatch(f"it gives (out, all_k, all_v), got {type(got).__name__}")
    expect_shape(got[0], [3, 6, 4], torch.float32, "out")
    expect_shape(got[1], [8, 2, 4], torch.float32, "all_k")
    expect_shape(got[2], [8, 2, 4], torch.float32, "all_v")


def _break_by_hand(f: Any) -> None:
    """Queries of zeros weigh all visible keys alike, so each output is the mean of the values so far."""
    v = torch.tensor([[[2.0, 0.0]], [[4.0, 2.0]], [[6.0, 1.0]]])
    empty = torch.zeros(0, 1, 2)
    out = f(torch.zeros(3, 1, 2), torch.ones(3, 1, 2), v, empty, empty)[0]
    expect_equal(out, torch.tensor([[[2.0, 0.0]], [[3.0, 1.0]], [[4.0, 1.0]]]), atol=TOLERANCE, what="out of a prompt of three")


def _break_prompt(f: Any) -> None:
    for n in (2, 7):
        _attend_and_compare(f, n, 0, f"a prompt of {n} at once")
    _attend_and_compare(f, 5, 0, "a prompt of 5, scores of several hundred", scale=200.0)


def _break_decode(f: Any) -> None:
    for past in (1, 2, 9):
        _attend_and_compare(f, 1, past, f"1 token after {past}")


def _break_chunk(f: Any) -> None:
    for new, past in ((3, 1), (2, 5), (4, 4)):
        _attend_and_compare(f, new, past, f"{new} tokens after {past}")


def _break_gqa(f: Any) -> None:
    _attend_and_compare(f, 2, 3, "6 query heads on 2 KV heads", heads=6, kv_heads=2)


def _break_first(f: Any) -> None:
    _attend_and_compare(f, 1, 0, "a prompt of one token")


def _break_state(f: Any) -> None:
    q, k, v, past_k, past_v = _qkv(2, 3)
    with unchanged(q=q, k=k, v=v, past_k=past_k, past_v=past_v):
        f(q, k, v, past_k, past_v)


def _break_engine(f: Any) -> None:
    def answer(q: Tensor, store: Any, layer: int, batch: ForwardBatch) -> Tensor:
        out, starts = [], itertools.accumulate(batch.q_lens, initial=0)
        for start, new, slots in zip(starts, batch.q_lens, row_slots(batch)):
            k, v = (x[0] for x in store.read(layer, slots[None]))
            past = len(slots) - new
            out.append(f(q[start : start + new], k[past:], v[past:], k[:past], v[:past])[0])
        return torch.cat(out)

    expected = generated(kv_cache="none")
    for chunk in (2048, 4):
        got = generated(attention_backend=Through(answer), max_num_batched_tokens=chunk)
        expect_equal(got, expected, what=f"tokens on your attention, at most {chunk} tokens a step")


BREAK = Task(
    "1.1 break",
    "Find the fault in cached attention",
    (
        NamedCheck("shape", _break_shapes, hint=2),
        NamedCheck("exact: a prompt of three by hand", _break_by_hand, hint=1),
        NamedCheck("random: a prompt at once", _break_prompt, hint=1),
        NamedCheck("random: then one token at a time", _break_decode, hint=1),
        NamedCheck("edges: a chunk of tokens after a prefix", _break_chunk, hint=3),
        NamedCheck("edges: grouped heads", _break_gqa, hint=2),
        NamedCheck("edges: a prompt of one token", _break_first, hint=2),
        NamedCheck("state: inputs unchanged", _break_state),
        NamedCheck("engine: as the engine's attention, whole prompts and chunks of 4", _break_engine, hint=3),
    ),
    (
        "The prompt is right and the first token after it is wrong. Which keys does the mask admit for a single new query?\n"
        "Try it: queries of zeros weigh all admitted keys alike, so the output tells you how many there were.",
        "With new = 2 and past = 3 the mask is [2, 5]. Query i stands at position past + i and sees keys 0 … past + i: the\n"
        "mask's diagonal must end in the bottom-right corner. is_causal=True begins it in the top-left corner.",
        "visible = torch.ones(new, past + new, dtype=torch.bool).tril(diagonal=...), then attn_mask=visible, not is_causal.\n"
        "Which diagonal lets query 0 see the past and itself?",
    ),
    references=(TorchAttention, attend, oracle, causal),
)
