"""The shape of multi-head latent attention: what is compressed, and how wide the parts of a head are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434). Widths are counts of elements.

    kv_rank: width of the latent that a token's keys and values are made from. q_rank: that of the queries; None does not compress
    them. nope_dim: the part of a query and key that carries no position, per head. rope_dim: the part that is rotated; its key is
    one for all heads. v_dim: a value, per head. interleaved: how a checkpoint stores rotated dimensions: in pairs that turn
    together (x0, y0, x1, y1, …), or as two halves.
    """

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    interleaved: bool = True

    def __post_init__(self) -> None:
        for name in ("kv_rank", "q_rank", "nope_dim", "rope_dim", "v_dim"):
            value = getattr(self, name)
            absent = name == "q_rank" and value is None
            if not absent and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} of latent attention must be a whole number of at least 1, got {value!r}")
        if not isinstance(self.interleaved, bool):
            raise ValueError(f"interleaved of latent attention must be True or False, got {self.interleaved!r:.60}")
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim of latent attention must be even for rotary embeddings, got {self.rope_dim}")

    @property
    def head_dim(self) -> int:
        """Width of a query."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_width(self) -> int:
        """Elements that one token leaves in the cache of one layer: its latent and its rotated key."""
        return self.kv_rank + self.rope_dim

    def up_params(self, heads: int) -> int:
        """Weights that turn a latent into the keys and values of all heads."""
        return self.kv_rank * heads * (self.nope_dim + self.v_dim)

    def params(self, hidden: int, heads: int) -> int:
        """Weights of a layer's attention products."""
        query = heads * self.head_dim
        down_q, up_q = (hidden * query, 0) if self.q_rank is None else (hidden * self.q_rank, self.q_rank * query)
        return down_q + up_q + hidden * self.cache_width + self.up_params(heads) + heads * self.v_dim * hidden

    # --- the two ways to the same attention: FLOPs of one layer ---

    def absorbed_flops(self, heads: int, queries: int, pairs: int) -> int:
        """Queries are brought into the latent space and results back; pairs are compared there, one wide key for all heads."""
        return 2 * queries * self.up_params(heads) + 2 * pairs * heads * (self.cache_width + self.kv_rank)

    def naive_flops(self, heads: int, keys: int, pairs: int) -> int:
        """Every key that is read is brought up to all heads; pairs are compared there."""
        return 2 * keys * self.up_params(heads) + 2 * pairs * heads * (self.head_dim + self.v_dim)

    def absorbs(self, heads: int, queries: int, keys: int) -> bool:
        """Whether queries of one row cost fewer FLOPs absorbed, each compared with all of its keys."""
        pairs = queries * keys
        return self.absorbed_flops(heads, queries, pairs) < self.naive_flops(heads, keys, pairs)
