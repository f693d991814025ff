"""Tiny models, a fake tokenizer, and hypothesis strategies for prompts, parameters and engine options."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any, Iterator, Sequence

import pytest
import torch
from hypothesis import strategies as st

from minillm import LLM, Engine, EngineConfig, ModelConfig, SamplingParams, Transformer
from minillm.attention.latent import LatentAttention
from minillm.attention.sparse import SparseAttention
from minillm.attention.torch_backend import TorchAttention
from minillm.engine.batch import ForwardBatch
from minillm.model.mla_config import MLAConfig
from minillm.model.moe_config import MoEConfig
from minillm.model.weights import expected_shapes

from .reference import Reference, SparseReference

VOCAB = 32
MAX_LEN = 48
EOS = (0, 1)

GROUPS = (1, 2, 3)
LATENT = (-1, -2)
"""In place of a group: latent attention, with queries compressed and not."""
WINDOWS = (None, 4)
EXPERTS = 4
"""In the place of a group: a model with a mixture of experts in two of its layers."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are fastest on one thread, and leave the other core to whoever runs beside them. A conftest imports this."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_config(group: int = 3, window: int | None = None, **changes: Any) -> ModelConfig:
    """Each group size also has its own variant of a layer, so that all of them are met."""
    variants: dict[int, dict[str, Any]] = {
        1: {"tie_embeddings": True},
        2: {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True},
        3: {"qk_norm": True},
        EXPERTS: {"num_heads": 2, "num_layers": 3, "moe": MoEConfig(
            5, 2, 6, shared_size=4, scoring="sigmoid", selection_bias=True, scale=1.5, dense_layers=(1,)
        )},
    }
    for latent, q_rank in zip(LATENT, (5, None), strict=True):
        mla = MLAConfig(kv_rank=7, q_rank=q_rank, nope_dim=3, rope_dim=4, v_dim=5 - latent)
        variants[latent] = {"num_heads": 3, "num_kv_heads": 3, "head_dim": mla.head_dim, "mla": mla}
    shape: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=2 * group, num_kv_heads=2, head_dim=4,
        max_position=MAX_LEN, sliding_window=window, eos_token_ids=EOS, name="tiny",
    )  # fmt: skip
    return ModelConfig(**(shape | variants[group] | changes))


@cache
def tiny_model(group: int = 3, window: int | None = None) -> Transformer:
    return Transformer.random(tiny_config(group, window), seed=abs(group), dtype=torch.float64)


@cache
def reference(group: int = 3, window: int | None = None, sinks: int = 0, kv_dtype: str = "auto") -> Reference:
    return Reference(tiny_model(group), window, sinks, kv_dtype)


@cache
def sparse_reference(group: int, *view: Any) -> SparseReference:
    """view: blocks, window, block size, and where another one is wanted layers that share, indexer and kv_dtype."""
    return SparseReference(tiny_model(group), *view)


# 0 and 1 end a text. Characters of one to four bytes, whole and in pieces, and "a", "b", "ab", "xa" for stop strings.
PIECES: tuple[bytes, ...] = (
    b"", b"", b"a", b"b", b"ab", b"xa", b"x", b" ", b"c", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f",
    b"\x98", b"\x80", b"a\xe2", b"\x82\xacb", b"\xc3\xa9", b"d", b"e", b"bc", b"abc", b"y", b"z", b"\xe2\x82",
    b"\xac ", b"ba", b"f", b"g", b"h",
)  # fmt: skip


class FakeTokenizer:
    """Tokens are the byte strings of PIECES; text is encoded one byte at a time."""

    def __init__(self, eos_token_ids: Sequence[int] = (), pieces: Sequence[bytes] = PIECES):
        self.eos_token_ids = tuple(eos_token_ids)
        self.pieces = tuple(pieces)

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(bytes([byte])) for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def greedy(prompt: Sequence[int], n: int) -> tuple[int, ...]:
    """What the default tiny model must answer."""
    return tuple(reference().greedy(prompt, n))


def tiny_llm(group: int = 3, window: int | None = None, **options: Any) -> LLM:
    return LLM(tiny_model(group, window), **({"num_blocks": 64, "block_size": 4} | options))


def tiny_engine(group: int = 3, window: int | None = None, tokenizer: Any = None, **options: Any) -> Engine:
    return Engine(tiny_model(group, window), tokenizer, EngineConfig(**({"num_blocks": 64, "block_size": 4} | options)))


