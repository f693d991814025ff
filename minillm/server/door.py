"""The door: who may come in, and with how large a parcel. Plain ASGI, so that a stream passes it untouched."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, Awaitable, Callable, MutableMapping

from minillm.server.errors import ApiError, respond
from minillm.server.options import ServerOptions

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Gone(Exception):
    """The client left while it was sending."""


class Door:
    """Checks the key before the body is read, and reads the body with a limit of size and time before the app sees it."""

    def __init__(self, app: App, options: ServerOptions, refused: Callable[[int], None]):
        self.app, self.options, self._refused = app, options, refused
        self._key = None if options.api_key is None else options.api_key.encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self._check_key(scope)
            if scope["method"] == "POST":
                receive = await self._read(scope, receive)
        except ApiError as error:
            self._refused(error.status_code)
            return await respond(error)(scope, receive, send)
        except Gone:
            return
        await self.app(scope, receive, send)

    def _check_key(self, scope: MutableMapping[str, Any]) -> None:
        if self._key is None or not scope["path"].startswith("/v1"):
            return
        scheme, _, shown = _header(scope, b"authorization").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(shown.strip(), self._key):
            return
        what = "the API key is wrong" if shown else "this server asks for an API key: Authorization: Bearer KEY"
        raise ApiError(401, what, code="invalid_api_key")

    async def _read(self, scope: MutableMapping[str, Any], receive: Receive) -> Receive:
        """The body, and then whatever receive says next."""
        limit = self.options.max_body_bytes
        stated = _header(scope, b"content-length")
        if stated.isdigit() and int(stated[:20]) > limit:
            raise _too_large(f"{int(stated[:20])} bytes", limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self.options.body_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limit:
                        raise _too_large(f"more than {limit} bytes", limit)
        except TimeoutError:
            seconds = f"{self.options.body_seconds:g} s"
            raise _last_words(408, f"the body did not come within {seconds}") from None
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return replay


def _header(scope: MutableMapping[str, Any], name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _too_large(what: str, limit: int) -> ApiError:
    return _last_words(413, f"the body has {what}, the limit is {limit}")


def _last_words(status: int, message: str) -> ApiError:
    """An answer given before the client has finished: the connection cannot be used again."""
    error = ApiError(status, message)
    error.headers = {"Connection": "close"}
    return error
