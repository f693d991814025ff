"""From the engine's outputs to the bodies and events of the OpenAI interface."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Mapping, Sequence

from minillm.engine.admission import TokenizerLike
from minillm.engine.detokenizer import Detokenizer
from minillm.engine.request import RequestOutput
from minillm.server.errors import to_json
from minillm.server.schema import Body

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""
DONE = b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


class Trail:
    """The tokens of one sample and where their text begins, for answers that list tokens."""

    def __init__(self, tokenizer: TokenizerLike | None):
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer)
        self._told = 0
        self.starts: list[int] = []

    def new(self, output: RequestOutput) -> range:
        """Indices of tokens that were not told before and that no stop string can take back: their text has begun to show."""
        for token in output.token_ids[len(self.starts) :]:
            self.starts.append(len(self._text.text))
            self._text.feed(token)
        end, count = self._told, len(output.token_ids)
        certain = output.finished or self._tokenizer is None
        while end < count and (certain or self.starts[end] < len(output.text)):
            end += 1
        told, self._told = range(self._told, end), end
        return told

    def spell(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.decode([token])


class Answer(ABC):
    """How one HTTP request is answered, whole or event by event. name: its id. count: its samples."""

    whole_kind: str
    piece_kind: str

    def __init__(self, body: Body, name: str, tokenizer: TokenizerLike | None, count: int):
        self.body, self.name = body, name
        self._frame = {"id": name, "created": int(time.time()), "model": body.model}
        lists_tokens = body.num_logprobs is not None or body.return_token_ids
        self._trails = [Trail(tokenizer) for _ in range(count)] if lists_tokens else None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._choice(i, o, self._text(o), o.finish_reason) for i, o in enumerate(outputs)]
        return {"object": self.whole_kind} | self._frame | {"choices": choices, "usage": self._usage(outputs)}

    def opening(self) -> bytes:
        """Events in front of the first piece."""
        return b""

    def pieces(self, grown: Sequence[tuple[int, RequestOutput]]) -> bytes:
        """One event for each sample that has something new to show."""
        parts = []
        for i, output in grown:
            choice = self._choice(i, output, self._delta(output), output.finish_reason)
            if output.finished or output.delta or choice.get("logprobs") or choice.get("token_ids"):
                parts.append(self._event([choice]))
        return b"".join(parts)

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Events behind the last piece."""
        if not self.body.include_usage:
            return DONE
        last = {"object": self.piece_kind} | self._frame | {"choices": [], "usage": self._usage(outputs)}
        return event(last) + DONE

    def _event(self, choices: Sequence[Mapping[str, Any]]) -> bytes:
        content = {"object": self.piece_kind} | self._frame | {"choices": choices}
        return event(content | {"usage": None} if self.body.include_usage else content)

    def _choice(self, index: int, output: RequestOutput, text: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, **text, "logprobs": None, "finish_reason": reason}
        if self._trails is not None:
            trail = self._trails[index]
            told = trail.new(output)
            if told and output.logprobs is not None:
                choice["logprobs"] = self._logprobs(trail, output, told)
            if self.body.return_token_ids:
                choice["token_ids"] = list(output.token_ids[told.start : told.stop])
        return choice

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        # a prompt is counted once, however many samples it has
        prompt = sum(len(o.prompt_token_ids) for o in outputs[:: self.body.n])
        cached = sum(o.num_cached_tokens for o in outputs[:: self.body.n])
        completion = sum(len(o.token_ids) for o in outputs)
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    @abstractmethod
    def _text(self, output: RequestOutput) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, output: RequestOutput) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, trail: Trail, output: RequestOutput, told: range) -> dict[str, Any]: ...


class CompletionAnswer(Answer):
    whole_kind = piece_kind = "text_completion"

    def _text(self, output: RequestOutput) -> dict[str, Any]:
        return {"text": output.text}

    def _delta(self, output: RequestOutput) -> dict[str, Any]:
        return {"text": output.delta}

    def _logprobs(self, trail: Trail, output: RequestOutput, told: range) -> dict[str, Any]:
        assert output.logprobs is not None
        tops = [{trail.spell(t): _finite(p) for t, p in reversed(output.logprobs[i].items())} for i in told]
        return {
            "tokens": [trail.spell(output.token_ids[i]) for i in told],
            "token_logprobs": [_finite(output.logprobs[i][output.token_ids[i]]) for i in told],
            "top_logprobs": tops if self.body.num_logprobs else None,
            "text_offset": [trail.starts[i] for i in told],
        }


class ChatAnswer(Answer):
    whole_kind, piece_kind = "chat.completion", "chat.completion.chunk"

    def opening(self) -> bytes:
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(self._event([{"index": i, **first}]) for i in range(self.body.n))

    def _text(self, output: RequestOutput) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": output.text, "refusal": None}}

    def _delta(self, output: RequestOutput) -> dict[str, Any]:
        return {"delta": {"content": output.delta} if output.delta else {}}

    def _logprobs(self, trail: Trail, output: RequestOutput, told: range) -> dict[str, Any]:
        assert output.logprobs is not None
        content = []
        for i in told:
            best = sorted(output.logprobs[i].items(), key=lambda item: -item[1])[: self.body.num_logprobs]
            chosen = _entry(trail, output.token_ids[i], output.logprobs[i][output.token_ids[i]])
            content.append(chosen | {"top_logprobs": [_entry(trail, *item) for item in best]})
        return {"content": content, "refusal": None}


def _entry(trail: Trail, token: int, logprob: float) -> dict[str, Any]:
    text = trail.spell(token)
    whole = "\ufffd" not in text  # half a character has no bytes of its own as text
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