def scripted_llm(*pieces: str | bytes, eos: Sequence[int] = (), **options: Any) -> LLM:
    """A model that answers prompt [0] with pieces[0], pieces[1], …: token i is always followed by i + 1, the last by itself.

    Token 0 is the letter "?". eos: ids that end a text.
    """
    vocab = len(pieces) + 1
    config = tiny_config(1, vocab_size=vocab, hidden_size=vocab, num_layers=1, tie_embeddings=False, eos_token_ids=tuple(eos))
    weights = {name: torch.zeros(shape) for name, shape in expected_shapes(config).items()}  # no layer adds anything
    weights["model.embed_tokens.weight"] = torch.eye(vocab)
    weights["lm_head.weight"] = torch.eye(vocab).roll(1, dims=0)
    weights["lm_head.weight"][:, -1] = torch.eye(vocab)[-1]
    weights["model.norm.weight"] = torch.ones(vocab)
    model = Transformer.from_weights(config, weights, torch.float64)
    spelled = [b"?", *(p.encode() if isinstance(p, str) else p for p in pieces)]
    return LLM(model, tokenizer=FakeTokenizer(pieces=spelled), **({"num_blocks": 64, "block_size": 4} | options))


class Watched:
    """Keeps the batches that a backend has seen, and raises in the last layer when told to: an interrupt with half of the step
    done."""

    def __init__(self, *view: Any):
        super().__init__(*view)
        self.batches: list[ForwardBatch] = []
        self.error: BaseException | None = None
        self.failing_call = 0

    def fail_after(self, steps: int, error: BaseException) -> None:
        self.failing_call, self.error = len(self.batches) + steps + 1, error

    def plan(self, batch: ForwardBatch, dtype: torch.dtype) -> Any:
        self.batches.append(batch)
        return super().plan(batch, dtype)

    def raise_in(self, layer: int) -> None:
        if self.error is not None and layer == 1 and len(self.batches) >= self.failing_call:
            error, self.error = self.error, None
            raise error

    def forward(self, q, layer, store, plan):
        self.raise_in(layer)
        return super().forward(q, layer, store, plan)


class WatchedAttention(Watched, TorchAttention):
    def single_group(self, batch: ForwardBatch, dtype: torch.dtype) -> Any:
        self.batches.append(batch)
        return super().single_group(batch, dtype)


class WatchedSparse(Watched, SparseAttention):
    pass


