"""Rebuild a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from minillm.model.tokenizer import Tokenizer

# How a text is cut before merging, by the name that the file gives in tokenizer.ggml.pre. Letters with an optional
# character in front; digits one by one (Qwen) or in threes (Llama 3); punctuation; line breaks; other white space.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}",
    "llama3": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}",
}
_STYLES = {
    "default": "gpt2", "gpt-2": "gpt2", "smollm": "smollm", "qwen2": "qwen2", "deepseek-r1-qwen": "qwen2",
    "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3",
}
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_from_gguf(metadata: Mapping[str, Any], name: str) -> Tokenizer | None:
    """The tokenizer that a GGUF file describes, or None if it describes none.

    Reads byte-level BPE ("gpt2") with the pre-tokenisers of GPT-2, SmolLM, Qwen2 and Llama 3, and sentencepiece BPE ("llama").
    Others, and metadata that contradict themselves, raise ValueError naming what is wrong.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return None
    if model not in ("gpt2", "llama"):
        raise ValueError(f"{name} has a tokenizer of type {model!r}; minillm reads 'gpt2' and 'llama'")
    tokens = _strings(metadata, "tokenizer.ggml.tokens", name)
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{name} has {len(tokens)} tokens but {len(types)} token types")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{name} lists {len(tokens) - len(vocabulary)} tokens twice")
    try:
        if model == "gpt2":
            backend, adds_bos = _byte_level(metadata, vocabulary, name)
        else:
            backend, adds_bos = _sentencepiece(metadata, vocabulary, types, name), True
        special = [t for t, kind in zip(tokens, types, strict=True) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        added = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.USER_DEFINED]
        backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{name} has a vocabulary or merges that do not fit together: {error}") from error
    named = {role: tokens[i] for role, key in _ROLES.items() if (i := _token_id(metadata, key, tokens, name)) is not None}
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in named:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])])
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, named, template, eos_ids(metadata, name))


def eos_ids(metadata: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Tokens that end a text: end of sequence, of turn, of message, as far as the file names them."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    found = [_token_id(metadata, key, tokens, name) for key in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int], name: str) -> tuple[tokenizers.Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    style = _STYLES.get(pre)
    if style is None:
        raise ValueError(f"{name} cuts text in the way {pre!r}; minillm knows {', '.join(_STYLES)}")
    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges", name):
        left, space, right = merge.partition(" ")
        if not space:
            raise ValueError(f"{name} has a merge {merge!r} that is not a pair")
        merges.append((left, right))
    # Llama 3 takes a whole word that is in the vocabulary even where the merges cannot build it.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=style == "llama3"))
    steps: list[Any] = []  # before the bytes are spelled as letters
    if style == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    elif style in _PATTERNS:
        steps.append(pre_tokenizers.Split(Regex(_PATTERNS[style]), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style not in _PATTERNS))  # with GPT-2's own pattern
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if style == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, style == "llama3"


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: dict[str, int], types: list[int], name: str) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE: of all neighbours whose union is a token, the union with the highest score is merged first."""
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise ValueError(f"{name} has a tokenizer that rewrites text (tokenizer.ggml.{key}), which minillm does not support")
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary):
        raise ValueError(f"{name} needs one score per token under tokenizer.ggml.scores")
    text = {token for token, i in vocabulary.items() if types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED)}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(text, key=lambda token: (-scores[vocabulary[token]], vocabulary[token]))
        for cut in range(1, len(token))
        if token[:cut] in text and token[cut:] in text
    ]
    unknown = next((token for token, i in vocabulary.items() if types[i] == TokenType.UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    pieces: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        pieces.append(decoders.Strip(" ", left=1))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(pieces)
    return backend


def _strings(metadata: Mapping[str, Any], key: str, name: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise ValueError(f"{name} has no list of texts under {key}")
    return values


def _token_id(metadata: Mapping[str, Any], role: str, tokens: list[str] | None, name: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token = metadata.get(key)
    if token is not None and (not isinstance(token, int) or (tokens is not None and not 0 <= token < len(tokens))):
        raise ValueError(f"{name} has {key} {token!r}, which is not one of its tokens")
    return token
