"""Exercise 1.1: the KV store, a causal mask that is right only for prompts, and a decode step for rows of different lengths."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import TorchAttention, attend
from minillm.cache.kv_store import PlainKVStore
from minillm.course.expect import Mismatch, bytes_held, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.engine.batch import ForwardBatch, slots_of
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer

TINY = ModelConfig(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, max_position=64,
    name="a tiny random model",
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 6, 1, 8, 0])
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
TOLERANCE = 1e-5


def _config(layers: int = 1, heads: int = 1, kv_heads: int = 1, dim: int = 2) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        max_position=64,
    )  # fmt: skip


def _tokens(**options: Any) -> list[tuple[int, ...]]:
    """Greedy tokens of three prompts of different lengths on the tiny model."""
    llm = LLM(Transformer.random(TINY), dtype="float32", block_size=4, **{"num_blocks": 24, **options})
    return [output.token_ids for output in llm.generate(list(PROMPTS), GREEDY)]


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


# 1.1 core: the KV store -----------------------------------------------------------------------------------------------------


def _store_shapes(store: Any) -> None:
    config = _config(layers=2, heads=6, kv_heads=2, dim=4)
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
    s = store(_config(), 8, torch.float32, torch.device("cpu"))
    k = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]])
    s.write(0, torch.tensor([4, 5, 6]), k, 10 * k)
    for slot, row in ((4, [1.0, 2.0]), (5, [3.0, 4.0]), (6, [5.0, 6.0])):
        got_k, got_v = s.read(0, torch.tensor([[slot]]))
        expect_equal(got_k, torch.tensor([[[row]]]), what=f"k of slot {slot}")
        expect_equal(got_v, 10 * torch.tensor([[[row]]]), what=f"v of slot {slot}")


def _store_layers(store: Any) -> None:
    s = store(_config(layers=3), 4, torch.float32, torch.device("cpu"))
    for layer in range(3):
        s.write(layer, torch.tensor([2]), torch.full((1, 1, 2), 1.0 + layer), torch.full((1, 1, 2), -1.0 - layer))
    for layer in range(3):
        k, v = s.read(layer, torch.tensor([[2]]))
        expect_equal(k, torch.full((1, 1, 1, 2), 1.0 + layer), what=f"k of layer {layer}")
        expect_equal(v, torch.full((1, 1, 1, 2), -1.0 - layer), what=f"v of layer {layer}")


def _store_against_dict(store: Any) -> None:
    config, slots = _config(layers=2, heads=4, kv_heads=2, dim=6), 40
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
    s = store(_config(), 12, torch.float32, torch.device("cpu"))
    places = torch.tensor([9, 2, 7, 3])
    k = torch.arange(8.0).view(4, 1, 2)
    s.write(0, places, k.clone(), -k)
    expect_equal(s.read(0, places[None])[0][0], k, what="k in the order in which it was written")
    expect_equal(s.read(0, places.flip(0)[None])[1][0], -k.flip(0), what="v, slots backwards")


def _store_one_slot(store: Any) -> None:
    s = store(_config(), 1, torch.float32, torch.device("cpu"))
    k = torch.tensor([[[3.0, -3.0]]])
    s.write(0, torch.tensor([0]), k.clone(), k + 1)
    expect_equal(s.read(0, torch.tensor([[0]])), (k[None], k[None] + 1), what="a store of one slot")


def _store_partial_block(store: Any) -> None:
    """Blocks 2 and 1 of four slots hold six tokens: the last block is half full, and a seventh joins them."""
    s = store(_config(), 16, torch.float32, torch.device("cpu"))
    k = torch.arange(1.0, 15.0).view(7, 1, 2)
    slots = torch.from_numpy(slots_of([2, 1], 4, 0, 7))
    s.write(0, slots[:6], k[:6].clone(), k[:6].clone())
    s.write(0, slots[6:], k[6:].clone(), k[6:].clone())
    expect_equal(s.read(0, slots[None])[0][0], k, what="seven tokens in blocks [2, 1]")


def _store_stale(store: Any) -> None:
    s = store(_config(), 4, torch.float32, torch.device("cpu"))
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
        s = store(_config(), 8, torch.float32, torch.device("cpu"))
    s.write(0, torch.tensor([5]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    for name, x in zip("kv", s.read(0, torch.tensor([[0, 0]])), strict=True):
        if not bool(torch.isfinite(x).all()):
            got = float(x.flatten()[0])
            raise Mismatch(f"{name} of slot 0, never written: got {got}, expected a finite number (padding reads it)")


def _store_inputs(store: Any) -> None:
    s = store(_config(), 8, torch.float32, torch.device("cpu"))
    slots, k, v = torch.tensor([5, 1]), torch.randn(2, 1, 2), torch.randn(2, 1, 2)
    with unchanged(slots=slots, k=k, v=v):
        s.write(0, slots, k, v)
        s.read(0, slots[None])


def _store_aliases(store: Any) -> None:
    s = store(_config(), 8, torch.float32, torch.device("cpu"))
    k = torch.ones(2, 1, 2)
    places = torch.tensor([4, 5])
    s.write(0, places, k, k)
    k.fill_(7.0)  # the caller uses its tensor for something else
    got = s.read(0, places[None])[0]
    expect_equal(got, torch.ones(1, 2, 1, 2), what="k after the caller reused its tensor")
    s.write(0, places, k, k)
    expect_equal(got, torch.ones(1, 2, 1, 2), what="what was read earlier, after a later write")
    other = store(_config(), 8, torch.float32, torch.device("cpu"))
    other.write(0, places, -k, -k)
    expect_equal(s.read(0, places[None])[0], torch.full((1, 2, 1, 2), 7.0), what="k after a write to another store")


def _store_engine(store: Any) -> None:
    expected = _tokens(kv_cache="none")
    expect_equal(_tokens(kv_store=store), expected, what="tokens of three prompts on your store, against recomputation")
    # 8 blocks are too few for all three: blocks change hands, and their old content must not shine through
    expect_equal(_tokens(kv_store=store, num_blocks=8), expected, what="the same with a pool that is too small for all three")


def _store_held(store: Any) -> None:
    config = _config(layers=2, heads=6, kv_heads=2, dim=4)
    s = store(config, 100, torch.float32, torch.device("cpu"))
    for layer in range(2):
        s.write(layer, torch.arange(100), *torch.randn(2, 100, 2, 4).unbind())
    expect_at_most(bytes_held(s), 100 * s.bytes_per_token, "bytes held for 100 slots")


def _store_written(store: Any) -> None:
    config = _config(layers=4, heads=6, kv_heads=2, dim=8)
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


# An oracle for attention, in float64 and one query at a time ------------------------------------------------------------------


def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query [heads, dim] over keys and values [length, kv_heads, dim] → [heads, dim]."""
    group = q.shape[0] // k.shape[1]
    out = []
    for head in range(q.shape[0]):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        weights = (keys @ q[head].double() / q.shape[1] ** 0.5).softmax(0)
        out.append(weights @ values)
    return torch.stack(out).to(q.dtype)


