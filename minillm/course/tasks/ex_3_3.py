"""Exercise 3.3: a KV store in 8 bits, a scale that depends on who else is in the step, and keys in 4 bits by channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.cache.quantised_kv import QuantisedKVStore
from minillm.course.expect import Mismatch, bytes_held, describe, expect_at_most, expect_equal, expect_shape, is_whole, unchanged
from minillm.course.labs.kv_quantisation import RoundedKV, lopsided, symmetric
from minillm.course.task import NamedCheck, Seam, Task
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.quant.grid import Codes, dequantise, pack_bits, quantise, unpack_bits

TINY = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=64,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7], [1, 6, 1, 8, 0, 3])
ROW = (TINY.num_kv_heads, TINY.head_dim)
SLACK = 1.02
"""A scale may be kept in 16 bits, which moves the grid a little."""


# 3.3 core: a store in 8 bits --------------------------------------------------------------------------------------------------


def _store(cls: Any, slots: int = 12, dtype: torch.dtype = torch.float32) -> Any:
    return cls(TINY, slots, dtype, torch.device("cpu"))


def _round_trip(cls: Any, k: Tensor, v: Tensor, layer: int = 1) -> tuple[Tensor, Tensor]:
    """k, v [tokens, kv_heads, head_dim] written to slots 1 … and read back."""
    store, slots = _store(cls, len(k) + 1, k.dtype), torch.arange(1, len(k) + 1)
    store.write(layer, slots, k.clone(), v.clone())
    return _read(store, layer, slots)


def _pair(got: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(got, tuple) or len(got) != 2:
        raise Mismatch(f"read gives a tuple of two tensors, k and v, got {describe(got)}")
    return got


def _read(store: Any, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    got = _pair(store.read(layer, slots[None]))
    for name, x in zip("kv", got, strict=True):
        expect_shape(x, [1, len(slots), *ROW], None, f"{name} of read")
    return got[0][0], got[1][0]


def _rows(tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random rows, the largest magnitude of each 1."""
    x = torch.randn(tokens, *ROW)
    return (x / x.abs().amax(-1, keepdim=True)).to(dtype)


def _near(got: Tensor, expected: Tensor, what: str) -> None:
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


def _compare(cls: Any, k: Tensor, v: Tensor, what: str) -> None:
    got_k, got_v = _round_trip(cls, k, v)
    _near(got_k, k, f"K of {what}")
    _near(got_v, v, f"V of {what}")


