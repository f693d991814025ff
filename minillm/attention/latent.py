"""Attention over latents: the torch backend for models whose cache holds one compressed vector per token, not keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.torch_backend import RowGroup, TorchAttention, precision_name
from minillm.cache.kv_store import KVStore
from minillm.engine.batch import ForwardBatch
from minillm.model.config import ModelConfig
from minillm.model.mla_config import MLAConfig
from minillm.perf.work import Work, visible_pairs


@dataclass(frozen=True)
class LatentGroup(RowGroup):
    """A group that knows what it costs. pairs: visible queries and keys; read: keys that some query sees."""

    pairs: int
    read: int


class LatentAttention(TorchAttention):
    """Plans rows as the torch backend does, and computes each group of them in one of two forms that give the same result.

    Naive: the latents that a row reads become keys and values of all heads, and then it is attention as ever. Absorbed: each
    query goes through its half of the up-projection instead and meets the latents as they lie: one key, ``cache_width`` wide, for
    all heads, whose latent part is the value too. form: "auto" takes, group by group, the form of fewer FLOPs: naive for whole
    prompts, absorbed for decoding; "absorbed" and "naive" are always that.
    """

    def __init__(self, window: int | None = None, sinks: int = 0, form: str = "auto"):
        super().__init__(window, sinks)
        self.form = form

    def _group(self, batch: ForwardBatch, rows: list[int], *rest: Any, **more: Any) -> LatentGroup:
        group = super()._group(batch, rows, *rest, **more)
        lengths = [(batch.q_lens[r], batch.kv_lens[r]) for r in rows]
        pairs = sum(visible_pairs(q, kv, self.view.size, self.view.sinks) for q, kv in lengths)
        read = sum(self.view.count(q, kv) for q, kv in lengths)
        return LatentGroup(group.tokens, group.q_len, group.slots, group.mask, pairs, read)

    def absorbs(self, shape: MLAConfig, heads: int, group: RowGroup) -> bool:
        if self.form != "auto":
            return self.form == "absorbed"
        return shape.absorbs(heads, group.q_len, group.slots.shape[1])

    def latent(
        self, q_nope: Tensor, q_rope: Tensor, up: Tensor, scale: float, shape: MLAConfig, layer: int, store: KVStore,
        plan: Sequence[RowGroup],
    ) -> Tensor:  # fmt: skip
        """q_nope [tokens, heads, nope_dim]; q_rope [tokens, heads, rope_dim], rotated; up [heads, nope_dim + v_dim, kv_rank]:
        what makes a head's key and value of a latent → [tokens, heads, v_dim]. This step's latents and keys are in the store."""
        heads = up.shape[0]
        out = q_nope.new_empty(len(q_nope), heads, shape.v_dim)
        for group in plan:
            form = absorbed if self.absorbs(shape, heads, group) else naive
            rows = latent_rows(store, layer, group.slots)
            out[group.tokens] = form(q_nope[group.tokens], q_rope[group.tokens], rows, up, scale, group)
        return out

    def work(self, batch: ForwardBatch, plan: Sequence[RowGroup], config: ModelConfig, dtype: torch.dtype) -> Work:
        """Columns of zeros that torch's kernel asks for where keys and values differ in width are not counted."""
        shape, heads, element = config.mla, config.num_heads, dtype.itemsize
        assert shape is not None
        total = Work()
        for group in plan:
            assert isinstance(group, LatentGroup)
            queries, keys = group.slots.shape[0] * group.q_len, group.slots.numel()
            if self.absorbs(shape, heads, group):
                flops, launches = shape.absorbed_flops(heads, queries, group.pairs), 5
                # a query becomes a latent, is joined with its rotated part, and its result becomes a value
                moved = queries * heads * (shape.nope_dim + 2 * shape.kv_rank + 4 * shape.cache_width + shape.v_dim)
            else:
                flops, launches = shape.naive_flops(heads, keys, group.pairs), 5
                # keys and values of all heads are made, the keys joined with the rotated part, and both read
                moved = keys * heads * (2 * shape.nope_dim + 2 * shape.v_dim + 2 * shape.head_dim) + keys * shape.rope_dim
                moved += queries * heads * (3 * shape.head_dim + shape.v_dim)
            moved += 2 * keys * shape.cache_width  # the gathered copy is written and read
            total += Work(
                flops={precision_name(dtype): flops}, weight_bytes=shape.up_params(heads) * element,
                kv_read_bytes=group.read * shape.cache_width * element, activation_bytes=moved * element,
                launches=launches + (1 if len(plan) == 1 else 3),
            )  # fmt: skip
        return total


def latent_rows(store: KVStore, layer: int, slots: Tensor) -> Tensor:
    """slots [rows, keys] → what lies there, latent and rotated key side by side: [rows, keys, cache_width]."""
    gather = getattr(store, "rows", None)
    if gather is not None:
        rows: Tensor = gather(layer, slots)
        return rows
    key, latent = store.read(layer, slots)
    return torch.cat((latent, key), dim=-1).squeeze(2)


def absorbed(q_nope: Tensor, q_rope: Tensor, rows: Tensor, up: Tensor, scale: float, group: RowGroup) -> Tensor:
    """Attention in the latent space. rows [rows, keys, cache_width]; the rest as in ``LatentAttention.latent``.

    q · (W_k c) = (W_kᵀ q) · c, and Σ p (W_v c) = W_v Σ p c: the up-projection moves from every key to the query and the result.
    """
    nope, rank = q_nope.shape[-1], up.shape[-1]
    heads = len(up)
    in_latent = torch.bmm(q_nope.transpose(0, 1), up[:, :nope]).transpose(0, 1)  # [tokens, heads, kv_rank]
    q = torch.cat((in_latent, q_rope), dim=-1)
    if group.q_len == 1:  # all heads share the key: they are the rows of one small matrix product
        shared = rows.unsqueeze(1)
        out = F.scaled_dot_product_attention(q.unsqueeze(1), shared, shared, group.mask, scale=scale).squeeze(1)
    else:
        shared = rows.unsqueeze(1).expand(-1, heads, -1, -1)
        q = q.unflatten(0, (-1, group.q_len)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, shared, shared, group.mask, scale=scale).transpose(1, 2).flatten(0, 1)
    values = torch.bmm(out[..., :rank].transpose(0, 1), up[:, nope:].transpose(1, 2))
    return values.transpose(0, 1)


def naive(q_nope: Tensor, q_rope: Tensor, rows: Tensor, up: Tensor, scale: float, group: RowGroup) -> Tensor:
    """Attention over the keys and values that the latents stand for; arguments as ``absorbed`` takes them."""
    nope, rank = q_nope.shape[-1], up.shape[-1]
    heads, v_dim = len(up), up.shape[1] - nope
    made = F.linear(rows[..., :rank], up.flatten(0, 1)).unflatten(-1, (heads, -1))
    shared = rows[..., rank:].unsqueeze(2).expand(-1, -1, heads, -1)
    k, v = torch.cat((made[..., :nope], shared), dim=-1), made[..., nope:]
    q = torch.cat((q_nope, q_rope), dim=-1).unflatten(0, (-1, group.q_len))
    # torch's tiled kernel wants one width for all; without it every score would be written to memory
    width = max(q.shape[-1], v_dim)
    q, k, v = (F.pad(x, (0, width - x.shape[-1])).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, group.mask, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)[..., :v_dim]
