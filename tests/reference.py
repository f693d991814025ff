"""What the engine must equal: the transformer from its formulas, one whole sequence at a time, and the rules that end a request.

Nothing here uses minillm's attention, cache, scheduler, sampler or detokenizer. Only the weights come from the model under test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

import torch
from torch import Tensor

from minillm import ModelConfig, SamplingParams, Transformer


class Reference:
    """Plain causal language model over the dense weights of a Transformer (default rope only).

    window: keys that a token sees, the model's own unless said; sinks: first keys that every token sees beside them. kv_dtype:
    what K after its rotation and V are rounded to, each token and head by itself.
    """

    def __init__(self, model: Transformer, window: int | None = None, sinks: int = 0, kv_dtype: str = "auto"):
        self.window, self.sinks, self.kv_dtype = window or model.config.sliding_window, sinks, kv_dtype
        self.config: ModelConfig = model.config
        self.weights = {name: tensor.clone() for name, tensor in model.dense_weights().items()}
        self._continuations: dict[tuple[int, ...], list[int]] = {}
        # angles in float32, as transformers computes them
        c = self.config
        frequency = 1.0 / c.rope.theta ** (torch.arange(0, c.rope_dim, 2, dtype=torch.float32) / c.rope_dim)
        self._angles = torch.arange(c.max_position, dtype=torch.float32)[:, None] * frequency

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """token_ids [length] → [length, vocab]."""
        w, c = self.weights, self.config
        x = w["model.embed_tokens.weight"][torch.tensor(token_ids)]
        for i in range(c.num_layers):
            p = f"model.layers.{i}"
            attention = self._attention if c.mla is None else self._latent_attention
            x = x + attention(self._norm(x, f"{p}.input_layernorm.weight"), f"{p}.self_attn")
            normed = self._norm(x, f"{p}.post_attention_layernorm.weight")
            x = x + (self._experts(normed, f"{p}.mlp") if i in c.sparse_layers else self._mlp(normed, f"{p}.mlp"))
        head = w["model.embed_tokens.weight" if c.tie_embeddings else "lm_head.weight"]
        return self._norm(x, "model.norm.weight") @ head.T

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """The n most likely next tokens, each found by computing the whole sequence again."""
        out = self._continuations.setdefault(tuple(prompt), [])
        while len(out) < n:
            out.append(int(self.logits([*prompt, *out])[-1].argmax()))
        return out[:n]

    def _mlp(self, x: Tensor, p: str) -> Tensor:
        gate, up = self._linear(x, f"{p}.gate_up_proj").chunk(2, dim=-1)
        return self._linear(gate * torch.sigmoid(gate) * up, f"{p}.down_proj")

    def _experts(self, x: Tensor, p: str) -> Tensor:
        """One token after the other, one expert after the other (one group of experts only)."""
        moe = self.config.moe
        assert moe is not None and moe.num_groups == 1
        rows = []
        for row in x:
            scores = (self.weights[f"{p}.gate.weight"] @ row).tolist()
            if moe.scoring == "sigmoid":
                scores = [1 / (1 + math.exp(-s)) for s in scores]
            else:
                highest = max(scores)
                scores = [math.exp(s - highest) for s in scores]
                scores = [s / sum(scores) for s in scores]
            bias = self.weights.get(f"{p}.gate.e_score_correction_bias", torch.zeros(moe.num_experts)).tolist()
            chosen = sorted(range(moe.num_experts), key=lambda e: (-scores[e] - bias[e], e))[: moe.top_k]
            total = sum(scores[e] for e in chosen) if moe.renormalise else 1.0
            parts = [scores[e] / total * moe.scale * self._mlp(row[None], f"{p}.experts.{e}")[0] for e in chosen]
            if moe.shared_size:
                parts.append(self._mlp(row[None], f"{p}.shared_experts")[0])
            rows.append(torch.stack(parts).sum(0))
        return torch.stack(rows)

    def _attention(self, x: Tensor, p: str) -> Tensor:
        c, length, d = self.config, len(x), self.config.head_dim
        heads = self._linear(x, f"{p}.qkv_proj").view(length, -1, d)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if c.qk_norm:
            q, k = self._norm(q, f"{p}.q_norm.weight"), self._norm(k, f"{p}.k_norm.weight")
        q, k, v = self._rotate(q), rounded(self._rotate(k), self.kv_dtype), rounded(v, self.kv_dtype)
        hidden = self._hidden(q, k, p)
        group = c.num_heads // c.num_kv_heads  # query head h reads KV head h // group
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        return self._linear(self._attend(q, k, v, hidden), f"{p}.o_proj")

    def _latent_attention(self, x: Tensor, p: str) -> Tensor:
        """Every head's keys and values are made from the latents, for every query anew."""
        c, m, length = self.config, self.config.mla, len(x)
        assert m is not None
        first = m.q_rank or c.num_heads * m.head_dim
        q, latent, key = self._linear(x, f"{p}.qkv_a_proj").split([first, m.kv_rank, m.rope_dim], dim=-1)
        if m.q_rank:
            q = self._linear(self._norm(q, f"{p}.q_a_layernorm.weight", 1e-6), f"{p}.q_b_proj")
        q_nope, q_rope = q.view(length, c.num_heads, -1).split([m.nope_dim, m.rope_dim], dim=-1)
        made = self._linear(self._norm(latent, f"{p}.kv_a_layernorm.weight", 1e-6), f"{p}.kv_b_proj")
        k_nope, v = made.view(length, c.num_heads, -1).split([m.nope_dim, m.v_dim], dim=-1)
        k_rope = self._rotate(key[:, None]).expand(-1, c.num_heads, -1)
        q, k = torch.cat([q_nope, self._rotate(q_rope)], dim=-1), torch.cat([k_nope, k_rope], dim=-1)
        return self._linear(self._attend(q, k, v, self._hidden(q, k, p)), f"{p}.o_proj")

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        """q, k [length, heads, width], v [length, heads, v_width], hidden [length, length] → [length, heads * v_width]."""
        length, d = len(q), q.shape[-1]
        scores = (torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(d)).masked_fill(hidden, -math.inf)
        weights = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)

    def _hidden(self, q: Tensor, k: Tensor, p: str) -> Tensor:
        """q [length, heads, head_dim], k [length, kv_heads, head_dim] of a layer → [length, length] bool: keys that a query does
        not see."""
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
        hidden = distance < 0
        if self.window is not None:
            hidden |= (distance >= self.window) & (torch.arange(len(q)) >= self.sinks)
        return hidden

    def _rotate(self, x: Tensor) -> Tensor:
        """x [length, heads, width]: dimension i turns with dimension i + width / 2."""
        half = x.shape[-1] // 2
        cos, sin = (f(self._angles).to(x.dtype)[: len(x), None, :] for f in (torch.cos, torch.sin))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + (eps or self.config.norm_eps)) * self.weights[name]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        y = x @ self.weights[f"{name}.weight"].T
        return y if bias is None else y + bias


