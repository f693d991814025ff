"""Wrong answers to exercise 1.1, each with the check that must catch it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minillm.attention.torch_backend import attend
from minillm.cache.kv_store import PlainKVStore


class Right:
    """What the core's answers below are variations of."""

    def __init__(self, config, num_slots, dtype, device):
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.num_slots = num_slots
        self.bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize

    def write(self, layer, slots, k, v):
        self.k[layer, slots] = k
        self.v[layer, slots] = v

    def read(self, layer, slots):
        return self.k[layer, slots], self.v[layer, slots]


class AlwaysFloat32(Right):
    def __init__(self, config, num_slots, dtype, device):
        super().__init__(config, num_slots, torch.float32, device)


class CountsOnlyKeys(Right):
    def __init__(self, *args):
        super().__init__(*args)
        self.bytes_per_token //= 2


class ReadsOnlyKeys(Right):
    def read(self, layer, slots):
        return self.k[layer, slots]


class Appends(Right):
    """The next free row, whatever the slots say."""

    def __init__(self, *args):
        super().__init__(*args)
        self.used = [0] * len(self.k)

    def write(self, layer, slots, k, v):
        start = self.used[layer] % self.num_slots
        for i in range(len(slots)):
            self.k[layer, (start + i) % self.num_slots] = k[i]
            self.v[layer, (start + i) % self.num_slots] = v[i]
        self.used[layer] += len(slots)


class Swapped(Right):
    def read(self, layer, slots):
        return self.v[layer, slots], self.k[layer, slots]


class OneLayer(Right):
    def write(self, layer, slots, k, v):
        super().write(0, slots, k, v)

    def read(self, layer, slots):
        return super().read(0, slots)


class AddsUp(Right):
    def write(self, layer, slots, k, v):
        self.k[layer].index_add_(0, slots, k)
        self.v[layer].index_add_(0, slots, v)


class FromTheFirstSlotOn(Right):
    """As if a request's slots always stood side by side."""

    def write(self, layer, slots, k, v):
        start = int(slots[0])
        room = self.k[layer, start : start + len(slots)].shape[0]
        self.k[layer, start : start + len(slots)] = k[:room]
        self.v[layer, start : start + len(slots)] = v[:room]


class SortsSlots(Right):
    def read(self, layer, slots):
        return super().read(layer, slots.sort(dim=1).values)


class ReadsASpan(Right):
    """A view of neighbouring rows where there is one: fast, and shared with whoever holds it."""

    def read(self, layer, slots):
        first, n = int(slots[0, 0]), slots.shape[1]
        if len(slots) == 1 and slots[0].tolist() == list(range(first, first + n)):
            return self.k[layer, None, first : first + n], self.v[layer, None, first : first + n]
        return super().read(layer, slots)


class FirstWriteStays(Right):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = set()

    def write(self, layer, slots, k, v):
        new = [i for i, slot in enumerate(slots.tolist()) if (layer, slot) not in self.seen]
        self.seen.update((layer, slot) for slot in slots.tolist())
        super().write(layer, slots[new], k[new], v[new])


class LeavesMemoryAsItIs(Right):
    def __init__(self, config, num_slots, dtype, device):
        super().__init__(config, num_slots, dtype, device)
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self.k, self.v = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)


class ClearsItsInput(Right):
    def write(self, layer, slots, k, v):
        super().write(layer, slots, k, v)
        k.zero_()


class KeepsReferences:
    """A dictionary of the caller's own rows."""

    def __init__(self, config, num_slots, dtype, device):
        self.num_slots, self.config, self.dtype = num_slots, config, dtype
        self.bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        self.rows = {}

    def write(self, layer, slots, k, v):
        for i, slot in enumerate(slots.tolist()):
            self.rows[layer, slot] = k[i], v[i]

    def read(self, layer, slots):
        zero = torch.zeros(self.config.num_kv_heads, self.config.head_dim, dtype=self.dtype)
        found = [[self.rows.get((layer, slot), (zero, zero)) for slot in row] for row in slots.tolist()]
        k, v = (torch.stack([torch.stack([pair[i] for pair in row]) for row in found]) for i in (0, 1))
        return k, v


class RowByRow(KeepsReferences):
    """The same with copies: right, and an operator per slot."""

    def write(self, layer, slots, k, v):
        super().write(layer, slots, k.clone(), v.clone())


class SharedByAll(Right):
    tables: dict = {}

    def __init__(self, *args):
        super().__init__(*args)
        key = self.k.shape, self.k.dtype
        self.k, self.v = self.tables.setdefault(key, (self.k, self.v))


class FortySlots(Right):
    """What goes beyond is dropped; only a whole engine gets there."""

    def write(self, layer, slots, k, v):
        keep = (slots < 40) | (slots >= 1000)
        super().write(layer, slots[keep], k[keep], v[keep])


