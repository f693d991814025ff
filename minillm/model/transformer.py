"""The one model: a decoder-only transformer shaped by ModelConfig."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Callable, Hashable, Iterable, Mapping, Sequence, cast

import torch
from torch import Tensor, nn

from minillm.attention.backend import AttentionBackend
from minillm.cache.kv_store import KVStore
from minillm.engine.batch import ForwardBatch
from minillm.model.config import ModelConfig
from minillm.model.layers import COMPILED, MLP, PLAIN, Operators, RMSNorm, rope_table
from minillm.model.loads import ExpertLoads
from minillm.model.mla import NORM_EPS, LatentAttentionLayer
from minillm.model.moe import MoE, Router
from minillm.model.weights import EMBED, HEAD, NORM, expected_shapes, fuse, held_in
from minillm.perf.work import Work
from minillm.quant.linear import AnyMethod, Linear, PlainLinear, default_method, for_rows, method_for


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; keys and values go through the KV store."""

    def __init__(self, config: ModelConfig, qkv: Linear, out: Linear, q_norm: RMSNorm | None, k_norm: RMSNorm | None):
        super().__init__()
        self.config, self.qkv, self.out, self.q_norm, self.k_norm = config, qkv, out, q_norm, k_norm

    def forward(
        self, x: Tensor, operators: Operators, layer: int, cos: Tensor, sin: Tensor, slots: Tensor, store: KVStore,
        backend: AttentionBackend, plan: Any,
    ) -> Tensor:  # fmt: skip
        c = self.config
        heads = self.qkv(x).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q_and_k, v = heads[:, : -c.num_kv_heads], heads[:, -c.num_kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = q_and_k[:, : c.num_heads], q_and_k[:, c.num_heads :]
            q_and_k = torch.cat([self.q_norm(q, operators), self.k_norm(k, operators)], dim=1)
        q = operators.rotate_and_store(q_and_k, v, cos, sin, slots, store, layer)
        return self.out(backend.forward(q, layer, store, plan).reshape(-1, c.q_size))

    def work(self, batch: ForwardBatch, operators: Operators, backend: AttentionBackend, plan: Any) -> Work:
        c, tokens, element = self.config, batch.num_tokens, self.qkv.dtype.itemsize
        total = self.qkv.work(tokens) + backend.work(batch, plan, c, self.qkv.dtype) + self.out.work(tokens)
        total += operators.rotate_and_store_work(tokens, c, element)
        # the compiled step normalises q and k on the way to their rotation
        if self.q_norm is not None and self.k_norm is not None and operators is not COMPILED:
            total += operators.norm_work(tokens * c.num_heads, c.head_dim, element)
            total += operators.norm_work(tokens * c.num_kv_heads, c.head_dim, element)
            total += Work(activation_bytes=2 * tokens * (c.q_size + c.kv_size) * element, launches=1)
        return total

    def linears(self) -> dict[str, Linear]:
        """By the names that a checkpoint gives them, those that read the same input fused."""
        return {"self_attn.qkv_proj": self.qkv, "self_attn.o_proj": self.out}

    def norms(self) -> dict[str, RMSNorm | None]:
        return {"self_attn.q_norm": self.q_norm, "self_attn.k_norm": self.k_norm}


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the MLP may be a mixture of experts."""

    def __init__(
        self, attention_norm: RMSNorm, attention: Attention | LatentAttentionLayer, mlp_norm: RMSNorm, mlp: MLP | MoE
    ):  # fmt: skip
        super().__init__()
        self.attention_norm, self.mlp_norm, self.mlp = attention_norm, mlp_norm, mlp
        self.attention: Any = attention

    def forward(self, x: Tensor, operators: Operators, layer: int, *step: Any, loads: ExpertLoads | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(x, operators), operators, layer, *step)
        x, normed = self.mlp_norm.after(x, attended, operators)
        if isinstance(self.mlp, MoE):
            return x + self.mlp(normed, operators, loads, layer)
        return x + self.mlp(normed, operators)

    def work(self, batch: ForwardBatch, operators: Operators, backend: AttentionBackend, plan: Any) -> Work:
        shape = batch.num_tokens, self.mlp_norm.weight.numel(), self.mlp_norm.weight.dtype.itemsize
        attention = operators.norm_work(*shape) + self.attention.work(batch, operators, backend, plan)
        mlp = operators.add_norm_work(*shape) + self.mlp.work(batch.num_tokens, operators)
        return attention + mlp + operators.add_work(*shape)

    def kind(self) -> Hashable:
        """What its work depends on besides the step."""
        linears = self.attention.linears() | self.mlp.linears()
        return type(self.mlp), tuple(linear.kind() for linear in linears.values())


class Transformer(nn.Module):
    """Token ids in, logits out. It holds weights and nothing else: KV, batch and attention backend are handed in."""

    storage: str = ""  # how the weights are held, where it is not plainly in the model's dtype
    embedding: Tensor  # [vocab, hidden]
    rope: Tensor  # [positions, 2, rope_dim]

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], method: AnyMethod):
        """weights: fused tensors as ``fuse`` makes them, all of one dtype and device. Use from_weights or random."""
        super().__init__()
        self.config = config
        embedding = weights[EMBED]
        self.dtype, self.device = embedding.dtype, embedding.device

        def linear(name: str) -> Linear:
            return Linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"), method_for(method, name))

        def norm(name: str, eps: float = config.norm_eps) -> RMSNorm | None:
            return RMSNorm(weights[name], eps) if name in weights else None

        def attention(p: str) -> Attention | LatentAttentionLayer:
            out = linear(f"{p}.o_proj")
            if config.mla is None:
                return Attention(config, linear(f"{p}.qkv_proj"), out, norm(f"{p}.q_norm.weight"), norm(f"{p}.k_norm.weight"))
            q_norm, kv_norm = (norm(f"{p}.{name}_a_layernorm.weight", NORM_EPS) for name in ("q", "kv"))
            q_up = None if q_norm is None else linear(f"{p}.q_b_proj")
            kv_up = Linear(weights[f"{p}.kv_b_proj.weight"], None, PlainLinear())  # read as a matrix, whatever else is packed
            assert kv_norm is not None
            return LatentAttentionLayer(config, linear(f"{p}.qkv_a_proj"), kv_norm, kv_up, out, q_norm, q_up)

        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("rope", rope_table(config, self.dtype).to(self.device), persistent=False)
        self.layers = nn.ModuleList()
        for i in range(config.num_layers):
            p = f"model.layers.{i}"
            mlp = self._mixture(weights, linear, p) if i in config.sparse_layers else self._mlp(linear, f"{p}.mlp")
            first, second = norm(f"{p}.input_layernorm.weight"), norm(f"{p}.post_attention_layernorm.weight")
            self.layers.append(Layer(first, attention(f"{p}.self_attn"), second, mlp))  # type: ignore[arg-type]
        self.norm = RMSNorm(weights[NORM], config.norm_eps)
        self.head = Linear(weights.get(HEAD, embedding), None, method_for(method, "lm_head"))
        self._alike = alike_layers(self.layers)

    @staticmethod
    def _mlp(linear: Callable[[str], Linear], name: str) -> MLP:
        return MLP(linear(f"{name}.gate_up_proj"), linear(f"{name}.down_proj"))

    def _mixture(self, weights: Mapping[str, Tensor], linear: Callable[[str], Linear], p: str) -> MoE:
        moe = self.config.moe
        assert moe is not None
        router = Router(moe, weights[f"{p}.mlp.gate.weight"], weights.get(f"{p}.mlp.gate.e_score_correction_bias"))
        gate_up = [linear(f"{p}.mlp.experts.{e}.gate_up_proj") for e in range(moe.num_experts)]
        down = [linear(f"{p}.mlp.experts.{e}.down_proj") for e in range(moe.num_experts)]
        shared = self._mlp(linear, f"{p}.mlp.shared_experts") if moe.shared_size else None
        return MoE(moe, router, gate_up, down, shared)

    def forward(self, batch: ForwardBatch, store: KVStore, backend: AttentionBackend, plan: Any) -> Tensor:
        """One step. Returns logits [samples, vocab] in the model's dtype, for the tokens that batch.logit_indices names."""
        return self.head(self.hidden(batch, store, backend, plan))

    def hidden(self, batch: ForwardBatch, store: KVStore, backend: AttentionBackend, plan: Any) -> Tensor:
        """The same step up to the output head: normed states [samples, hidden]."""
        x = self.embedding[batch.token_ids]
        cos, sin = self.rope[batch.positions].unsqueeze(2).unbind(1)  # [tokens, 1, rope_dim] each
        operators = getattr(backend, "operators", PLAIN)
        for i, layer in enumerate(self.layers):
            x = layer(x, operators, i, cos, sin, batch.slots, store, backend, plan, loads=batch.loads)
        return self.norm(x[batch.logit_indices], operators)

    def work(self, batch: ForwardBatch, backend: AttentionBackend, plan: Any, fused: bool = False) -> Work:
        """What forward does for this batch; fused: small operators are compiled into one. Of layers of one kind one is counted.
        What routed experts do is known when the step has run: see ``routed_work``."""
        c, element, samples = self.config, self.dtype.itemsize, len(batch.logit_indices)
        lookup = batch.num_tokens * c.hidden_size * element
        embed = Work(weight_bytes=lookup + 2 * batch.num_tokens * c.rope_dim * element, activation_bytes=lookup, launches=2)
        pick = Work(activation_bytes=2 * samples * c.hidden_size * element, launches=1)
        operators = COMPILED if fused else getattr(backend, "operators", PLAIN)
        total = embed + pick + self.norm.work(samples) + self.head.work(samples)
        for first, alike in self._alike:
            total += self.layers[first].work(batch, operators, backend, plan) * alike  # type: ignore[operator]
        return total

    def routed_work(self, counts: Mapping[int, Sequence[int]], backend: AttentionBackend) -> Work:
        """What the routed experts did in a step. counts: {layer: rows of each expert}, as the batch's loads have them."""
        operators = getattr(backend, "operators", PLAIN)
        total = Work()
        for layer, rows in counts.items():
            total += self.layers[layer].mlp.routed_work(rows, operators)  # type: ignore[operator,union-attr]
        return total

    def weight_bytes(self) -> int:
        """Bytes held by weights, every copy counted: a tied embedding that is also packed as the head counts twice."""
        tensors = {t.data_ptr() if t.layout == torch.strided else id(t): t.nbytes for t in self.buffers()}
        return sum(tensors.values())

    @classmethod
    def from_weights(
        cls, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu", linear_method: AnyMethod | None = None,
    ) -> "Transformer":  # fmt: skip
        """Build from tensors with Hugging Face names. A missing tensor or a wrong shape is a ValueError that names it."""
        method = linear_method or default_method(dtype, device)
        return cls(config, fuse(config, weights, dtype, device), method).eval()

    @classmethod
    def random(
        cls, config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        linear_method: AnyMethod | None = None,
    ) -> "Transformer":  # fmt: skip
        """Random weights, the same for a seed whatever the dtype: for tests and for counting, not for reading its text."""
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, shape in expected_shapes(config).items():
            noise = torch.randn(shape, generator=generator)
            # norms near one; products that keep the scale of their input
            weights[name] = 1 + 0.1 * noise if len(shape) == 1 and "norm" in name else noise / shape[-1] ** 0.5
        return cls.from_weights(config, weights, dtype, device, linear_method)

    def skipping(self, layers: Sequence[int]) -> "Transformer":
        """A model of some of these layers, in this order, that shares every weight with this one. ValueError for one it lacks."""
        have = len(self.layers)
        if not layers or any(not 0 <= i < have for i in layers):
            raise ValueError(f"layers must name at least one of 0 to {have - 1}, got {list(layers)}")
        shallow = copy.copy(self)
        shallow._modules = dict(self._modules)
        shallow.layers = nn.ModuleList([self.layers[i] for i in layers])
        shallow._alike = alike_layers(shallow.layers)
        moe = self.config.moe
        if moe is not None:
            moe = dataclasses.replace(moe, dense_layers=tuple(i for i, old in enumerate(layers) if old in moe.dense_layers))
        name = f"{self.config.name}-{len(layers)}-layers"
        shallow.config = dataclasses.replace(self.config, num_layers=len(layers), moe=moe, name=name)
        return shallow

    def dense_weights(self) -> dict[str, Tensor]:
        """The fused tensors that this model was built from, unpacked."""
        out: dict[str, Tensor] = {EMBED: self.embedding, NORM: self.norm.weight}
        if not self.config.tie_embeddings:
            out[HEAD], _ = self.head.dense()
        for i, layer in enumerate(cast(Iterable[Layer], self.layers)):
            p = f"model.layers.{i}"
            linears = layer.attention.linears()
            out.update({f"{p}.{name}": tensor for name, tensor in layer.mlp.dense_weights().items()})
            for name, module in linears.items():
                out[f"{p}.{name}.weight"], bias = module.dense()
                if bias is not None:
                    out[f"{p}.{name}.bias"] = bias
            norms = layer.attention.norms()
            norms |= {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm}
            out.update({f"{p}.{name}.weight": norm.weight for name, norm in norms.items() if norm is not None})
        return out

    def traced(self) -> "dict[int, Transformer]":
        """The same model with every linear layer in a form that torch.export traces, by the fewest rows that each model is for;
        what can be shared is. ValueError for a layer that has no such form."""
        forms = {id(m): m.traced() for m in self.modules() if isinstance(m, Linear)}
        bounds = sorted({rows for layers in forms.values() for rows in layers})
        return {rows: self._with({at: for_rows(layers, rows) for at, layers in forms.items()}) for rows in bounds}

    def _with(self, linears: Mapping[int, Linear]) -> "Transformer":
        """A copy with other linear layers, {id of the one here: the one there}, that shares everything else."""
        memo: dict[int, Any] = {**linears, **{id(shared): shared for shared in (self.config, *self.buffers())}}
        model = copy.deepcopy(self, memo)
        if self.config.tie_embeddings and "weight" in model.head._buffers and torch.equal(model.head.weight, model.embedding):
            model.head.weight = model.embedding  # else the package would hold it twice
        return model

    def converted(self, dtype: torch.dtype, device: torch.device | str, linear_method: AnyMethod | None = None) -> "Transformer":
        """A copy in another dtype, on another device or with another linear method; this one stays as it is."""
        weights = {name: t.to(device=device, dtype=held_in(name, dtype)) for name, t in self.dense_weights().items()}
        return Transformer(self.config, weights, linear_method or default_method(dtype, device)).eval()


def alike_layers(layers: nn.ModuleList) -> list[tuple[int, int]]:
    """The first layer of each kind, and how many there are: layers are alike but for mixtures and for methods that differ."""
    kinds = [layer.kind() for layer in cast(Iterable[Layer], layers)]
    return [(kinds.index(kind), kinds.count(kind)) for kind in dict.fromkeys(kinds)]
