"""One request from arrival to its last token. Progress is a single number, num_computed_tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from minillm.sampling_params import SamplingParams
from minillm.spec.stats import DraftStats


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class RequestOutput:
    """What a request has produced so far.

    text and token_ids are cut at the same place: a stop token or stop string is in neither.
    finish_reason: None while running, then "stop" | "length" | "abort". delta: text that is new since the last output.
    logprobs: per output token {token id: log-probability under the model}, the chosen token first; None unless asked for.
    num_cached_tokens: found in a prefix cache at the last admission; num_loaded_tokens: those of them that came from a tier below
    the pool.
    drafts: what speculation brought this request.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    delta: str
    finish_reason: str | None
    logprobs: tuple[dict[int, float], ...] | None = None
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    drafts: DraftStats = DraftStats()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(eq=False)
class Request:
    """The engine's own record of a request; nothing outside the engine holds one.

    token_ids: prompt, then every sampled token. num_computed_tokens: how many of them have their KV in ``blocks``.
    A step lets the second number catch up with the first; whoever takes KV away (preemption, a cache that keeps nothing) lowers
    it. Both run ahead of the model while steps are in flight (launched, results not seen yet): num_in_flight counts those steps,
    num_tokens_in_flight what they compute, num_pending the tokens they will append. What a step in flight reads is not released
    before it has landed. prompt_offered: whether the prefix cache has been offered the blocks of the prompt that it holds now.
    family: requests of the same prompt that may share its blocks, this one among them; empty where there are none.
    """

    request_id: str
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_tokens: int
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    prompt_offered: bool = False
    status: Status = Status.WAITING
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    num_preemptions: int = 0
    num_in_flight: int = 0
    num_tokens_in_flight: int = 0
    num_pending: int = 0
    drafts: DraftStats = DraftStats()
    family: list["Request"] = field(default_factory=list, repr=False)

    @property
    def num_landed_tokens(self) -> int:
        """Computed tokens whose KV is there already."""
        return self.num_computed_tokens - self.num_tokens_in_flight

    @property
    def num_tokens(self) -> int:
        """Tokens known or about to be: those that a step in flight samples have their place, not yet their id."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_left(self) -> int:
        """Tokens that a step may compute now: all that are not computed, but none once the last one of all is on its way."""
        num_tokens = len(self.token_ids) + self.num_pending
        return 0 if num_tokens - self.prompt_len >= self.max_tokens else num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled and seen."""
        return len(self.token_ids) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]
