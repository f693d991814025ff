"""The bodies of requests. A field that would change the answer is honoured or refused, never passed over in silence."""

from __future__ import annotations

import difflib
from typing import Any, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from minillm.sampling_params import SamplingParams
from minillm.server.errors import ApiError, invalid

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_TOP_LOGPROBS = 20
IGNORED = {  # they say who asks or where the answer is kept, not what it is
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
}  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # fields of the interface that this server lacks, and the values that ask for nothing
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "echo": (False,), "suffix": ("",),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": ("none",), "verbosity": (), "web_search_options": (), "repetition_penalty": (1,), "min_p": (0,),
    "min_tokens": (0,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,),
}  # fmt: skip


class Strict(BaseModel):
    """Exact types; null counts as not given; a field that nobody knows is an error."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        kept = {}
        for name, value in values.items():
            if value is None:
                continue
            if name in cls.model_fields:
                kept[name] = value
            elif name not in IGNORED:
                cls._check_foreign(name, value, values)
        return kept

    @classmethod
    def _check_foreign(cls, name: str, value: Any, values: Mapping[str, Any]) -> None:
        raise _unknown(cls, name)


def _unknown(cls: type[BaseModel], name: str) -> ApiError:
    near = difflib.get_close_matches(name, cls.model_fields, n=1)
    return invalid(f"unknown field {name!r:.60}" + (f"; did you mean {near[0]!r}?" if near else ""), name[:60])


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Body(Strict):
    """What both routes accept. top_k, stop_token_ids, ignore_eos and return_token_ids are additions to OpenAI's interface."""

    model: str
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Any = ()
    top_k: int = 0
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    return_token_ids: bool = False

    @classmethod
    def _check_foreign(cls, name: str, value: Any, values: Mapping[str, Any]) -> None:
        if name not in NEUTRAL:
            raise _unknown(cls, name)
        neutral = NEUTRAL[name]
        if name == "best_of":  # as many candidates as answers: nothing to choose from
            neutral = (values.get("n") or 1,)
        if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            only = f"; only {' or '.join(map(repr, neutral))} is accepted" if neutral else "; leave it out"
            raise invalid(f"{name} {value!r:.60} is not supported{only}", name)

    @field_validator("stop")
    @classmethod
    def _few_and_short(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
            raise invalid(f"stop must be a string or a list of strings, got {value!r:.60}", "stop")
        if len(stops) > MAX_STOPS:
            raise invalid(f"stop has {len(stops)} strings, the limit is {MAX_STOPS}", "stop")
        longest = max(map(len, stops), default=0)
        if longest > MAX_STOP_LENGTH:
            raise invalid(f"a stop string has {longest} characters, the limit is {MAX_STOP_LENGTH}", "stop")
        return stops

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "Body":
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options are for stream=true", "stream_options")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report beside the chosen one; None reports nothing."""
        return None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """The engine's parameters; a ValueError for values that it refuses."""
        given = {name: getattr(self, name) for name in ENGINE_FIELDS if name != "max_tokens"}
        most = default_max_tokens if self.max_tokens is None else self.max_tokens
        return SamplingParams(**given, max_tokens=most, logprobs=self.num_logprobs)


ENGINE_FIELDS = ("n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens")


def blame(error: ValueError, otherwise: str) -> ApiError:
    """The engine's refusal as a 400 about the field that its message begins with."""
    first = str(error).split(maxsplit=1)[0]
    return invalid(str(error), first if first in ENGINE_FIELDS else otherwise)


class CompletionBody(Body):
    """POST /v1/completions. prompt: text, token ids, or a list of these."""

    prompt: Any
    max_tokens: int | None = 16
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one; 400 for anything that is neither text nor token ids."""
        if isinstance(self.prompt, str) or _are_ids(self.prompt):
            return [self.prompt]
        if isinstance(self.prompt, list) and self.prompt and all(isinstance(p, str) or _are_ids(p) for p in self.prompt):
            return self.prompt
        raise invalid(f"prompt must be text, a list of token ids, or a list of these, got {self.prompt!r:.60}", "prompt")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(t) is int for t in value)


class Part(Strict):
    """A piece of a message. Pictures and sound are for other models."""

    type: str
    text: str = ""

    @classmethod
    def _check_foreign(cls, name: str, value: Any, values: Mapping[str, Any]) -> None:
        raise invalid(f"a message's part of type {values.get('type')!r:.60} is not supported; only 'text' is", "messages")

    @field_validator("type")
    @classmethod
    def _text(cls, value: str) -> str:
        if value != "text":
            raise invalid(f"a message's part of type {value!r:.60} is not supported; only 'text' is", "messages")
        return value


class Message(Strict):
    role: str
    content: str | list[Part]

    @field_validator("role")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("system", "developer", "user", "assistant"):
            known = "system, developer, user, assistant"
            raise invalid(f"role {value!r:.60} is not supported; it is one of {known}", "messages")
        return value

    @classmethod
    def _check_foreign(cls, name: str, value: Any, values: Mapping[str, Any]) -> None:
        if value:  # clients send an assistant's message back with empty lists of tool calls and annotations
            raise invalid(f"{name:.60} in a message is not supported, got {value!r:.60}", "messages")

    def as_dict(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(Body):
    """POST /v1/chat/completions. max_completion_tokens is the newer name of max_tokens."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _agree(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid(f"top_logprobs {self.top_logprobs} needs logprobs=true", "top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise invalid(f"max_tokens {both[0]} and max_completion_tokens {both[1]} disagree; give one of them", "max_tokens")
        if self.max_tokens is None:
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def conversation(self) -> Sequence[Mapping[str, str]]:
        return [message.as_dict() for message in self.messages]

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
