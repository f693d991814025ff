"""The seam for sparse attention: what a block of keys is summarised by, how a query scores it, and which blocks are taken."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class Indexer(Protocol):
    """Scores blocks of keys by small summaries of them, which are kept beside the KV."""

    def summarise(self, keys: Tensor) -> Tensor:
        """keys [blocks, block_size, kv_heads, head_dim], rotated as they lie in the store → [blocks, kv_heads, width]."""
        ...

    def score(self, q: Tensor, summaries: Tensor) -> Tensor:
        """q [rows, queries, heads, head_dim], summaries [rows, blocks, kv_heads, width] → [rows, queries, heads, blocks]: how
        large a logit the query may find in the block. Query head h belongs to KV head h // (heads // kv_heads)."""
        ...


class BoundsIndexer:
    """The smallest and the largest value of each dimension: no key of the block gets a larger logit than these two allow (Quest,
    Tang et al. 2024, arXiv 2406.10774). One block costs as much as two keys."""

    def summarise(self, keys: Tensor) -> Tensor:
        low, high = keys.aminmax(dim=1)
        return torch.cat((low, high), dim=-1)

    def score(self, q: Tensor, summaries: Tensor) -> Tensor:
        return grouped_products(torch.cat((q.clamp(max=0), q.clamp(min=0)), dim=-1), summaries) / math.sqrt(q.shape[-1])


class MeanIndexer:
    """The mean key of the block: its logit is the block's mean logit (MoBA, Lu et al. 2025, arXiv 2502.13189). One block costs as
    much as one key, and one strong key among weak ones is easily lost."""

    def summarise(self, keys: Tensor) -> Tensor:
        return keys.mean(dim=1)

    def score(self, q: Tensor, summaries: Tensor) -> Tensor:
        return grouped_products(q, summaries) / math.sqrt(q.shape[-1])


INDEXERS: dict[str, type[BoundsIndexer] | type[MeanIndexer]] = {"bounds": BoundsIndexer, "mean": MeanIndexer}


def shape_of(made: object) -> str:
    """What an indexer made, for a message: the shape of a tensor, else its type."""
    if not isinstance(made, Tensor):
        return type(made).__name__
    return f"{tuple(made.shape)}{' of complex numbers' if made.is_complex() else ''}"


def grouped_products(q: Tensor, keys: Tensor) -> Tensor:
    """Dot products of each query head with its KV head's vectors. q [rows, queries, heads, width], keys [rows, n, kv_heads,
    width] → [rows, queries, heads, n], in at least 32 bits where they could be too large for float16."""
    if q.dtype == torch.float16:
        q, keys = q.float(), keys.float()
    rows, queries, heads, width = q.shape
    kv_heads = keys.shape[2]
    q = q.unflatten(2, (kv_heads, -1)).transpose(1, 2).reshape(rows, kv_heads, -1, width)
    found = q @ keys.permute(0, 2, 3, 1)  # [rows, kv_heads, queries * group, n]
    return found.unflatten(2, (queries, -1)).transpose(1, 2).reshape(rows, queries, heads, -1)


def best_blocks(scores: Tensor, candidates: Tensor, k: int) -> Tensor:
    """The k blocks that a query's heads want most, [rows, queries, k] int64, ascending; of equal ones the earlier. Always
    candidates, also where scores are not finite: NaN counts as the least.

    scores [rows, queries, heads, blocks]; candidates [rows, queries, blocks] bool, more than k for every query. One choice serves
    all heads: each head spreads one unit of attention over the candidates (a softmax), and what a block gets of all heads counts.
    Logarithms keep shares apart that would vanish beside the largest.
    """
    known = isinstance(scores, Tensor) and scores.dim() == 4 and scores.shape[2] > 0 and not scores.is_complex()
    if not known or (*scores.shape[:2], scores.shape[3]) != candidates.shape:
        rows, queries, blocks = candidates.shape
        shape = f"[rows, queries, heads, blocks], here ({rows}, {queries}, heads, {blocks})"
        raise ValueError(f"score gives {shape}, real numbers; got {shape_of(scores)}")
    exact = torch.promote_types(scores.dtype, torch.float32)
    most = torch.finfo(exact).max / 4  # differences of such scores are still numbers
    finite = scores.to(exact).nan_to_num(-most, most, -most).clamp(-most, most)
    shares = finite.masked_fill(~candidates.unsqueeze(2), -math.inf).log_softmax(-1)
    wanted = shares.logsumexp(2)
    values, best = wanted.topk(k + 1, dim=-1)
    if not bool((values[..., k - 1] == values[..., k]).any()):
        return best[..., :k].sort(dim=-1).values
    # topk breaks ties as it likes, and so that the choice would depend on the shape of the batch
    kth = values[..., k - 1 : k]
    above, equal = wanted > kth, wanted == kth
    taken = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    return taken.nonzero()[:, -1].view(*wanted.shape[:-1], k)
