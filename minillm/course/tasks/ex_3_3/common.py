"""What a store in 8 bits may be off by, and the checks that core and break share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.course.expect import Mismatch, describe, expect_equal, expect_shape, is_whole
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=64,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [1, 6, 1, 8, 0, 3])
ROW = (TINY.num_kv_heads, TINY.head_dim)
SLACK = 1.02
"""A scale may be kept in 16 bits, which moves the grid a little."""


def make_store(cls: Any, slots: int = 12, dtype: torch.dtype = torch.float32) -> Any:
    return cls(TINY, slots, dtype, torch.device("cpu"))


def round_trip(cls: Any, k: Tensor, v: Tensor, layer: int = 1) -> tuple[Tensor, Tensor]:
    """k, v [tokens, kv_heads, head_dim] written to slots 1 … and read back."""
    store, slots = make_store(cls, len(k) + 1, k.dtype), torch.arange(1, len(k) + 1)
    store.write(layer, slots, k.clone(), v.clone())
    return read_back(store, layer, slots)


def pair(got: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(got, tuple) or len(got) != 2:
        raise Mismatch(f"read gives a tuple of two tensors, k and v, got {describe(got)}")
    return got


def read_back(store: Any, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    got = pair(store.read(layer, slots[None]))
    for name, x in zip("kv", got, strict=True):
        expect_shape(x, [1, len(slots), *ROW], None, f"{name} of read")
    return got[0][0], got[1][0]


def random_rows(tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random rows, the largest magnitude of each 1."""
    x = torch.randn(tokens, *ROW)
    return (x / x.abs().amax(-1, keepdim=True)).to(dtype)


def near(got: Tensor, expected: Tensor, what: str) -> None:
    """At most half a step off, where a step is a 127th of the row's largest magnitude."""
    if not bool(torch.isfinite(got).all()):
        raise Mismatch(f"{what}: read gave {float(got[~torch.isfinite(got)][0])}, expected finite numbers")
    reach = expected.double().abs().amax(-1, keepdim=True)
    most = reach * (SLACK / 254 + torch.finfo(expected.dtype).eps)
    error = (got.double() - expected.double()).abs()
    bad = (error > most + 1e-30).nonzero()
    if len(bad):
        token, head, i = bad[0].tolist()
        allowed = float(most[token, head, 0])
        raise Mismatch(
            f"{what}: token {token}, head {head}, dimension {i}: got {float(got[token, head, i]):.6g}, expected "
            f"{float(expected[token, head, i]):.6g} within half a step, {allowed:.3g}"
        )


def compare(cls: Any, k: Tensor, v: Tensor, what: str) -> None:
    got_k, got_v = round_trip(cls, k, v)
    near(got_k, k, f"K of {what}")
    near(got_v, v, f"V of {what}")


def check_shapes(cls: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        store = make_store(cls, 12, dtype)
        if getattr(store, "num_slots", None) != 12:
            raise Mismatch(f"num_slots: got {getattr(store, 'num_slots', None)!r}, expected 12")
        if not is_whole(getattr(store, "bytes_per_token", None)):
            raise Mismatch(f"bytes_per_token: got {getattr(store, 'bytes_per_token', None)!r}, expected a whole number")
        k = random_rows(3, dtype)
        store.write(0, torch.tensor([1, 2, 3]), k, k)
        rows = pair(store.read(0, torch.tensor([[1, 2], [3, 3]])))
        for name, x in zip("kv", rows, strict=True):
            expect_shape(x, [2, 2, *ROW], dtype, f"{name} of two rows of two slots, {dtype}")


def check_heads_apart(cls: Any) -> None:
    k, v = random_rows(4), random_rows(4)
    k[:, 1] *= 0.001
    v[:, 1] *= 0.001
    compare(cls, k, v, "a head a thousand times as small as the other")


def check_kinds_apart(cls: Any) -> None:
    compare(cls, random_rows(4) * 300, random_rows(4), "K three hundred times as large as V")


def check_written_again(cls: Any) -> None:
    store, k = make_store(cls), random_rows(3)
    slots = torch.tensor([4, 5, 6])
    store.write(0, slots, 100 * k, k.clone())
    store.write(0, slots[1:2], k[:1].clone(), k[:1].clone())
    got, _ = read_back(store, 0, slots)
    near(got, torch.stack([100 * k[0], k[0], 100 * k[2]]), "slots 4, 5, 6 after slot 5 was written again with a smaller row")


def generated(options: dict[str, Any]) -> list[tuple[int, ...]]:
    model = Transformer.random(TINY, seed=1, dtype=torch.float64)
    llm = LLM(model, dtype="float64", block_size=4, **{"num_blocks": 24, **options})
    return [o.token_ids for o in llm.generate(list(PROMPTS), SamplingParams(max_tokens=10, ignore_eos=True))]


def check_any_step(cls: Any) -> None:
    """The definition of the engine's own store, and no dependence on chunks or on who else is in a step."""
    expected = generated({"kv_dtype": "int8"})
    expect_equal(generated({"kv_store": cls}), expected, what="tokens of three prompts on your store, against kv_dtype='int8'")
    for changes in ({"max_num_batched_tokens": 1}, {"max_num_batched_tokens": 3}, {"max_num_seqs": 1}, {"num_blocks": 7}):
        expect_equal(generated({"kv_store": cls, **changes}), expected, what=f"the same with {changes}")
