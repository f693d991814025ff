"""From options to a proposer: which one, with what it needs."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Sequence

import torch

from minillm.attention.choice import torch_attention
from minillm.attention.window import Window
from minillm.cache.choice import plain_store
from minillm.config import EngineConfig
from minillm.model.transformer import Transformer
from minillm.quant.config import QuantConfig
from minillm.quant.linear import Linear
from minillm.quant.quantise import quantise_model
from minillm.spec.draft_model import DraftModelProposer
from minillm.spec.mtp import HEADS, MTPHead, MTPProposer
from minillm.spec.ngram import NgramProposer
from minillm.spec.proposer import Proposer
from minillm.spec.speculation import Speculation

COPIES = {"int8": QuantConfig(bits=8, group=-1, symmetric=True), "int4": QuantConfig(bits=4, group=64)}
"""Drafters that are the target itself in few bits."""


def make_speculation(
    options: EngineConfig, model: Transformer, num_slots: int, block_size: int, view: Window
) -> Speculation | None:
    """What ``options.speculative`` asks for; ValueError where its parts do not fit this model. view: what the target's queries
    see, whose blocks are all that a drafting model has."""
    if options.speculative is None:
        return None
    proposer = _proposer(options, model, num_slots, block_size, view)
    room = options.max_draft_batch
    longest = min(options.num_draft_tokens, room, model.config.max_position)  # no draft can be longer than that
    return Speculation(proposer, longest, room, model.config.vocab_size, options.adaptive_drafts)


def _proposer(options: EngineConfig, model: Transformer, num_slots: int, block_size: int, view: Window) -> Proposer:
    name = options.speculative
    if name == "ngram":
        return NgramProposer()
    if name == "mtp":
        head = MTPHead.load(_head_file(options.draft_model, model))
        return MTPProposer(head, model)
    if name == "draft":
        draft = draft_model(options.draft_model, model)
        store = plain_store(draft.config, num_slots, draft.dtype, draft.device)
        window = min((w for w in (draft.config.sliding_window, view.size) if w is not None), default=None)
        backend = torch_attention(draft.config, window, view.sinks if window else 0)
        proposer = DraftModelProposer(draft, store, backend, block_size, step_bytes(draft) / step_bytes(model))
        if draft is not options.draft_model:
            proposer.weight_bytes = bytes_beside(draft, model)
        return proposer
    given: Proposer = name
    return given


def draft_model(chosen: Transformer | Sequence[int] | str | QuantConfig, model: Transformer) -> Transformer:
    """The drafter: a model of the same vocabulary, a copy of the target in few bits, or some of the target's layers.

    Layers cost no memory but their KV; a copy keeps its codes, and the target's embedding."""
    if isinstance(chosen, Transformer):
        draft = chosen
    elif isinstance(chosen, (str, QuantConfig)):
        draft = low_bit_copy(chosen, model)
    else:
        draft = model.skipping(_layers(chosen))
    mine, theirs = draft.config.vocab_size, model.config.vocab_size
    if mine != theirs:
        raise ValueError(f"draft_model has a vocabulary of {mine} tokens, the target {theirs}; they must be the same")
    if draft.config.max_position < model.config.max_position:
        limits = f"{draft.config.max_position} positions, the target {model.config.max_position}"
        raise ValueError(f"draft_model has {limits}; it must reach as far")
    return draft


def low_bit_copy(chosen: str | QuantConfig, model: Transformer) -> Transformer:
    """The target with its weights in few bits; ValueError for an unknown name, or a grid that does not fit its shapes."""
    if isinstance(chosen, str) and chosen not in COPIES:
        raise _no_draft_model(chosen)
    config = COPIES[chosen] if isinstance(chosen, str) else chosen
    try:
        copy = quantise_model(model, config)
    except ValueError as error:
        raise ValueError(f"draft_model={chosen!r:.60} cannot be a copy of this target: {error}") from error
    if torch.equal(copy.embedding, model.embedding):
        copy.embedding = model.embedding
    return copy


def step_bytes(model: Transformer) -> int:
    """Bytes of weights that a step of one token multiplies by."""
    return sum(m.traffic(1).weight_bytes for m in model.modules() if isinstance(m, Linear))


def bytes_beside(draft: Transformer, model: Transformer) -> int:
    """Bytes of weights that the draft holds and the model does not."""
    shared = {id(t) for t in model.buffers()}
    return sum(t.nbytes for t in draft.buffers() if id(t) not in shared)


def _layers(chosen: Sequence[int]) -> list[int]:
    try:
        return [operator.index(i) for i in chosen]
    except TypeError:
        raise _no_draft_model(chosen) from None


def _no_draft_model(chosen: object) -> ValueError:
    copies = " or ".join(map(repr, COPIES))
    what = f"a Transformer, {copies} or a QuantConfig (the target in few bits), or numbers of the target's layers"
    return ValueError(f"draft_model for speculative='draft' must be {what}, got {chosen!r:.60}")


def _head_file(chosen: str | Path | None, model: Transformer) -> Path:
    if chosen is not None:
        if not isinstance(chosen, (str, os.PathLike)):
            raise ValueError(f"draft_model for speculative='mtp' must be the file of a head, got {chosen!r:.60}")
        return Path(chosen)
    file = HEADS / f"{model.config.name}.safetensors"
    if not file.exists():
        have = ", ".join(sorted(f.stem for f in HEADS.glob("*.safetensors"))) or "none"
        raise ValueError(f"there is no trained MTP head for {model.config.name!r} (there are: {have}); give draft_model=FILE")
    return file