def causal(q: Tensor, k: Tensor, v: Tensor, past: int) -> Tensor:
    """Queries at positions past, past + 1, … over all keys [past + new, kv_heads, dim]."""
    return torch.stack([oracle(q[i], k[: past + i + 1], v[: past + i + 1]) for i in range(len(q))])


class Through(TorchAttention):
    """The engine's attention with the arithmetic handed to ``answer(q, store, layer, batch)``."""

    def __init__(self, answer: Callable[[Tensor, Any, int, ForwardBatch], Tensor]):
        super().__init__()
        self.answer = answer

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> Any:
        return super().plan(batch, dtype), batch

    def forward(self, q: Tensor, layer: int, store: Any, plan: Any) -> Tensor:
        return self.answer(q, store, layer, plan[1])

    def work(self, batch: ForwardBatch, plan: Any, config: ModelConfig, dtype: torch.dtype) -> Any:
        return super().work(batch, plan[0], config, dtype)


def _rows(batch: ForwardBatch) -> list[Tensor]:
    """The slots of each row's visible tokens."""
    lens = zip(batch.tables, batch.kv_lens, strict=True)
    return [torch.from_numpy(slots_of(table, batch.block_size, 0, n)) for table, n in lens]


# 1.1 break: attention over a cache --------------------------------------------------------------------------------------------


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
        for start, new, slots in zip(starts, batch.q_lens, _rows(batch)):
            k, v = (x[0] for x in store.read(layer, slots[None]))
            past = len(slots) - new
            out.append(f(q[start : start + new], k[past:], v[past:], k[:past], v[:past])[0])
        return torch.cat(out)

    expected = _tokens(kv_cache="none")
    for chunk in (2048, 4):
        got = _tokens(attention_backend=Through(answer), max_num_batched_tokens=chunk)
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


