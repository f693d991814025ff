"""Options of an engine: frozen, validated, and the only place where an option is declared."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch

from minillm.checking import check_choice, check_count, check_parts
from minillm.quant.config import as_config

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class EngineConfig:
    """Every option of an engine. One switch per technique; the default is the plain, fast path of this machine.

    dtype: "auto" picks what is fast here (bfloat16 where the CPU or GPU multiplies it natively, float32 elsewhere).
    device: "auto" is "cuda" when torch sees a GPU, else "cpu".
    max_model_len: tokens of prompt plus output of one request; None is the model's own limit.
    max_num_seqs: requests that run at once. max_num_batched_tokens: the token budget of one step.
    block_size: tokens per KV block. num_blocks or kv_memory (bytes): size of the KV pool; both None picks a default.
    kv_cache: "paged"; "contiguous" gives each request one strip of neighbouring blocks; "none" recomputes everything.
    allocation: "paged" gives a request blocks as it grows (a contiguous cache reserves instead); "reserve" gives it a strip of
        max_model_len tokens when it is admitted; "exact" one of prompt + max_tokens - 1, an oracle where ignore_eos is set.
    attention_backend: "torch"; "triton" runs this project's kernels, on a GPU or in Triton's interpreter; "auto" chooses.
    attention_window: keys that a token sees, its own and those before it; None is the model's own window, if it has one.
    attention_sinks: keys at the beginning of a request that are seen beside the window.
    sparse_blocks: None reads every key; a number lets each token read the blocks around it and so many of those before, the best
        by an indexer's summaries. It is a lossy technique, and block_size, its grain, then changes answers.
    sparse_window: keys before and with a token's own whose blocks it always reads (64 unless said).
    sparse_indexer: "bounds" summarises a block by each dimension's extremes, "mean" by its mean key; or an Indexer of one's own.
    sparse_share_layers: layers in a row that read what the first of them chose.
    mla: how latent attention is computed, for models that have it: "absorbed" compares queries with the latents, "naive" makes
        keys and values of them, "auto" takes what needs fewer FLOPs.
    batching: "continuous"; "sequential" runs one request at a time; "static" admits a batch, pads it and waits for its slowest
        request; "static-sorted" does so with requests of similar max_tokens; or an object with ``grants`` (BatchingPolicy).
    prefill: "chunked" gives prompts what decoding requests leave of the budget; "first" lets everyone wait for them.
    queue_order: "arrival"; "cache" starts waiting requests with the longest cached prefix first, within bounds.
    kv_dtype: "auto" keeps KV in the model's dtype; "int8" or "fp8" in one byte per element and a scale per token and head.
    kv_store: "plain", or a callable (config, num_slots, dtype, device) that makes a KVStore: a class of one's own.
    attention_backend, prefix_cache: a name, or an object that implements the seam.
    quantization: None, "rtn", "awq" or "gptq" (4 bits, groups of 64, the head in 8 bits), "w8a8" or "fp8" (8 bits, activations
        too), a QuantConfig, or a LinearMethod.
    prefix_cache: "none"; "hash" (a table of blocks) or "radix" (a tree) keep what finished and running requests computed.
    host_cache, disk_cache: bytes of memory and of disk for KV that the pool has no room for, or a Tier object; they need a prefix
    cache. disk_folder: where the files lie; None is a folder of the user's cache. cache_write: "back" copies a block down when
    the pool evicts it, "through" as soon as it is computed. tier_policy: "auto" loads what is predicted to be faster loaded than
    computed, "always" whatever is found; or a callable (LoadOffer) → blocks to load.
    compile: compile the decode step ahead of time (a minute or two the first time, kept on disk; twice that for quantised weights
        beside which a copy in 16 bits is held: one step multiplies by codes, for few rows, and one by the copy).
    cuda_graphs: record decode steps of a few sizes and replay them (on a CPU: pad and call); True, or a Padding of one's own.
    overlap: plan the next step and sort out the last one while one runs; a text that stops costs one wasted token.
    speculative: None; "ngram" looks drafts up in the text so far; "draft" lets draft_model decode ahead; "mtp" uses a trained
        head; or an object with ``propose`` (Proposer). The answer stays the same, see minillm.spec.verify.
    draft_model: for "draft" a Transformer of the same vocabulary, the target in few bits ("int8", "int4" or a QuantConfig), or
        numbers of the target's layers that draft; for "mtp" the file of a head, None takes the one that comes with the model.
    num_draft_tokens: tokens of one draft at most. adaptive_drafts: choose their number by each request's own acceptance.
    accept_rule: None, or an AcceptRule of one's own (minillm.spec.verify) that judges drafts which were drawn.
    max_draft_batch: no drafts in a step of that many tokens or more: there they are no longer nearly free.
    """

    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | None = None
    kv_cache: Literal["paged", "contiguous", "none"] = "paged"
    allocation: Literal["paged", "reserve", "exact"] = "paged"
    attention_window: int | None = None
    attention_sinks: int = 0
    sparse_blocks: int | None = None
    sparse_window: int | None = None
    sparse_indexer: Any = "bounds"
    sparse_share_layers: int = 1
    mla: Literal["auto", "absorbed", "naive"] = "auto"
    batching: Any = "continuous"
    prefill: Literal["chunked", "first"] = "chunked"
    queue_order: Literal["arrival", "cache"] = "arrival"
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    kv_store: Any = "plain"
    attention_backend: Any = "auto"
    prefix_cache: Any = "none"
    quantization: Any = None
    host_cache: Any = None
    disk_cache: Any = None
    disk_folder: Any = None
    cache_write: Literal["back", "through"] = "back"
    tier_policy: Any = "auto"
    compile: bool = False
    cuda_graphs: Any = False
    overlap: bool = False
    speculative: Any = None
    draft_model: Any = None
    num_draft_tokens: int = 8
    adaptive_drafts: bool = True
    max_draft_batch: int = 16
    accept_rule: Any = None

    def __post_init__(self) -> None:
        for name in ("dtype", "device", "kv_cache", "kv_dtype", "allocation", "prefill", "queue_order", "mla"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r:.60}")
        check_choice("dtype", self.dtype, ("auto", *DTYPES))
        check_choice("kv_cache", self.kv_cache, ("paged", "contiguous", "none"))
        check_choice("kv_dtype", self.kv_dtype, ("auto", "int8", "fp8"))
        check_choice("allocation", self.allocation, ("paged", "reserve", "exact"))
        check_choice("prefill", self.prefill, ("chunked", "first"))
        check_choice("queue_order", self.queue_order, ("arrival", "cache"))
        check_choice("mla", self.mla, ("auto", "absorbed", "naive"))
        self._check_batching()
        sizes = "max_num_seqs max_num_batched_tokens block_size num_draft_tokens max_draft_batch sparse_share_layers"
        for name in sizes.split():
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be a whole number of at least 1, got None")
        check_count(
            max_model_len=self.max_model_len, max_num_seqs=self.max_num_seqs, block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens, num_blocks=self.num_blocks, kv_memory=self.kv_memory,
            num_draft_tokens=self.num_draft_tokens, max_draft_batch=self.max_draft_batch,
            attention_window=self.attention_window, sparse_blocks=self.sparse_blocks, sparse_window=self.sparse_window,
            sparse_share_layers=self.sparse_share_layers,
        )
        sinks = self.attention_sinks
        if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
            raise ValueError(f"attention_sinks must be a whole number of at least 0, got {sinks!r}")
        if self.kv_cache == "none" and self.allocation != "paged":
            raise ValueError(f"kv_cache='none' keeps nothing from step to step that allocation={self.allocation!r} could reserve")
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ValueError(f"give num_blocks ({self.num_blocks}) or kv_memory ({self.kv_memory}), not both")
        if self.kv_store != "plain" and not callable(self.kv_store):
            raise ValueError(f"kv_store must be 'plain' or a callable that makes a KVStore, got {self.kv_store!r}")
        if self.kv_store != "plain" and self.kv_dtype != "auto":
            raise ValueError(f"kv_dtype={self.kv_dtype!r} is minillm's own store; beside another kv_store leave kv_dtype='auto'")
        if self.kv_store != "plain" and self.kv_cache == "none":
            raise ValueError("kv_cache='none' keeps no KV that a store of one's own could hold; leave kv_store='plain'")
        if isinstance(self.attention_backend, str):
            check_choice("attention_backend", self.attention_backend, ("auto", "torch", "triton"))
        else:
            parts = ("plan", "forward", "work")
            check_parts("attention_backend", self.attention_backend, parts, "a name or an AttentionBackend")
        if isinstance(self.prefix_cache, str):
            check_choice("prefix_cache", self.prefix_cache, ("none", "hash", "radix"))
        else:
            check_parts("prefix_cache", self.prefix_cache, ("match", "insert", "holds", "evict"), "a name or a PrefixCache")
        self._check_tiers()
        if self.prefix_cache != "none" and self.strips:
            raise ValueError(
                f"a prefix cache hands out single blocks, which a strip cannot hold (kv_cache={self.kv_cache!r}, "
                f"allocation={self.allocation!r}); leave both 'paged'"
            )
        if self.quantization is not None and as_config(self.quantization) is None and not hasattr(self.quantization, "for_layer"):
            parts = ("pack", "apply", "unpack")
            check_parts("quantization", self.quantization, parts, "None, a name, a QuantConfig or a LinearMethod")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {self.seed!r}")
        for name in ("compile", "overlap", "adaptive_drafts"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.60}")
        if not isinstance(self.cuda_graphs, bool):
            check_parts("cuda_graphs", self.cuda_graphs, ("bucket", "pad"), "True, False or a Padding")
        if self.overlap and self.kv_cache == "none":
            raise ValueError("kv_cache='none' takes a step's KV back before the next is planned; overlap=True plans it earlier")

        self._check_speculation()
        self._check_sparse()

    def _check_sparse(self) -> None:
        if isinstance(self.sparse_indexer, str):
            check_choice("sparse_indexer", self.sparse_indexer, ("bounds", "mean"))
        else:
            check_parts("sparse_indexer", self.sparse_indexer, ("summarise", "score"), "a name or an Indexer")
        if self.sparse_blocks is None:
            for name, neutral in (("sparse_window", None), ("sparse_indexer", "bounds"), ("sparse_share_layers", 1)):
                # an indexer of one's own may wait for sparse_blocks: a part of an engine that is not asked for
                if isinstance(getattr(self, name), (int, str)) and getattr(self, name) != neutral:
                    raise ValueError(f"{name}={getattr(self, name)!r:.60} is of sparse attention; set sparse_blocks")
            return
        hides, records = "hides keys from the indexer", "records the keys that a step reads"
        reasons = {"attention_window": hides, "attention_sinks": hides, "compile": records, "cuda_graphs": records}
        for name, why in reasons.items():
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r:.40} {why}; with sparse_blocks={self.sparse_blocks} leave it")
        if self.attention_backend not in ("auto", "torch"):
            raise ValueError(
                f"sparse_blocks={self.sparse_blocks} is served by minillm's own torch backend, not by attention_backend="
                f"{self.attention_backend!r:.60}; leave attention_backend='auto'"
            )

    def _check_speculation(self) -> None:
        if self.accept_rule is not None and not callable(self.accept_rule):
            raise ValueError(f"accept_rule must be None or a callable (p, q, token, u, w), got {self.accept_rule!r:.60}")
        if self.speculative is None:
            if self.draft_model is not None:
                raise ValueError("draft_model drafts for speculative='draft' or 'mtp'; speculative is None")
            return
        if isinstance(self.speculative, str):
            check_choice("speculative", self.speculative, ("ngram", "draft", "mtp"))
        else:
            check_parts("speculative", self.speculative, ("propose",), "None, a name or a Proposer")
        named = self.speculative if isinstance(self.speculative, str) else "object"
        if named == "draft" and self.draft_model is None:
            what = "a Transformer, 'int8', 'int4', or numbers of the target's layers"
            raise ValueError(f"speculative='draft' needs a draft_model: {what}")
        if named not in ("draft", "mtp") and self.draft_model is not None:
            raise ValueError(f"draft_model drafts for speculative='draft' or 'mtp', not for {named!r}")
        if self.kv_cache == "none":
            raise ValueError("kv_cache='none' computes a request anew in every step; there is no pass for drafts to save")
        if self.overlap:
            raise ValueError("overlap=True plans a step before it knows which drafts of the last one were accepted; choose one")
        if getattr(self.batching, "padded", False) or str(self.batching).startswith("static"):
            raise ValueError(f"batching={self.batching!r} pads every row to the longest, drafts included; use 'continuous'")

    def _check_batching(self) -> None:
        if isinstance(self.batching, str):
            check_choice("batching", self.batching, ("sequential", "static", "static-sorted", "continuous"))
            if self.batching == "static-sorted" and self.queue_order != "arrival":
                raise ValueError(f"batching='static-sorted' orders by length; queue_order={self.queue_order!r} cannot hold")
            return
        check_parts("batching", self.batching, ("grants",), "a name or a BatchingPolicy")
        check_choice("order of the batching policy", getattr(self.batching, "order", "arrival"), ("arrival", "length", "cache"))
        if self.prefill != "chunked":
            raise ValueError(f"a batching policy of one's own decides who computes prompts; prefill={self.prefill!r} cannot hold")

    def _check_tiers(self) -> None:
        for name, size in (("host_cache", self.host_cache), ("disk_cache", self.disk_cache)):
            if size is None:
                continue
            if isinstance(size, (int, float, str)):
                check_count(**{name: size})  # type: ignore[arg-type]
            else:
                check_parts(name, size, ("has", "use", "read", "write"), "a number of bytes or a Tier")
            if isinstance(self.prefix_cache, str) and self.prefix_cache == "none":
                raise ValueError(f"{name} keeps what a prefix cache evicts; with prefix_cache='none' there is nothing to keep")
        if self.disk_folder is not None:
            if not isinstance(self.disk_folder, (str, os.PathLike)) or not str(self.disk_folder):
                raise ValueError(f"disk_folder must be a path, got {self.disk_folder!r:.60}")
            if self.disk_cache is None:
                raise ValueError(f"disk_folder is {str(self.disk_folder)!r}, but disk_cache, its size in bytes, is not given")
        if not isinstance(self.cache_write, str):
            raise ValueError(f"cache_write must be a string, got {self.cache_write!r:.60}")
        check_choice("cache_write", self.cache_write, ("back", "through"))
        if isinstance(self.tier_policy, str):
            check_choice("tier_policy", self.tier_policy, ("auto", "always"))
        elif not callable(self.tier_policy):
            raise ValueError(f"tier_policy must be 'auto', 'always' or a callable, got {self.tier_policy!r:.60}")

    @property
    def strips(self) -> Literal["reserve", "exact"] | None:
        """How long the strip of neighbouring blocks is that a request gets at its admission; None: single blocks, as it grows."""
        if self.allocation == "paged":
            return "reserve" if self.kv_cache == "contiguous" else None
        return self.allocation

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Build from keywords; an unknown one is a ValueError that suggests the nearest name."""
        known = {f.name for f in dataclasses.fields(cls)}
        for option in options:
            if option not in known:
                near = difflib.get_close_matches(option, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; options are {', '.join(sorted(known))}"
                raise ValueError(f"unknown option {option!r}{hint}")
        return cls(**options)
