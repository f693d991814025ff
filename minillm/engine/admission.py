"""What a prompt must be to be served: checked before anything changes, with the value and the limit in the message."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Callable, Iterable, Mapping, Protocol, Sequence

from minillm.sampling_params import SamplingParams


class TokenizerLike(Protocol):
    eos_token_ids: Sequence[int]

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def check_tokenizer(tokenizer: object) -> None:
    """ValueError for what is neither None nor a tokenizer, naming what it lacks."""
    lacks = [part for part in ("encode", "decode", "eos_token_ids") if not hasattr(tokenizer, part)]
    if tokenizer is not None and lacks:
        raise ValueError(f"tokenizer must be None or a tokenizer, got {tokenizer!r:.60}, which lacks {', '.join(lacks)}")


@dataclass(frozen=True)
class Admission:
    """The limits of one engine. pool_tokens: KV slots of the whole pool. recompute_limit: tokens of a step where every step
    computes whole sequences, None where KV is kept. slots_held: slots that a request of so many tokens holds at most."""

    tokenizer: TokenizerLike | None
    vocab_size: int
    max_model_len: int
    pool_tokens: int
    recompute_limit: int | None
    slots_held: Callable[[int], int] = lambda tokens: tokens

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt. ValueError for an empty one, for text without a tokenizer, for ids outside the vocabulary."""
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("prompt is an empty string; it needs at least one token")
            if self.tokenizer is None:
                raise ValueError(f"this model has no tokenizer; give token ids instead of {prompt[:40]!r}")
            ids = list(self.tokenizer.encode(prompt))
        elif isinstance(prompt, Mapping) or (isinstance(prompt, (list, tuple)) and any(isinstance(t, Mapping) for t in prompt)):
            raise ValueError(f"a message is no prompt for generate; give conversations to chat, got {prompt!r:.60}")
        elif isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise ValueError(f"a prompt is a string or a sequence of token ids, got {prompt!r:.60}")
        else:
            try:
                ids = [_token_id(t) for t in prompt]
            except TypeError:
                raise ValueError(f"a prompt is a string or a sequence of token ids, got {prompt!r:.60}") from None
        bad = next((t for t in ids if not 0 <= t < self.vocab_size), None)
        if bad is not None:
            raise ValueError(f"token id {bad} is outside the vocabulary of {self.vocab_size}")
        return ids

    def longest_answer(self, prompt_tokens: int) -> int:
        """The largest max_tokens that check lets pass for a prompt of so many tokens; 0 or less where none does."""
        limits = [self.max_model_len, self.pool_tokens + 1]  # the last token is sampled, never computed: it needs no slot
        if self.recompute_limit is not None:
            limits.append(self.recompute_limit + 1)
        return min(limits) - prompt_tokens

    def check(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ValueError if a request could never be served, naming the value and the limit."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        if not ids:
            raise ValueError("prompt has no tokens; it needs at least one")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"prompt has {len(ids)} tokens; with room for one more the limit is max_model_len - 1 = {self.max_model_len - 1}"
            )
        outside = [t for t in params.stop_token_ids if t >= self.vocab_size]
        if outside:
            raise ValueError(f"stop_token_ids {outside} are outside the vocabulary of {self.vocab_size}")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"stop strings {params.stop_strings} need a tokenizer; this model has none")
        # the last token is sampled, never computed: it needs no slot
        most = min(len(ids) + params.max_tokens, self.max_model_len) - 1
        held = self.slots_held(most)
        if held > self.pool_tokens:
            raise ValueError(
                f"prompt of {len(ids)} tokens with max_tokens={params.max_tokens} needs {held} KV slots, "
                f"the whole pool has {self.pool_tokens}"
            )
        if self.recompute_limit is not None and most > self.recompute_limit:
            raise ValueError(
                f"with kv_cache='none' a step recomputes up to {most} tokens at once, "
                f"max_num_batched_tokens is {self.recompute_limit}"
            )


def _token_id(value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"a token id is a whole number, got {value!r:.60}") from None