def rounded(x: Tensor, kv_dtype: str) -> Tensor:
    """x [..., head_dim] as a store of this kv_dtype gives it back, from the definition."""
    if kv_dtype == "auto":
        return x
    reach = x.abs().amax(-1, keepdim=True).float().double()
    if kv_dtype == "int8":
        return (x * 127 / reach).round() / 127 * reach
    return (x * 448 / reach).to(torch.float8_e4m3fn).double() / 448 * reach


class SparseReference(Reference):
    """Dense attention under the mask that sparse attention means: block by block and query by query, from the definition.

    Of the blocks before the one with a query's window's first key it sees the ``blocks`` best: those that get most of its heads'
    attention together, where each head's is a softmax of the largest logits that the extremes of a block's keys allow (or of its
    mean key's, for "mean"). ``share`` layers in a row use the choice of the first.
    """

    def __init__(
        self, model: Transformer, blocks: int, window: int, size: int, share: int = 1, indexer: str = "bounds",
        kv_dtype: str = "auto",
    ):  # fmt: skip
        super().__init__(model, kv_dtype=kv_dtype)
        self.blocks, self.near, self.size, self.share, self.indexer = blocks, window, size, share, indexer

    def _hidden(self, q: Tensor, k: Tensor, p: str) -> Tensor:
        if int(p.split(".")[2]) % self.share == 0:
            self._choice = torch.ones(len(q), len(q), dtype=torch.bool)
            for position in range(len(q)):
                first = max(0, position - self.near + 1) // self.size
                for block in [*self._best(q[position], k, first), *range(first, position // self.size + 1)]:
                    self._choice[position, block * self.size : min(position, block * self.size + self.size - 1) + 1] = False
        return self._choice

    def _best(self, q: Tensor, k: Tensor, candidates: int) -> list[int]:
        if candidates <= self.blocks:
            return list(range(candidates))
        group, dim = self.config.group_size, self.config.head_dim
        log_shares = []
        for head, query in enumerate(q):
            keys = k[: candidates * self.size, head // group].view(candidates, self.size, dim)
            if self.indexer == "mean":
                logits = keys.mean(1) @ query / math.sqrt(dim)
            else:
                extremes = torch.stack([keys.amin(1), keys.amax(1)])
                logits = (extremes * query).amax(0).sum(-1) / math.sqrt(dim)
            log_shares.append(logits - torch.logsumexp(logits, 0))
        wanted = torch.logsumexp(torch.stack(log_shares), 0).tolist()
        return sorted(range(candidates), key=lambda block: (-wanted[block], block))[: self.blocks]


@dataclass(frozen=True)
class Expected:
    """How a request must end."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def ending(stream: Sequence[int], params: SamplingParams, eos: Sequence[int] = (), decode=None, room=None) -> Expected:
    """Cut an endless stream of tokens where the request's parameters end it. decode: token ids → text. room: tokens that fit."""
    limit = params.max_tokens if room is None else min(params.max_tokens, room)
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    ids: list[int] = []
    shown = [""]  # the text after each token, without half a character at its end
    for token in stream[:limit]:
        if token in stop_ids:
            shown[-1] = _text(decode, ids)  # nothing follows: what half a character held back is shown, stop strings in it count
            cuts = [i for s in params.stop_strings if (i := shown[-1].find(s)) >= 0]
            kept = next(n for n, text in enumerate(shown) if len(text) >= min(cuts)) if cuts else len(ids)
            return Expected(tuple(ids[:kept]), shown[-1][: min(cuts, default=None)], "stop")
        ids.append(token)
        text = _text(decode, ids)
        shown.append(shown[-1] if text.endswith("\ufffd") and len(ids) < limit else text)
        cuts = [i for s in params.stop_strings if (i := shown[-1].find(s)) >= 0]
        if cuts:
            kept = next(n for n, text in enumerate(shown) if len(text) >= min(cuts))
            return Expected(tuple(ids[:kept]), shown[-1][: min(cuts)], "stop")
    return Expected(tuple(ids), _text(decode, ids), "length")


def _text(decode, ids: Sequence[int]) -> str:
    return decode(ids) if decode else ""