def _core_shapes(cls: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        store = _store(cls, 12, dtype)
        if getattr(store, "num_slots", None) != 12:
            raise Mismatch(f"num_slots: got {getattr(store, 'num_slots', None)!r}, expected 12")
        if not is_whole(getattr(store, "bytes_per_token", None)):
            raise Mismatch(f"bytes_per_token: got {getattr(store, 'bytes_per_token', None)!r}, expected a whole number")
        k = _rows(3, dtype)
        store.write(0, torch.tensor([1, 2, 3]), k, k)
        rows = _pair(store.read(0, torch.tensor([[1, 2], [3, 3]])))
        for name, x in zip("kv", rows, strict=True):
            expect_shape(x, [2, 2, *ROW], dtype, f"{name} of two rows of two slots, {dtype}")


def _core_by_hand(cls: Any) -> None:
    """Whole numbers up to 127 are on the grid of their row."""
    row = torch.tensor([127.0, -127.0, 64.0, -1.0, 0.0, 3.0, -100.0, 126.0])
    k = torch.stack([row, row.flip(0)])[None]
    for factor in (1.0, 0.5, 2.0**-10):
        got, v = _round_trip(cls, k * factor, -k * factor)
        expect_equal(got, k * factor, atol=2e-3 * factor, what=f"whole numbers up to 127, times {factor:g}")
        expect_equal(v, -k * factor, atol=2e-3 * factor, what=f"V of whole numbers up to 127, times {factor:g}")


def _core_half_step(cls: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _compare(cls, _rows(9, dtype), _rows(9, dtype), f"random rows, {dtype}")


def _core_zeros(cls: Any) -> None:
    tiny = torch.zeros(1, *ROW)
    tiny[0, 0, 0] = 1e-20
    for what, k in (("zeros", torch.zeros(1, *ROW)), ("equal numbers", torch.full((1, *ROW), -2.5)), ("1e-20 and zeros", tiny)):
        _compare(cls, k, k, f"rows of {what}")


def _core_tokens_apart(cls: Any) -> None:
    k, v = _rows(4), _rows(4)
    k[2] *= 1000
    v[2] *= 1000
    _compare(cls, k, v, "a token a thousand times as large as its neighbours")


def _core_heads_apart(cls: Any) -> None:
    k, v = _rows(4), _rows(4)
    k[:, 1] *= 0.001
    v[:, 1] *= 0.001
    _compare(cls, k, v, "a head a thousand times as small as the other")


def _core_kinds_apart(cls: Any) -> None:
    _compare(cls, _rows(4) * 300, _rows(4), "K three hundred times as large as V")


def _core_places(cls: Any) -> None:
    store, k = _store(cls), _rows(3)
    store.write(0, torch.tensor([7, 2, 9]), k.clone(), -k)
    store.write(1, torch.tensor([7, 2, 9]), 5 * k, k.clone())
    got, v = _read(store, 0, torch.tensor([9, 7, 7, 2]))
    _near(got, k[[2, 0, 0, 1]], "slots 9, 7, 7, 2 after slots 7, 2, 9 were written in two layers: K of layer 0")
    _near(v, -k[[2, 0, 0, 1]], "the same, V of layer 0")


def _core_again(cls: Any) -> None:
    store, k = _store(cls), _rows(3)
    slots = torch.tensor([4, 5, 6])
    store.write(0, slots, 100 * k, k.clone())
    store.write(0, slots[1:2], k[:1].clone(), k[:1].clone())
    got, _ = _read(store, 0, slots)
    _near(got, torch.stack([100 * k[0], k[0], 100 * k[2]]), "slots 4, 5, 6 after slot 5 was written again with a smaller row")


def _core_state(cls: Any) -> None:
    k, v, slots = 3 * _rows(3), 3 * _rows(3), torch.tensor([1, 2, 3])
    store = _store(cls)
    with unchanged(k=k, v=v, slots=slots):
        store.write(0, slots, k, v)
        first = store.read(0, slots[None])
        kept = first[0].clone()
        store.write(0, slots, 3 * v, 3 * k)
    expect_equal(first[0], kept, what="what was read, after the slots were written again")


def _tokens(options: dict[str, Any]) -> list[tuple[int, ...]]:
    model = Transformer.random(TINY, seed=1, dtype=torch.float64)
    llm = LLM(model, dtype="float64", block_size=4, **{"num_blocks": 24, **options})
    return [o.token_ids for o in llm.generate(list(PROMPTS), SamplingParams(max_tokens=10, ignore_eos=True))]


def _same_for_any_step(cls: Any) -> None:
    """The definition of the engine's own store, and no dependence on chunks or on who else is in a step."""
    expected = _tokens({"kv_dtype": "int8"})
    expect_equal(_tokens({"kv_store": cls}), expected, what="tokens of three prompts on your store, against kv_dtype='int8'")
    for changes in ({"max_num_batched_tokens": 1}, {"max_num_batched_tokens": 3}, {"max_num_seqs": 1}, {"num_blocks": 7}):
        expect_equal(_tokens({"kv_store": cls, **changes}), expected, what=f"the same with {changes}")


def _core_bytes(cls: Any) -> None:
    slots = 64
    store = _store(cls, slots)
    store.write(0, torch.arange(slots), _rows(slots), _rows(slots))
    most = TINY.num_layers * 2 * TINY.num_kv_heads * (TINY.head_dim + 4)
    held = bytes_held(store)
    expect_at_most(held, slots * most, f"bytes held by {slots} slots")
    expect_at_most(held, slots * store.bytes_per_token, f"bytes held by {slots} slots, against your bytes_per_token")


CORE = Task(
    "3.3 core",
    "Write a KV store in 8 bits",
    (
        NamedCheck("shape: what read gives", _core_shapes, hint=2),
        NamedCheck("exact: whole numbers up to 127", _core_by_hand, hint=1),
        NamedCheck("random: at most half a step off", _core_half_step, hint=1),
        NamedCheck("edges: rows of zeros, equal and tiny numbers", _core_zeros, hint=3),
        NamedCheck("edges: a large token among small ones", _core_tokens_apart, hint=1),
        NamedCheck("edges: a small head beside a large one", _core_heads_apart, hint=1),
        NamedCheck("edges: large K, small V", _core_kinds_apart, hint=2),
        NamedCheck("edges: slots in any order, layers apart", _core_places, hint=2),
        NamedCheck("state: a slot is written again", _core_again, hint=2),
        NamedCheck("state: inputs and what was read unchanged", _core_state, hint=3),
        NamedCheck("engine: the same tokens in any step", _same_for_any_step, hint=3),
        NamedCheck("budget: bytes held", _core_bytes, hint=2),
    ),
    (
        "A row is the head_dim numbers of one token in one head, of K or of V. Its reach is its largest magnitude; a code is\n"
        "round(x / reach * 127), and x comes back as code / 127 * reach. Keep the reach beside the codes.",
        "per layer: codes int8 [num_slots, 2, kv_heads, head_dim] and reach float32 [num_slots, 2, kv_heads]; 2 is K and V.\n"
        "read gets slots [rows, length] and gives [rows, length, kv_heads, head_dim] twice, in the model's dtype.",
        "write: kv = torch.stack((k, v), 1).float(); reach = kv.abs().amax(-1); unit = reach.clamp(min=1e-30).unsqueeze(-1);\n"
        "self.codes[layer][slots] = (kv / unit * 127).round().to(torch.int8); self.reach[layer][slots] = reach;\n"
        "read: kv = (codes[slots].float() / 127 * reach[slots].unsqueeze(-1)).to(dtype); K is kv[:, :, 0], V is kv[:, :, 1].",
    ),
    Seam("kv_store", "KV store", lambda cls: {"kv_store": cls}),
    (QuantisedKVStore, RoundedKV, symmetric, lopsided, quantise, dequantise, Codes),
)


# 3.3 break: a scale that others move ------------------------------------------------------------------------------------------


def _break_one(cls: Any) -> None:
    for _ in range(3):
        _compare(cls, _rows(1), _rows(1), "one token alone")


def _break_alike(cls: Any) -> None:
    _compare(cls, _rows(8), _rows(8), "eight tokens of one size")


def _break_sizes(cls: Any) -> None:
    size = 2.0 ** torch.arange(8.0)[:, None, None]
    _compare(cls, _rows(8) * size, _rows(8) * size, "eight tokens, each twice as large as the one before")


def _break_mates(cls: Any) -> None:
    """Token 0 must be the same whoever is written beside it."""
    k, v = _rows(5), _rows(5)
    k[3] *= 40
    alone, _ = _round_trip(cls, k[:1], v[:1])
    together, _ = _round_trip(cls, k, v)
    expect_equal(together[:1], alone, what="K of token 0, written beside four others, against written alone")


BREAK = Task(
    "3.3 break",
    "Find the fault in a scale",
    (
        NamedCheck("shape: what read gives", _core_shapes, hint=2),
        NamedCheck("exact: one token", _break_one, hint=2),
        NamedCheck("random: tokens of one size", _break_alike, hint=2),
        NamedCheck("random: tokens of different sizes", _break_sizes, hint=1),
        NamedCheck("edges: who else is written in the same step", _break_mates, hint=1),
        NamedCheck("edges: a small head beside a large one", _core_heads_apart, hint=3),
        NamedCheck("edges: large K, small V", _core_kinds_apart, hint=3),
        NamedCheck("state: a slot is written again", _core_again, hint=2),
        NamedCheck("engine: the same tokens in any step", _same_for_any_step, hint=1),
    ),
    (
        "Write one token alone, then the same token beside a much larger one, and compare what comes back. Which numbers\n"
        "does the scale of a token look at?",
        "kv [tokens, 2, kv_heads, head_dim] → reach [tokens, 2, kv_heads]: one number per token, per K or V, and per head.",
        "The largest magnitude is taken along head_dim alone: dim=-1.",
    ),
    references=(QuantisedKVStore, RoundedKV, symmetric, lopsided),
)


# 3.3 stretch: keys in 4 bits by channel ---------------------------------------------------------------------------------------


def _keys(cls: Any, k: Tensor, watched: bool = False) -> Tensor:
    packed = cls().pack(k if watched else k.clone())
    if not isinstance(packed, dict) or not all(isinstance(t, Tensor) for t in packed.values()):
        items = packed.items() if isinstance(packed, dict) else ()
        wrong = ", ".join(f"{describe(x)} under {key!r}" for key, x in items if not isinstance(x, Tensor))
        raise Mismatch(f"pack gives a dict of tensors, got {wrong or describe(packed)}")
    back: Tensor = cls().unpack(packed)  # another object: everything lies in what pack gave
    expect_shape(back, list(k.shape), torch.float32, "unpack(pack(k))")
    return back


def _keys_near(cls: Any, k: Tensor, what: str) -> None:
    back = _keys(cls, k)
    if not bool(torch.isfinite(back).all()):
        raise Mismatch(f"{what}: got {float(back[~torch.isfinite(back)][0])}, expected finite numbers")
    step = (k.double().amax(0) - k.double().amin(0)) / 15
    error = (back.double() - k.double()).abs().amax(0)
    bad = (error > step * SLACK / 2 + k.double().abs().amax(0) * 1e-3).nonzero()
    if len(bad):
        head, i = bad[0].tolist()
        got, most = float(error[head, i]), float(step[head, i]) / 2
        raise Mismatch(f"{what}: channel {i} of head {head} is off by {got:.4g}, expected at most half a step, {most:.4g}")


def _stretch_shape(cls: Any) -> None:
    for tokens, heads, dim in ((32, 2, 8), (7, 3, 16)):
        _keys(cls, torch.randn(tokens, heads, dim))


def _stretch_by_hand(cls: Any) -> None:
    """Sixteen tokens whose channels are sixteen equal steps, up or down, from anywhere."""
    steps = torch.arange(16.0)[:, None, None]
    k = torch.cat([steps, 0.5 * steps - 4, 20 - steps, steps.flip(0) * 0.25], dim=-1).repeat(1, 2, 1)
    expect_equal(_keys(cls, k), k, atol=1e-2, what="channels of sixteen equal steps")


def _stretch_random(cls: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _keys_near(cls, torch.randn(32, 2, 8).to(dtype), f"random keys, {dtype}")


def _stretch_outlier(cls: Any) -> None:
    k = torch.randn(32, 2, 8)
    k[:, 0, 3] *= 200
    _keys_near(cls, k, "keys with one channel two hundred times as large")


def _stretch_far(cls: Any) -> None:
    k = torch.rand(32, 2, 8)
    k[:, :, 2] += 5
    k[:, :, 5] -= 6
    _keys_near(cls, k, "channels in [5, 6] and [−6, −5]")


def _stretch_constant(cls: Any) -> None:
    k = torch.randn(32, 2, 8)
    k[:, 0, 0], k[:, 1, 1] = 0.0, -3.0
    _keys_near(cls, k, "channels of equal numbers, one of them 0")


def _stretch_one(cls: Any) -> None:
    _keys_near(cls, torch.randn(1, 2, 8), "a single token")


def _stretch_state(cls: Any) -> None:
    k = torch.randn(32, 2, 8)
    with unchanged(k=k):
        _keys(cls, k, watched=True)


def _stretch_bytes(cls: Any) -> None:
    tokens, heads, dim = 128, 2, 8
    held, budget = bytes_held(cls().pack(torch.randn(tokens, heads, dim))), tokens * heads * dim // 2 + heads * dim * 8
    expect_at_most(held, budget, f"bytes held by {tokens} tokens of {heads} heads of {dim}")


STRETCH = Task(
    "3.3 stretch",
    "Keys in 4 bits, a scale for each channel",
    (
        NamedCheck("shape: what pack and unpack give", _stretch_shape, hint=2),
        NamedCheck("exact: channels of sixteen equal steps", _stretch_by_hand, hint=1),
        NamedCheck("random: at most half a step off", _stretch_random, hint=3),
        NamedCheck("edges: one large channel", _stretch_outlier, hint=1),
        NamedCheck("edges: channels far from 0", _stretch_far, hint=1),
        NamedCheck("edges: constant channels", _stretch_constant, hint=3),
        NamedCheck("edges: one token", _stretch_one, hint=3),
        NamedCheck("state: inputs unchanged", _stretch_state),
        NamedCheck("budget: bytes held", _stretch_bytes, hint=2),
    ),
    (
        "A channel is one dimension of one head over all tokens of the block. Stretch its grid from its smallest value to its\n"
        "largest: code = round((k - low) / step), k ≈ low + code * step. Nothing says that 0 must be on it.",
        "k [tokens, kv_heads, head_dim] → low, step [1, kv_heads, head_dim]; codes uint8 of the shape of k, from 0 to 15.\n"
        "Two codes share a byte: [tokens, kv_heads, head_dim / 2].",
        "low = k.amin(0, keepdim=True); step = ((k.amax(0, keepdim=True) - low) / 15).clamp(min=1e-30);\n"
        "both = codes[..., ::2] | codes[..., 1::2] << 4; back: torch.stack([both & 15, both >> 4], -1).flatten(-2).",
    ),
    references=(lopsided, symmetric, quantise, dequantise, pack_bits, unpack_bits, Codes),
)

TASKS = (CORE, BREAK, STRETCH)