class OnePerQueryHead(Right):
    def __init__(self, config, num_slots, dtype, device):
        super().__init__(config, num_slots, dtype, device)
        self.group = config.num_heads // config.num_kv_heads
        self.k, self.v = self.k.repeat_interleave(self.group, 2), self.v.repeat_interleave(self.group, 2)

    def write(self, layer, slots, k, v):
        super().write(layer, slots, k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1))

    def read(self, layer, slots):
        k, v = super().read(layer, slots)
        return k[:, :, :: self.group].contiguous(), v[:, :, :: self.group].contiguous()


class CopiesTheStore(Right):
    """A new table for every token."""

    def write(self, layer, slots, k, v):
        self.k, self.v = self.k.clone(), self.v.clone()
        super().write(layer, slots, k, v)


class Borrowed:
    """The engine's own store in the learner's clothes."""

    def __init__(self, config, num_slots, dtype, device):
        self.inner = PlainKVStore.allocate(config, num_slots, dtype, device)
        self.num_slots, self.bytes_per_token = num_slots, self.inner.bytes_per_token

    def write(self, layer, slots, k, v):
        self.inner.write(layer, slots, k, v)

    def read(self, layer, slots):
        return self.inner.read(layer, slots)


class Inherits(PlainKVStore):
    """The engine's own store with another constructor."""

    def __init__(self, config, num_slots, dtype, device):
        shape = (num_slots, 2, config.num_kv_heads, config.head_dim)
        super().__init__([torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)])


class LeavesNewMemoryAsItIs(Right):
    def __init__(self, *args):
        super().__init__(*args)
        self.k, self.v = self.k.new_empty(self.k.shape), torch.empty_like(self.v)


class HidesMemory(Right):
    """A second table, two objects further in."""

    class Drawer:
        __slots__ = ("inside",)

    def __init__(self, *args):
        super().__init__(*args)
        self.drawer = self.Drawer()
        self.drawer.inside = {"more": self.k.clone()}


SAYS = "shape: what read gives, and what the store says about itself"
HAND, LAYERS = "exact: three tokens by hand", "exact: layers are apart"
DICT, PADDING = "random: against a dictionary", "edges: padding reads slot 0 before anybody wrote it"
ALIASES = "state: nothing is shared with the caller or another store"

CORE = (
    (AlwaysFloat32, SAYS), (CountsOnlyKeys, SAYS), (ReadsOnlyKeys, SAYS), (Borrowed, SAYS), (Inherits, SAYS),
    (Appends, HAND), (Swapped, HAND), (OneLayer, LAYERS), (AddsUp, DICT), (FromTheFirstSlotOn, DICT), (SortsSlots, DICT),
    (FirstWriteStays, DICT),
    (LeavesMemoryAsItIs, PADDING), (LeavesNewMemoryAsItIs, PADDING), (HidesMemory, "budget: bytes held"),
    (ClearsItsInput, "state: inputs unchanged"), (ReadsASpan, ALIASES), (KeepsReferences, ALIASES), (SharedByAll, ALIASES),
    (FortySlots, "engine: the same tokens as recomputation"), (OnePerQueryHead, "budget: bytes held"),
    (CopiesTheStore, "budget: bytes written for one token, operators of a read"),
    (RowByRow, "budget: bytes written for one token, operators of a read"),
)  # fmt: skip


def masked(q, k, v, past_k, past_v, **options):
    all_k, all_v = torch.cat([past_k, k]), torch.cat([past_v, v])
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, all_k, all_v)), enable_gqa=True, **options)
    return out.transpose(0, 1), all_k, all_v


def triangle(q, past_k, diagonal):
    return torch.ones(len(q), len(past_k) + len(q), dtype=torch.bool).tril(diagonal)


def only_single_tokens(q, k, v, past_k, past_v):
    return masked(q, k, v, past_k, past_v, is_causal=len(q) > 1)


def no_mask(q, k, v, past_k, past_v):
    return masked(q, k, v, past_k, past_v)


def sees_its_successor(q, k, v, past_k, past_v):
    return masked(q, k, v, past_k, past_v, attn_mask=triangle(q, past_k, len(past_k) + 1))


def does_not_see_itself(q, k, v, past_k, past_v):
    return masked(q, k, v, past_k, past_v, attn_mask=triangle(q, past_k, len(past_k) - 1 if len(past_k) else 0))


def sees_the_whole_chunk(q, k, v, past_k, past_v):
    mask = triangle(q, past_k, 0 if len(past_k) == 0 else len(past_k) + len(q))
    return masked(q, k, v, past_k, past_v, attn_mask=mask)


def interleaved_heads(q, k, v, past_k, past_v):
    """Query head i on KV head i modulo their number, in place of i divided by the group."""
    group = q.shape[1] // k.shape[1]
    all_k, all_v = torch.cat([past_k, k]), torch.cat([past_v, v])
    heads_first = [x.transpose(0, 1) for x in (q, all_k.repeat(1, group, 1), all_v.repeat(1, group, 1))]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=triangle(q, past_k, len(past_k)))
    return out.transpose(0, 1), all_k, all_v


def writes_into_the_past(q, k, v, past_k, past_v):
    out = masked(q, k, v, past_k, past_v, attn_mask=triangle(q, past_k, len(past_k)))
    past_k.mul_(0.5)
    return out


