"""Errors as the OpenAI interface words them: {"error": {"message", "type", "param", "code"}} under a fitting status."""

from __future__ import annotations

import json
from typing import Any, Callable, Mapping, Sequence

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response

RETRY_SECONDS = 1
"""What Retry-After says: a place in the queue is free again as soon as any request ends."""


class ApiError(HTTPException):
    """An answer that is an error. Clients wait retry_after seconds before they try again, where it is given."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers)
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(message: str, param: str | None = None) -> ApiError:
    """A request that cannot be served as it is: 400."""
    return ApiError(400, message, param=param)


def overloaded(live: int, count: int, limit: int) -> ApiError:
    """Too much waits already: 429."""
    message = f"{live} samples run or wait and {count} more were asked for; this server holds {limit} at once"
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after=RETRY_SECONDS)


def closing() -> ApiError:
    """The server is going down: 503."""
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down", retry_after=RETRY_SECONDS)


def failed(fault: BaseException) -> ApiError:
    """The engine raised while it worked on this request: 500."""
    return ApiError(500, f"the engine failed: {type(fault).__name__}: {fault}"[:500], kind="server_error", code="engine_error")


class Json(Response):
    """JSON in ASCII: half a surrogate pair that a client sent cannot break the answer that quotes it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def to_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def respond(error: ApiError) -> Response:
    return Json(error.content, error.status_code, headers=dict(error.headers or {}))


def add_handlers(app: FastAPI, refused: Callable[[int], None]) -> None:
    """From now on every error of the app has the one shape. refused: told the status of each."""

    def worded(request: Request, error: Exception) -> ApiError:
        path, method, status = request.url.path, request.method, getattr(error, "status_code", 500)
        if isinstance(error, ApiError):
            return error
        if isinstance(error, RequestValidationError):
            return _explain(error.errors())
        if status == 404:
            return ApiError(404, f"there is no {path:.80} here")
        if status == 405:
            return ApiError(405, f"{path:.80} does not answer {method}")
        if status < 500:
            return ApiError(status, str(getattr(error, "detail", error)))  # a body that no parser gets through, for one
        return ApiError(500, f"{type(error).__name__}: {error}"[:500], kind="server_error")

    def handle(request: Request, error: Exception) -> Response:
        answer = worded(request, error)
        refused(answer.status_code)
        return respond(answer)

    for what in (*app.exception_handlers, Exception):  # in place of FastAPI's own
        app.add_exception_handler(what, handle)


def _explain(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's findings, with the field's name and what was there."""
    first = errors[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if not where:
        return invalid("the body must be a JSON object, with the header Content-Type: application/json")
    param = ".".join(where)
    if first["type"] == "missing":
        return invalid(f"{param} is missing", param)
    message = str(first["msg"])
    return invalid(f"{param}: {message[:1].lower()}{message[1:]}, got {first['input']!r:.60}", param)
