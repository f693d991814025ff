"""A tokenizer for tests: any text, word by word."""

from __future__ import annotations

from typing import Sequence


class Letters:
    """A word is one token of ``vocab``, told by its letters; words that differ may share one."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, vocab: int = 64):
        self.vocab = vocab

    def encode(self, text: str) -> list[int]:
        return [int.from_bytes(word.encode()) % self.vocab for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
