"""5.3 core: write the padding that decode steps are replayed with."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import torch

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_shape, is_whole, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.graphs import PowersOfTwo
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, max_position=64,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 6, 1, 8, 0], [9, 9], [4, 2, 4])


def _batch(rows: int, padding: int = 0) -> ForwardBatch:
    """Rows that decode their fifth token, the keys of row r in blocks 2 r + 1 and 2 r + 2 of four slots."""
    return ForwardBatch.build([Row([10 + r], 4, (2 * r + 1, 2 * r + 2)) for r in range(rows)], 4, padding)


def _tokens(**options: Any) -> list[tuple[int, ...]]:
    """Greedy tokens of five prompts that end one after the other, so that batches of every size decode."""
    llm = LLM(Transformer.random(TINY), dtype="float32", block_size=4, num_blocks=40, max_num_seqs=5, **options)
    params = [SamplingParams(max_tokens=4 + 3 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    return [output.token_ids for output in llm.generate(list(PROMPTS), params)]


def _size_of(rows: int, most: int) -> int:
    size = 1
    while size < rows:
        size *= 2
    return min(size, most)


def _padding_shapes(cls: Any) -> None:
    size = cls().bucket(3, 8)
    if not is_whole(size):
        raise Mismatch(f"bucket gives a whole number, got {size!r}")
    full = cls().pad(_batch(3), 4)
    if not isinstance(full, ForwardBatch):
        raise Mismatch(f"pad gives a ForwardBatch, got {type(full).__name__}")
    for name in ("token_ids", "positions", "slots"):
        expect_shape(getattr(full, name), [4], torch.int64, name)
    expect_equal((len(full.q_lens), len(full.kv_lens), len(full.tables)), (4, 4, 4), what="lengths of q_lens, kv_lens and tables")


def _sizes_by_hand(cls: Any) -> None:
    for rows, most, size in ((1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 8, 8), (8, 8, 8), (5, 6, 6), (9, 32, 16)):
        expect_equal(cls().bucket(rows, most), size, what=f"bucket({rows}, {most})")


def _pad_by_hand(cls: Any) -> None:
    full = cls().pad(_batch(3), 4)
    expect_equal(full.token_ids, torch.tensor([10, 11, 12, 0]), what="token_ids")
    expect_equal(full.positions, torch.tensor([4, 4, 4, 0]), what="positions")
    expect_equal(full.slots, torch.tensor([8, 16, 24, 0]), what="slots: where keys and values go")
    expect_equal(full.q_lens, (1, 1, 1, 1), what="q_lens")
    expect_equal(full.kv_lens, (5, 5, 5, 1), what="kv_lens")
    expect_equal(tuple(map(tuple, full.tables)), ((1, 2), (3, 4), (5, 6), (0,)), what="tables")
    expect_equal(full.logit_indices, torch.tensor([0, 1, 2]), what="logit_indices: padding wants no logits")
    expect_equal((full.num_padding, full.block_size), (1, 4), what="num_padding and block_size")


def _sizes_random(cls: Any) -> None:
    for _ in range(60):
        most = random.randint(1, 300)
        rows = random.randint(1, most)
        expect_equal(cls().bucket(rows, most), _size_of(rows, most), what=f"bucket({rows}, {most})")


def _pad_random(cls: Any) -> None:
    for _ in range(10):
        rows, extra = random.randint(1, 9), random.randint(1, 9)
        _same(cls().pad(_batch(rows), rows + extra), _batch(rows, extra), f"{rows} rows padded to {rows + extra}")


def _same(got: ForwardBatch, expected: ForwardBatch, what: str) -> None:
    for f in (f for f in fields(expected) if f.compare):  # not the notes that the model makes
        mine, theirs = getattr(got, f.name), getattr(expected, f.name)
        if f.name == "tables":
            mine, theirs = tuple(map(tuple, mine)), tuple(map(tuple, theirs))
        expect_equal(mine, theirs, what=f"{f.name} of {what}")


def _pad_nothing(cls: Any) -> None:
    _same(cls().pad(_batch(4), 4), _batch(4), "4 rows padded to 4")
    _same(cls().pad(_batch(1), 1), _batch(1), "1 row padded to 1")


def _pad_padded(cls: Any) -> None:
    _same(cls().pad(_batch(2, padding=1), 8), _batch(2, padding=6), "2 rows with 1 of padding, padded to 8")


def _pad_state(cls: Any) -> None:
    batch = _batch(3)
    held = {f.name: getattr(batch, f.name) for f in fields(batch) if f.compare}
    with unchanged(**{name: x for name, x in held.items() if isinstance(x, torch.Tensor)}):
        cls().pad(batch, 8)
    expect_equal((batch.num_rows, len(batch.token_ids), batch.num_padding), (3, 3, 0), what="the batch that was given")


def _pad_engine(cls: Any) -> None:
    expect_equal(_tokens(cuda_graphs=cls()), _tokens(), what="tokens of five prompts, replayed in your sizes")


def _pad_budget(cls: Any) -> None:
    sizes = {n: cls().bucket(n, 64) for n in range(1, 65)}
    expect_at_most(len(set(sizes.values())), 7, "sizes to record for batches of up to 64")
    expect_at_most(max((size - n) / size for n, size in sizes.items()), 0.5, "share of a batch that is padding")


CORE = Task(
    "5.3 core",
    "Write the padding that the engine replays with",
    (
        NamedCheck("shape: a whole number, and a batch of so many rows", _padding_shapes, hint=2),
        NamedCheck("exact: sizes by hand", _sizes_by_hand, hint=1),
        NamedCheck("exact: three rows padded to four by hand", _pad_by_hand, hint=2),
        NamedCheck("random: sizes against counting up", _sizes_random, hint=1),
        NamedCheck("random: batches against the engine's own builder", _pad_random, hint=3),
        NamedCheck("edges: nothing to pad", _pad_nothing, hint=3),
        NamedCheck("edges: a batch that has padding already", _pad_padded, hint=3),
        NamedCheck("state: the batch is unchanged", _pad_state, hint=3),
        NamedCheck("engine: the same tokens as without replay", _pad_engine, hint=1),
        NamedCheck("budget: few sizes, and no more than half is padding", _pad_budget, hint=1),
    ),
    (
        "The sizes are 1, 2, 4, 8, … and `most` itself. A padding row is a request that does not exist: its one token must be\n"
        "computed without harm, so its key and value go to slot 0, which belongs to nobody.",
        "Of a padding row: token 0, position 0, slot 0, q_len 1, kv_len 1, table (0,). The three tensors are [rows] int64.\n"
        "logit_indices stay as they are; num_padding grows by what you added.",
        "more = rows - batch.num_rows; zeros = torch.zeros(more, dtype=torch.int64)\n"
        "return replace(batch, token_ids=torch.cat([batch.token_ids, zeros]), ..., q_lens=batch.q_lens + (1,) * more, ...)",
    ),
    Seam("cuda_graphs", "padding of replayed steps", lambda cls: {"cuda_graphs": cls()}),
    (PowersOfTwo, ForwardBatch.padded),
)
