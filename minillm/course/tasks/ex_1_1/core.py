"""1.1 core: write the KV store that the engine keeps keys and values in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.cache.kv_store import PlainKVStore
from minillm.course.expect import Mismatch, bytes_held, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_1_1.common import config_of, generated
from minillm.engine.batch import slots_of


class Traffic(TorchDispatchMode):
    """Counts torch's operators while it is active, and the bytes that they write: a new tensor whole, into an existing one
    only what is put there. Views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
        held = {t.untyped_storage().data_ptr() for t in given}
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if not isinstance(made, Tensor):
                continue
            if made.untyped_storage().data_ptr() not in held:
                self.bytes += made.nbytes
                self.operators += 1
            elif func._schema.is_mutable:
                self.bytes += max([t.nbytes for t in given[1:] if t.is_floating_point()], default=made.nbytes)
                self.operators += 1
        return result


def _store_shapes(store: Any) -> None:
    config = config_of(layers=2, heads=6, kv_heads=2, dim=4)
    for dtype in (torch.float32, torch.bfloat16):
        s = store(config, 10, dtype, torch.device("cpu"))
        s.write(1, torch.tensor([7, 2, 3]), torch.zeros(3, 2, 4, dtype=dtype), torch.zeros(3, 2, 4, dtype=dtype))
        got = s.read(1, torch.tensor([[7, 2, 3]] * 5))
        if not isinstance(got, tuple) or len(got) != 2:
            raise Mismatch(f"read gives a pair (k, v), got {type(got).__name__}")
        for name, x in zip(("k", "v"), got, strict=True):
            expect_shape(x, [5, 3, 2, 4], dtype, f"{name} of read, slots [5, 3]")
        expect_equal(s.num_slots, 10, what="num_slots")
        expect_equal(s.bytes_per_token, 2 * 2 * 2 * 4 * dtype.itemsize, what=f"bytes_per_token of 2 layers in {dtype}")


def _store_by_hand(store: Any) -> None:
    s = store(config_of(), 8, torch.float32, torch.device("cpu"))
    k = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]])
    s.write(0, torch.tensor([4, 5, 6]), k, 10 * k)
    for slot, row in ((4, [1.0, 2.0]), (5, [3.0, 4.0]), (6, [5.0, 6.0])):
        got_k, got_v = s.read(0, torch.tensor([[slot]]))
        expect_equal(got_k, torch.tensor([[[row]]]), what=f"k of slot {slot}")
        expect_equal(got_v, 10 * torch.tensor([[[row]]]), what=f"v of slot {slot}")


def _store_layers(store: Any) -> None:
    s = store(config_of(layers=3), 4, torch.float32, torch.device("cpu"))
    for layer in range(3):
        s.write(layer, torch.tensor([2]), torch.full((1, 1, 2), 1.0 + layer), torch.full((1, 1, 2), -1.0 - layer))
    for layer in range(3):
        k, v = s.read(layer, torch.tensor([[2]]))
        expect_equal(k, torch.full((1, 1, 1, 2), 1.0 + layer), what=f"k of layer {layer}")
        expect_equal(v, torch.full((1, 1, 1, 2), -1.0 - layer), what=f"v of layer {layer}")


def _store_against_dict(store: Any) -> None:
    config, slots = config_of(layers=2, heads=4, kv_heads=2, dim=6), 40
    s = store(config, slots, torch.float32, torch.device("cpu"))
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for turn in range(12):
        layer, n = turn % 2, int(torch.randint(1, 9, ()))
        places = torch.randperm(slots)[:n]
        k, v = torch.randn(2, n, 2, 6).unbind()
        for i, slot in enumerate(places.tolist()):
            kept[layer, slot] = k[i].clone(), v[i].clone()
        s.write(layer, places, k, v)
        known = [slot for at, slot in kept if at == layer]
        wanted = torch.tensor(known)[torch.randint(len(known), (3, 5))]
        got = s.read(layer, wanted)
        for which, name in enumerate("kv"):
            rows = [torch.stack([kept[layer, slot][which] for slot in row]) for row in wanted.tolist()]
            expect_equal(got[which], torch.stack(rows), what=f"{name} after write {turn + 1}")


def _store_out_of_order(store: Any) -> None:
    s = store(config_of(), 12, torch.float32, torch.device("cpu"))
    places = torch.tensor([9, 2, 7, 3])
    k = torch.arange(8.0).view(4, 1, 2)
    s.write(0, places, k.clone(), -k)
    expect_equal(s.read(0, places[None])[0][0], k, what="k in the order in which it was written")
    expect_equal(s.read(0, places.flip(0)[None])[1][0], -k.flip(0), what="v, slots backwards")


def _store_one_slot(store: Any) -> None:
    s = store(config_of(), 1, torch.float32, torch.device("cpu"))
    k = torch.tensor([[[3.0, -3.0]]])
    s.write(0, torch.tensor([0]), k.clone(), k + 1)
    expect_equal(s.read(0, torch.tensor([[0]])), (k[None], k[None] + 1), what="a store of one slot")


def _store_partial_block(store: Any) -> None:
    """Blocks 2 and 1 of four slots hold six tokens: the last block is half full, and a seventh joins them."""
    s = store(config_of(), 16, torch.float32, torch.device("cpu"))
    k = torch.arange(1.0, 15.0).view(7, 1, 2)
    slots = torch.from_numpy(slots_of([2, 1], 4, 0, 7))
    s.write(0, slots[:6], k[:6].clone(), k[:6].clone())
    s.write(0, slots[6:], k[6:].clone(), k[6:].clone())
    expect_equal(s.read(0, slots[None])[0][0], k, what="seven tokens in blocks [2, 1]")


