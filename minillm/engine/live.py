"""A request that has not ended, with its growing text: what one more token makes of it, and what its caller sees."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.engine.detokenizer import Detokenizer
from minillm.engine.request import Request, RequestOutput, Status
from minillm.engine.sampler import Sampled


@dataclass(frozen=True)
class Live:
    """request: the engine's record, whose status the scheduler changes. text: what may be shown of it."""

    request: Request
    text: Detokenizer

    def take(self, sampled: Sampled) -> str | None:
        """Append one more token. Returns why the request ends with it, "stop" or "length"; None if it goes on."""
        request, text = self.request, self.text
        request.token_ids.append(sampled.token_id)
        if sampled.logprobs is not None:
            request.logprobs.append(sampled.logprobs)
        if sampled.token_id in request.stop_ids:
            return "stop"
        text.feed(sampled.token_id)
        if not text.stopped and request.num_output_tokens < request.max_tokens:
            return None
        if not text.stopped:
            text.finish()  # what half a character held back may still complete a stop string
        return "stop" if text.stopped else "length"

    def output(self) -> RequestOutput:
        """The request as its caller sees it. One that has ended shows all its text; the new part of it is shown once."""
        request, text = self.request, self.text
        if request.status is Status.FINISHED:
            text.finish()
        logprobs = tuple(request.logprobs[: len(text.token_ids)]) if request.params.logprobs is not None else None
        return RequestOutput(
            request_id=request.request_id, prompt_token_ids=tuple(request.token_ids[: request.prompt_len]),
            token_ids=text.token_ids, text=text.text, delta=text.take_delta(),
            finish_reason=request.finish_reason, logprobs=logprobs, num_cached_tokens=request.num_cached_tokens,
            num_loaded_tokens=request.num_loaded_tokens, drafts=request.drafts,
        )  # fmt: skip