# 1.1 stretch: one decode step for rows of different lengths -------------------------------------------------------------------


class CountingStore(PlainKVStore):
    """A store that says how often it was read and how many rows it handed out."""

    reads = gathered = 0

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        self.reads += 1
        self.gathered += slots.numel()
        return super().read(layer, slots)


def _ragged(
    lengths: Sequence[int], heads: int = 6, kv_heads: int = 2, dim: int = 8
) -> tuple[Tensor, CountingStore, list[Tensor]]:
    """Queries, a store in which only the rows' own slots hold numbers and all others NaN, and the rows' slots, shuffled."""
    total = sum(lengths)
    store = CountingStore.allocate(_config(2, heads, kv_heads, dim), total + 9, torch.float32)
    assert isinstance(store, CountingStore)
    store.poison(torch.arange(store.num_slots))
    rows = [r.clone() for r in torch.randperm(total + 8)[:total].add(1).split(list(lengths))]
    for layer in range(2):
        store.write(layer, torch.cat(rows), *torch.randn(2, total, kv_heads, dim).unbind())
    return torch.randn(len(lengths), heads, dim), store, rows


def _ragged_compare(f: Any, lengths: Sequence[int], what: str, scale: float = 1.0, **sizes: int) -> None:
    q, store, rows = _ragged(lengths, **sizes)
    q = q * scale
    expected = []
    for i, slots in enumerate(rows):
        k, v = store.read(1, slots[None])
        expected.append(oracle(q[i], k[0], v[0]))
    expect_equal(f(q, store, 1, rows), torch.stack(expected), atol=TOLERANCE * max(1.0, scale / 100), what=what)


def _stretch_shapes(f: Any) -> None:
    q, store, rows = _ragged([4, 4, 4])
    expect_shape(f(q, store, 0, rows), [3, 6, 8], torch.float32)


def _stretch_by_hand(f: Any) -> None:
    store = PlainKVStore.allocate(_config(), 6, torch.float32)
    v = torch.tensor([[[2.0, 0.0]], [[4.0, 2.0]], [[9.0, 9.0]]])
    store.write(0, torch.tensor([1, 2, 4]), torch.ones(3, 1, 2), v)
    out = f(torch.zeros(2, 1, 2), store, 0, [torch.tensor([1, 2]), torch.tensor([4])])
    expect_equal(out, torch.tensor([[[3.0, 1.0]], [[9.0, 9.0]]]), atol=TOLERANCE, what="rows of two tokens and of one")


def _stretch_random(f: Any) -> None:
    for lengths in ([5, 2, 9], [1, 17, 3, 8]):
        _ragged_compare(f, lengths, f"lengths {lengths}")


