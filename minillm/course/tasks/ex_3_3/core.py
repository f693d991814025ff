"""3.3 core: write a KV store in 8 bits."""

from __future__ import annotations

from typing import Any

import torch

from minillm.cache.quantised_kv import QuantisedKVStore
from minillm.course.expect import bytes_held, expect_at_most, expect_equal, unchanged
from minillm.course.labs.kv_quantisation import RoundedKV, lopsided, symmetric
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_3_3.common import (
    ROW,
    TINY,
    check_any_step,
    check_heads_apart,
    check_kinds_apart,
    check_shapes,
    check_written_again,
    compare,
    make_store,
    near,
    random_rows,
    read_back,
    round_trip,
)
from minillm.quant.grid import Codes, dequantise, quantise


def _core_by_hand(cls: Any) -> None:
    """Whole numbers up to 127 are on the grid of their row."""
    row = torch.tensor([127.0, -127.0, 64.0, -1.0, 0.0, 3.0, -100.0, 126.0])
    k = torch.stack([row, row.flip(0)])[None]
    for factor in (1.0, 0.5, 2.0**-10):
        got, v = round_trip(cls, k * factor, -k * factor)
        expect_equal(got, k * factor, atol=2e-3 * factor, what=f"whole numbers up to 127, times {factor:g}")
        expect_equal(v, -k * factor, atol=2e-3 * factor, what=f"V of whole numbers up to 127, times {factor:g}")


def _core_half_step(cls: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        compare(cls, random_rows(9, dtype), random_rows(9, dtype), f"random rows, {dtype}")


def _core_zeros(cls: Any) -> None:
    tiny = torch.zeros(1, *ROW)
    tiny[0, 0, 0] = 1e-20
    for what, k in (("zeros", torch.zeros(1, *ROW)), ("equal numbers", torch.full((1, *ROW), -2.5)), ("1e-20 and zeros", tiny)):
        compare(cls, k, k, f"rows of {what}")


def _core_tokens_apart(cls: Any) -> None:
    k, v = random_rows(4), random_rows(4)
    k[2] *= 1000
    v[2] *= 1000
    compare(cls, k, v, "a token a thousand times as large as its neighbours")


def _core_places(cls: Any) -> None:
    store, k = make_store(cls), random_rows(3)
    store.write(0, torch.tensor([7, 2, 9]), k.clone(), -k)
    store.write(1, torch.tensor([7, 2, 9]), 5 * k, k.clone())
    got, v = read_back(store, 0, torch.tensor([9, 7, 7, 2]))
    near(got, k[[2, 0, 0, 1]], "slots 9, 7, 7, 2 after slots 7, 2, 9 were written in two layers: K of layer 0")
    near(v, -k[[2, 0, 0, 1]], "the same, V of layer 0")


def _core_state(cls: Any) -> None:
    k, v, slots = 3 * random_rows(3), 3 * random_rows(3), torch.tensor([1, 2, 3])
    store = make_store(cls)
    with unchanged(k=k, v=v, slots=slots):
        store.write(0, slots, k, v)
        first = store.read(0, slots[None])
        kept = first[0].clone()
        store.write(0, slots, 3 * v, 3 * k)
    expect_equal(first[0], kept, what="what was read, after the slots were written again")


def _core_bytes(cls: Any) -> None:
    slots = 64
    store = make_store(cls, slots)
    store.write(0, torch.arange(slots), random_rows(slots), random_rows(slots))
    most = TINY.num_layers * 2 * TINY.num_kv_heads * (TINY.head_dim + 4)
    held = bytes_held(store)
    expect_at_most(held, slots * most, f"bytes held by {slots} slots")
    expect_at_most(held, slots * store.bytes_per_token, f"bytes held by {slots} slots, against your bytes_per_token")


CORE = Task(
    "3.3 core",
    "Write a KV store in 8 bits",
    (
        NamedCheck("shape: what read gives", check_shapes, hint=2),
        NamedCheck("exact: whole numbers up to 127", _core_by_hand, hint=1),
        NamedCheck("random: at most half a step off", _core_half_step, hint=1),
        NamedCheck("edges: rows of zeros, equal and tiny numbers", _core_zeros, hint=3),
        NamedCheck("edges: a large token among small ones", _core_tokens_apart, hint=1),
        NamedCheck("edges: a small head beside a large one", check_heads_apart, hint=1),
        NamedCheck("edges: large K, small V", check_kinds_apart, hint=2),
        NamedCheck("edges: slots in any order, layers apart", _core_places, hint=2),
        NamedCheck("state: a slot is written again", check_written_again, hint=2),
        NamedCheck("state: inputs and what was read unchanged", _core_state, hint=3),
        NamedCheck("engine: the same tokens in any step", check_any_step, hint=3),
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