def _store_stale(store: Any) -> None:
    s = store(config_of(), 4, torch.float32, torch.device("cpu"))
    for value in (1.0, 2.0):
        s.write(0, torch.tensor([1, 3]), torch.full((2, 1, 2), value), torch.full((2, 1, 2), value))
    expect_equal(s.read(0, torch.tensor([[1, 3]]))[0], torch.full((1, 2, 1, 2), 2.0), what="a slot written a second time")


class Unlucky(TorchDispatchMode):
    """Memory that nobody initialised holds whatever was there before; while this is active it holds NaN."""

    FRESH = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.fill_(float("nan")) if func._schema.name in self.FRESH and made.is_floating_point() else made


def _store_padding(store: Any) -> None:
    with Unlucky():
        s = store(config_of(), 8, torch.float32, torch.device("cpu"))
    s.write(0, torch.tensor([5]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    for name, x in zip("kv", s.read(0, torch.tensor([[0, 0]])), strict=True):
        if not bool(torch.isfinite(x).all()):
            got = float(x.flatten()[0])
            raise Mismatch(f"{name} of slot 0, never written: got {got}, expected a finite number (padding reads it)")


def _store_inputs(store: Any) -> None:
    s = store(config_of(), 8, torch.float32, torch.device("cpu"))
    slots, k, v = torch.tensor([5, 1]), torch.randn(2, 1, 2), torch.randn(2, 1, 2)
    with unchanged(slots=slots, k=k, v=v):
        s.write(0, slots, k, v)
        s.read(0, slots[None])


def _store_aliases(store: Any) -> None:
    s = store(config_of(), 8, torch.float32, torch.device("cpu"))
    k = torch.ones(2, 1, 2)
    places = torch.tensor([4, 5])
    s.write(0, places, k, k)
    k.fill_(7.0)  # the caller uses its tensor for something else
    got = s.read(0, places[None])[0]
    expect_equal(got, torch.ones(1, 2, 1, 2), what="k after the caller reused its tensor")
    s.write(0, places, k, k)
    expect_equal(got, torch.ones(1, 2, 1, 2), what="what was read earlier, after a later write")
    other = store(config_of(), 8, torch.float32, torch.device("cpu"))
    other.write(0, places, -k, -k)
    expect_equal(s.read(0, places[None])[0], torch.full((1, 2, 1, 2), 7.0), what="k after a write to another store")


def _store_engine(store: Any) -> None:
    expected = generated(kv_cache="none")
    expect_equal(generated(kv_store=store), expected, what="tokens of three prompts on your store, against recomputation")
    # 8 blocks are too few for all three: blocks change hands, and their old content must not shine through
    expect_equal(generated(kv_store=store, num_blocks=8), expected, what="the same with a pool that is too small for all three")


def _store_held(store: Any) -> None:
    config = config_of(layers=2, heads=6, kv_heads=2, dim=4)
    s = store(config, 100, torch.float32, torch.device("cpu"))
    for layer in range(2):
        s.write(layer, torch.arange(100), *torch.randn(2, 100, 2, 4).unbind())
    expect_at_most(bytes_held(s), 100 * s.bytes_per_token, "bytes held for 100 slots")


def _store_written(store: Any) -> None:
    config = config_of(layers=4, heads=6, kv_heads=2, dim=8)
    s = store(config, 2000, torch.float32, torch.device("cpu"))
    k, slots = torch.randn(1, 2, 8), torch.tensor([1234])
    with Traffic() as step:
        for layer in range(4):
            s.write(layer, slots, k, k)
    expect_at_most(step.bytes, 4 * s.bytes_per_token, "bytes written for one token in 4 layers")
    with Traffic() as step:
        s.read(0, torch.randint(2000, (64, 4)))
    expect_at_most(step.operators, 12, "operators for reading 64 rows of 4 slots")


CORE = Task(
    "1.1 core",
    "Write the KV store",
    (
        NamedCheck("shape: what read gives, and what the store says about itself", _store_shapes, hint=2),
        NamedCheck("exact: three tokens by hand", _store_by_hand, hint=1),
        NamedCheck("exact: layers are apart", _store_layers, hint=2),
        NamedCheck("random: against a dictionary", _store_against_dict, hint=3),
        NamedCheck("edges: slots out of order", _store_out_of_order, hint=1),
        NamedCheck("edges: a store of one slot", _store_one_slot, hint=3),
        NamedCheck("edges: the last block is half full", _store_partial_block, hint=1),
        NamedCheck("edges: a slot that is used again", _store_stale, hint=3),
        NamedCheck("edges: padding reads slot 0 before anybody wrote it", _store_padding, hint=2),
        NamedCheck("state: inputs unchanged", _store_inputs, hint=3),
        NamedCheck("state: nothing is shared with the caller or another store", _store_aliases, hint=3),
        NamedCheck("engine: the same tokens as recomputation", _store_engine, hint=3),
        NamedCheck("budget: bytes held", _store_held, hint=2),
        NamedCheck("budget: bytes written for one token, operators of a read", _store_written, hint=3),
    ),
    (
        "A slot is an index into a table that is allocated once. Writing puts a row where the slot says; reading gathers rows\n"
        "in the order of the slots. Which token or request a slot belongs to is none of the store's business.",
        "One tensor for K and one for V, each [num_layers, num_slots, num_kv_heads, head_dim] in the given dtype, all zeros.\n"
        "num_kv_heads, not num_heads. bytes_per_token counts K and V of all layers: 2 * layers * kv_heads * head_dim * bytes.",
        "write: self.k[layer, slots] = ... (and v). read: return self.k[layer, slots], ...\n"
        "An index tensor on the left writes in place and copies what it is given; on the right it gathers into a new tensor.",
    ),
    Seam("kv_store", "KV store", lambda cls: {"kv_store": cls}),
    (PlainKVStore,),
)