def _stretch_equal(f: Any) -> None:
    _ragged_compare(f, [6, 6], "rows of equal length")
    _ragged_compare(f, [5], "one row")


def _stretch_short(f: Any) -> None:
    _ragged_compare(f, [1, 1, 1], "rows of one token")
    _ragged_compare(f, [1, 30], "one token beside thirty")


def _stretch_heads(f: Any) -> None:
    _ragged_compare(f, [3, 5], "no grouping", heads=4, kv_heads=4)
    _ragged_compare(f, [3, 5], "one KV head for all", heads=5, kv_heads=1)


def _stretch_large(f: Any) -> None:
    _ragged_compare(f, [4, 7, 2], "scores of several hundred", scale=1000.0)


def _stretch_state(f: Any) -> None:
    q, store, rows = _ragged([3, 6])
    own = torch.cat(rows)
    before = store.read(0, own[None])
    with unchanged(q=q, rows=rows):
        f(q, store, 0, rows)
    expect_equal(store.read(0, own[None]), before, what="the store's content")


def _stretch_engine(f: Any) -> None:
    def answer(q: Tensor, store: Any, layer: int, batch: ForwardBatch) -> Tensor:
        rows = _rows(batch)
        if set(batch.q_lens) == {1}:
            return f(q, store, layer, rows)
        out, starts = [], itertools.accumulate(batch.q_lens, initial=0)
        for start, new, slots in zip(starts, batch.q_lens, rows):
            k, v = (x[0] for x in store.read(layer, slots[None]))
            out.append(causal(q[start : start + new], k, v, len(slots) - new))
        return torch.cat(out)

    got = _tokens(attention_backend=Through(answer))
    expect_equal(got, _tokens(kv_cache="none"), what="tokens of three prompts that decode together")


def _stretch_budget(f: Any) -> None:
    q, store, rows = _ragged([int(n) for n in torch.randint(1, 12, (32,))])
    store.reads = store.gathered = 0
    f(q, store, 0, rows)
    expect_at_most(store.reads, 1, "reads of the store for 32 rows")
    expect_at_most(store.gathered, 32 * max(map(len, rows)), "slots gathered")


STRETCH = Task(
    "1.1 stretch",
    "One decode step for rows of different lengths",
    (
        NamedCheck("shape", _stretch_shapes, hint=2),
        NamedCheck("exact: rows of two and of one by hand", _stretch_by_hand, hint=1),
        NamedCheck("random: against one row at a time", _stretch_random, hint=1),
        NamedCheck("edges: equal lengths, one row", _stretch_equal, hint=3),
        NamedCheck("edges: rows of one token", _stretch_short, hint=3),
        NamedCheck("edges: other groupings of heads", _stretch_heads, hint=2),
        NamedCheck("edges: large scores", _stretch_large, hint=3),
        NamedCheck("state: inputs and store unchanged", _stretch_state),
        NamedCheck("engine: three prompts decode together", _stretch_engine, hint=3),
        NamedCheck("budget: one read for all rows", _stretch_budget, hint=1),
    ),
    (
        "Pad the lists of slots to the longest row, read once, and mask what is padding. A masked key has weight 0, but\n"
        "0 * NaN is NaN: pad with a slot whose content you know to be finite. Each row has at least one of its own.",
        "slots [rows, longest]; k, v [rows, longest, kv_heads, dim] → transpose to [rows, kv_heads, longest, dim];\n"
        "q [rows, heads, 1, dim]; mask [rows, 1, 1, longest], True where a key is the row's own. enable_gqa=True groups heads.",
        "lengths = torch.tensor([len(r) for r in rows]); slots = pad each row with row[0];\n"
        "mask = torch.arange(longest) < lengths[:, None]; F.scaled_dot_product_attention(..., attn_mask=mask[:, None, None, :])",
    ),
    references=(TorchAttention, attend, oracle, causal),
)

TASKS = (CORE, BREAK, STRETCH)