def poison_freed_blocks(engine: Engine) -> None:
    """From now on every slot that nobody holds is NaN, so that one stray read spoils the logits.

    The null block's first slot is the only one that padding may read.
    """
    pool, size = engine.cache.pool, engine.cache.block_size
    release, uncache = pool.release, pool.uncache

    def slots(blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor([b * size + i for b in blocks for i in range(size)], dtype=torch.int64)

    def poisoning_release(blocks, keep=()):
        freed = release(blocks, keep)
        engine.store.poison(slots(freed))
        return freed

    def poisoning_uncache(blocks):
        uncache(blocks)
        engine.store.poison(slots(blocks))

    engine.store.poison(torch.arange(1, engine.store.num_slots))
    pool.release, pool.uncache = poisoning_release, poisoning_uncache


class WatchedLatentAttention(WatchedAttention, LatentAttention):
    """The same for a model with latent attention."""

    def latent(self, q_nope, q_rope, up, scale, shape, layer, store, plan):
        self.raise_in(layer)
        return super().latent(q_nope, q_rope, up, scale, shape, layer, store, plan)


def watched_attention(group: int, window: int | None = None, sinks: int = 0) -> WatchedAttention:
    return (WatchedLatentAttention if group in LATENT else WatchedAttention)(window, sinks)


@contextlib.contextmanager
def watched(model: Transformer) -> Iterator[list[ForwardBatch]]:
    """The batches that reach the model while the block runs."""
    seen: list[ForwardBatch] = []
    handle = model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()


def run_to_end(engine: Engine, limit: int = 2000) -> dict[str, Any]:
    """Step until nothing is left; the last output of every request."""
    done = {}
    for _ in range(limit):
        if not engine.has_work:
            return done
        done.update({o.request_id: o for o in engine.step() if o.finished})
    raise AssertionError(f"still busy after {limit} steps")


def assert_empty(llm: LLM) -> None:
    """Nothing runs, waits or is held; an idle step calls the model zero times."""
    pool = llm.engine.cache.pool
    assert not llm.engine.has_work and pool.num_free == pool.num_blocks
    with watched(llm.model) as batches:
        assert llm.engine.step() == [] and batches == []


tokens = st.integers(0, VOCAB - 1)
prompts = st.lists(tokens, min_size=1, max_size=24)


def slots_needed(prompt: Sequence[int], params: SamplingParams, max_model_len: int = MAX_LEN) -> int:
    """KV slots that a request can come to hold: the last token is never computed."""
    return min(len(prompt) + params.max_tokens, max_model_len) - 1


@st.composite
def greedy_params(draw, max_tokens: int = 12, ignore_eos: st.SearchStrategy[bool] = st.booleans()) -> SamplingParams:
    return SamplingParams(max_tokens=draw(st.integers(1, max_tokens)), ignore_eos=draw(ignore_eos))


@st.composite
def workloads(draw, params: st.SearchStrategy[SamplingParams], max_requests: int = 8) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with parameters. Some prompts are beginnings of others or equal."""
    work = draw(st.lists(st.tuples(prompts, params), min_size=2, max_size=max_requests))
    if draw(st.booleans()):
        work[-1] = (work[0][0][: draw(st.integers(1, len(work[0][0])))], work[-1][1])
    return work


policies = st.one_of(
    st.fixed_dictionaries(
        {
            "batching": st.sampled_from(["continuous", "static", "sequential"]), "prefill": st.sampled_from(["chunked", "first"]),
            "queue_order": st.sampled_from(["arrival", "cache"]),
        }
    ),
    st.fixed_dictionaries({"batching": st.just("static-sorted"), "prefill": st.sampled_from(["chunked", "first"])}),
    st.just({"batching": "continuous"}),
)  # fmt: skip
"""Options of every batching policy."""


@st.composite
def engine_options(draw, needed: int, max_model_len: int = MAX_LEN) -> dict[str, Any]:
    """Any engine that can serve requests of up to ``needed`` slots; pools are small, so that requests push each other out."""
    kind = draw(st.sampled_from(["paged", "paged", "contiguous", "none"]))
    block_size = draw(st.one_of(st.integers(1, 4), st.integers(1, 17)))
    budget = draw(st.one_of(st.integers(1, 6), st.integers(1, 64)))
    allocation = draw(st.sampled_from(["paged", "paged", "reserve", "exact"])) if kind != "none" else "paged"
    if allocation == "reserve" or (kind, allocation) == ("contiguous", "paged"):  # strips of the longest request
        num_blocks = draw(st.integers(1, 4)) * -(-max_model_len // block_size)
    else:
        num_blocks = -(-needed // block_size) + draw(st.sampled_from([0, 0, 1, 2, 6]))
    return {
        "kv_cache": kind, "allocation": allocation, "block_size": block_size, "num_blocks": num_blocks,
        **draw(policies),
        "max_num_batched_tokens": max(budget, needed) if kind == "none" else budget,
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 5, 8, 8])),
        "prefix_cache": draw(st.sampled_from(["none", "hash", "radix"])) if kind == allocation == "paged" else "none",
        "overlap": kind != "none" and draw(st.booleans()),
        "cuda_graphs": draw(st.booleans()),
    }  # fmt: skip


@st.composite
def with_drafts(draw, options: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """The same engines, and where they can draft, some of them do."""
    chosen = draw(options)
    layers: list[dict[str, Any]] = [{"speculative": "draft", "draft_model": chosen} for chosen in ([0], [0, 1])]
    drafting = draw(st.sampled_from([{}, {"speculative": "ngram"}, *layers]))
    if not drafting or chosen["kv_cache"] == "none" or chosen["overlap"] or "static" in chosen["batching"]:
        return chosen
    how = {"num_draft_tokens": draw(st.integers(1, 6)), "max_draft_batch": draw(st.sampled_from([2, 8, 64]))}
    return chosen | drafting | how | {"adaptive_drafts": draw(st.booleans())}


views = st.sampled_from([(None, 0), (None, 0), (4, 0), (4, 0), (1, 0), (4, 3), (1, 1), (3, 6)])
"""A window and its sinks."""

models = st.tuples(st.sampled_from(GROUPS), views).map(lambda m: (m[0], *m[1]))
"""A group size, a window and its sinks: what ``reference`` takes."""

kv_dtypes = st.sampled_from(["auto", "auto", "int8", "fp8"])

sparse_views = st.tuples(st.integers(1, 3), st.integers(1, 6))
"""Blocks that a query chooses, and its window."""

models_and_experts = st.one_of(models, st.just((EXPERTS, None, 0)))
all_models = models_and_experts | st.tuples(st.sampled_from(LATENT), views).map(lambda m: (m[0], *m[1]))
"""The same, and models with latent attention."""


def for_experts(options: dict[str, Any], group: int) -> dict[str, Any]:
    """The options without what a mixture of experts refuses, where the model of that group is one."""
    return options | {"cuda_graphs": False} if group == EXPERTS else options