def forgets_the_past(q, k, v, past_k, past_v):
    out = masked(q, k, v, past_k[:0], past_v[:0], is_causal=True)[0]
    return out, torch.cat([past_k, k]), torch.cat([past_v, v])


def exponentials_without_the_maximum(q, k, v, past_k, past_v):
    """The softmax as it stands in a textbook: exp overflows where a score is above 88."""
    all_k, all_v = torch.cat([past_k, k]), torch.cat([past_v, v])
    group = q.shape[1] // k.shape[1]
    heads_first = [x.transpose(0, 1) for x in (q, all_k.repeat_interleave(group, 1), all_v.repeat_interleave(group, 1))]
    weights = (heads_first[0] @ heads_first[1].transpose(1, 2) / q.shape[2] ** 0.5).exp() * triangle(q, past_k, len(past_k))
    return (weights / weights.sum(-1, keepdim=True) @ heads_first[2]).transpose(0, 1), all_k, all_v


DECODE, CHUNK = "random: then one token at a time", "edges: a chunk of tokens after a prefix"
BREAK = (
    (only_single_tokens, CHUNK), (no_mask, "exact: a prompt of three by hand"),
    (sees_its_successor, "exact: a prompt of three by hand"), (does_not_see_itself, DECODE), (sees_the_whole_chunk, CHUNK),
    (interleaved_heads, "edges: grouped heads"), (writes_into_the_past, "state: inputs unchanged"), (forgets_the_past, DECODE),
    (exponentials_without_the_maximum, "random: a prompt at once"),
)  # fmt: skip


def ragged(q, store, layer, rows, pad=lambda row: row[:1], masked=True):
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    slots = torch.stack([torch.cat([row, pad(row).expand(longest - len(row))]) for row in rows])
    mask = (torch.arange(longest) < lengths[:, None])[:, None, None] if masked else None
    k, v = (x.transpose(1, 2) for x in store.read(layer, slots))
    return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=True)[:, :, 0]


def keeps_a_dimension(q, store, layer, rows):
    return ragged(q, store, layer, rows)[:, :, None]


def pads_with_slot_0(q, store, layer, rows):
    return ragged(q, store, layer, rows, pad=lambda row: torch.zeros(1, dtype=torch.int64))


def no_padding_mask(q, store, layer, rows):
    return ragged(q, store, layer, rows, masked=False)


def cuts_to_the_shortest(q, store, layer, rows):
    shortest = min(map(len, rows))
    return ragged(q, store, layer, [row[:shortest] for row in rows])


def masks_after_the_softmax(q, store, layer, rows):
    lengths = torch.tensor([len(row) for row in rows])
    slots = torch.stack([torch.cat([row, row[:1].expand(int(lengths.max()) - len(row))]) for row in rows])
    k, v = (x.transpose(1, 2).repeat_interleave(q.shape[1] // x.shape[2], 1) for x in store.read(layer, slots))
    weights = (q[:, :, None] @ k.transpose(2, 3) / q.shape[2] ** 0.5).softmax(-1)
    return (weights * (torch.arange(slots.shape[1]) < lengths[:, None])[:, None, None] @ v)[:, :, 0]


def exponentials_as_they_are(q, store, layer, rows):
    lengths = torch.tensor([len(row) for row in rows])
    slots = torch.stack([torch.cat([row, row[:1].expand(int(lengths.max()) - len(row))]) for row in rows])
    k, v = (x.transpose(1, 2).repeat_interleave(q.shape[1] // x.shape[2], 1) for x in store.read(layer, slots))
    weights = (q[:, :, None] @ k.transpose(2, 3) / q.shape[2] ** 0.5).exp()
    weights = weights * (torch.arange(slots.shape[1]) < lengths[:, None])[:, None, None]
    return (weights / weights.sum(-1, keepdim=True) @ v)[:, :, 0]


def one_row_after_another(q, store, layer, rows):
    return torch.cat([ragged(q[i : i + 1], store, layer, [row]) for i, row in enumerate(rows)])


def borrows_the_engines(q, store, layer, rows):
    from minillm.attention.torch_backend import RowGroup

    groups = [RowGroup(slice(0, 1), 1, row[None], None) for row in rows]
    return torch.cat([attend(q[i : i + 1], layer, store, group) for i, group in enumerate(groups)])


BY_HAND, ONE_BY_ONE = "exact: rows of two and of one by hand", "random: against one row at a time"
STRETCH = (
    (keeps_a_dimension, "shape"), (pads_with_slot_0, ONE_BY_ONE), (no_padding_mask, ONE_BY_ONE),
    (cuts_to_the_shortest, BY_HAND), (masks_after_the_softmax, BY_HAND), (exponentials_as_they_are, "edges: large scores"),
    (one_row_after_another, "budget: one read for all rows"), (borrows_the_engines, "shape"),
)  # fmt: skip

WRONG = {"1.1 core": CORE, "1.1 break": BREAK, "1.1 stretch": STRETCH}
