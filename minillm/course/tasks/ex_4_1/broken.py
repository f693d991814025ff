"""4.1 break: find the write that reaches another's block because a copy on write is forgotten."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention
from minillm.cache import manager
from minillm.cache.block_pool import BlockPool
from minillm.cache.kv_store import PlainKVStore, copy_slots
from minillm.course.expect import Mismatch, expect_equal
from minillm.course.task import NamedCheck, Task
from minillm.course.tasks.ex_1_1.common import TINY
from minillm.course.tasks.ex_4_1.common import PROMPTS, B
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.runner import ModelRunner
from minillm.model.transformer import Transformer


def _prepared(f: Any, blocks: int, table: int, holders: Sequence[int], start: int, stop: int) -> tuple[Any, list[int], BlockPool]:
    """What f gives for a table of that many blocks, the i-th of which has holders[i]; its table, and the pool afterwards."""
    pool = BlockPool(blocks)
    mine = pool.allocate(table) or []
    for block, n in zip(mine, holders):
        for _ in range(n - 1):
            pool.acquire([block])
    return f(pool, mine, start, stop, B), mine, pool


def _case(
    f: Any, blocks: int, holders: Sequence[int], start: int, stop: int, copies: list[tuple[int, int]] | None, table: list[int],
    what: str,
) -> None:  # fmt: skip
    got, mine, pool = _prepared(f, blocks, len(holders), holders, start, stop)
    case = f"{what} (positions {start} to {stop - 1}, holders {list(holders)})"
    expect_equal(got, copies, what=f"{case}: (source, target) of the copies")
    expect_equal(mine, table, what=f"{case}: the table")
    sources = [source for source, _ in copies or ()]
    left = [n - ((i + 1) in sources) for i, n in enumerate(holders)]
    expect_equal([pool.ref_count(i + 1) for i in range(len(holders))], left, what=f"{case}: holders of the old blocks")
    expect_equal(pool.num_free, blocks - len({*range(1, len(holders) + 1), *table}), what=f"{case}: free blocks")


def _break_shape(f: Any) -> None:
    got = _prepared(f, 8, 2, (1, 2), 6, 7)[0]
    if not isinstance(got, list) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in got):
        raise Mismatch(f"it gives a list of (source, target), got {got!r:.60}")


def _break_by_hand(f: Any) -> None:
    _case(f, 8, (2, 2), 6, 7, [(2, 3)], [1, 3], "two samples, one more token")
    _case(f, 8, (1, 1), 6, 7, [], [1, 2], "nobody shares")
    _case(f, 8, (2, 2), 8, 9, [], [1, 2, 3], "two samples, the shared blocks are full")


def _break_random(f: Any) -> None:
    for _ in range(60):
        computed, others = int(torch.randint(1, 20, ())), int(torch.randint(1, 4, ()))
        n = -(-computed // B)
        if computed % B:
            _case(f, 9, [others] * n, computed, computed + 1, [(n, n + 1)] if others > 1 else [],
                  [*range(1, n), n + 1 if others > 1 else n], "one token, drawn at random")  # fmt: skip
        else:
            _case(f, 9, [others] * n, computed, computed + 1, [], [*range(1, n + 2)], "one token, drawn at random")


def _break_crossing(f: Any) -> None:
    _case(f, 8, (2, 2), 6, 11, [(2, 3)], [1, 3, 4], "five tokens, across the end of the shared block")
    _case(f, 8, (3, 3, 3), 4, 14, [(2, 4), (3, 5)], [1, 4, 5, 6], "two shared blocks are written to")
    _case(f, 8, (2, 2), 6, 8, [(2, 3)], [1, 3], "up to the end of the block, not over it")


def _break_refused(f: Any) -> None:
    _case(f, 2, (2, 2), 6, 7, None, [1, 2], "no block for the copy")
    _case(f, 3, (2, 2), 6, 9, None, [1, 2], "one block, where the copy and the next block need two")
    _case(f, 2, (1, 1), 8, 9, None, [1, 2], "no block to grow")
    _case(f, 2, (1, 1), 6, 8, [], [1, 2], "no block is free, and none is needed")


def _break_engine(f: Any) -> None:
    """Three samples of one prompt on a loop of their own; each is given words to say and goes on from there."""
    model, prompt = Transformer.random(TINY), PROMPTS[0][:6]
    said = ([5, 3, 5, 8, 9], [9], [2, 6, 5, 3, 5, 8, 9])
    plain = LLM(model, dtype="float32", num_blocks=32)
    expected = [list(plain.generate([*prompt, *s], SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids) for s in said]
    pool, store = BlockPool(24), PlainKVStore.allocate(model.config, 25 * B, torch.float32)
    runner = ModelRunner(model, store, TorchAttention(), B)

    def compute(ids: Sequence[int], start: int, table: list[int]) -> int:
        copies = f(pool, table, start, start + len(ids), B)
        for source, target in copies:
            slots = (torch.arange(block * B, (block + 1) * B) for block in (source, target))
            copy_slots(store, model.config.num_layers, *slots)
        with torch.inference_mode():
            logits, _ = runner.forward(ForwardBatch.build([Row(list(ids), start, table)], B))
        return int(logits[0].argmax())

    first: list[int] = []
    compute(prompt, 0, first)
    tables = [first, list(first), list(first)]
    pool.acquire(first * 2)
    texts = [[compute(words, len(prompt), table)] for words, table in zip(said, tables)]
    for _ in range(4):
        for words, text, table in zip(said, texts, tables):
            text.append(compute(text[-1:], len(prompt) + len(words) + len(text) - 1, table))
    expect_equal(texts, expected, what="tokens of three samples that share a prompt, and of each alone")


BREAK = Task(
    "4.1 break",
    "Find the write that reaches another's block",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: one more token", _break_by_hand, hint=2),
        NamedCheck("random: one token at a time", _break_random, hint=2),
        NamedCheck("edges: a write across blocks", _break_crossing, hint=1),
        NamedCheck("edges: a pool that is used up", _break_refused, hint=3),
        NamedCheck("engine: three samples that share a prompt", _break_engine, hint=1),
    ),
    (
        "The code grows the table or copies a block. When does a write need both? Think of a sample that is given five tokens\n"
        "at once, in a prompt's last, half full block.",
        "Blocks that are written to: start // block_size up to the block of stop - 1. Those among them that the table has\n"
        "already and somebody else holds need a copy each; those that it lacks are fresh. Both come from one allocate.",
        "shared = [i for i in range(start // block_size, min(len(table), last)) if pool.ref_count(table[i]) > 1], where last =\n"
        "-(-stop // block_size). fresh = pool.allocate(len(shared) + max(0, last - len(table))); None is passed on before\n"
        "anything has changed. A copied block loses this holder: pool.release([source]).",
    ),
    references=(manager.CacheManager,),
)
