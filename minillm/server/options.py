"""What can be chosen about the server itself: frozen, validated, and light to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerOptions:
    """host, port: where to listen; this machine only unless told otherwise, and port 0 takes a free one.
    api_key: what a client must show as a bearer token under /v1; None asks for none. name: the model's name in the interface.
    max_waiting: samples that may wait beside those that run; more are answered 429.
    max_choices: samples of one HTTP request, prompts times n. max_body_bytes: size of a request's body.
    body_seconds: time that a client has to send its body. stall_seconds: time that a reader may leave a full buffer standing.
    grace_seconds: time that running requests have to end after a signal.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    name: str | None = None
    max_waiting: int = 256
    max_choices: int = 128
    max_body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    stall_seconds: float = 60.0
    grace_seconds: float = 10.0

    def __post_init__(self) -> None:
        for text in ("host", "api_key", "name"):
            value = getattr(self, text)
            if (value is not None or text == "host") and (not isinstance(value, str) or not value.strip()):
                raise ValueError(f"{text} must be a text that is not empty, got {value!r}")
        key = self.api_key
        if key is not None and (key != key.strip() or not key.isascii() or not key.isprintable()):
            raise ValueError("api_key must be printable ASCII without spaces around it, or no client's header can show it")
        limits = {"port": (0, 65_535), "max_waiting": (0, None), "max_choices": (1, None), "max_body_bytes": (1, None)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            bad = isinstance(value, bool) or not isinstance(value, int)
            if bad or value < low or (high is not None and value > high):
                limit = f"at least {low}" if high is None else f"from {low} to {high}"
                raise ValueError(f"{name} must be a whole number {limit}, got {value!r}")
        for name, least in {"body_seconds": 0.001, "stall_seconds": 0.001, "grace_seconds": 0.0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < 1e9:
                raise ValueError(f"{name} must be a number of seconds, at least {least:g}, got {value!r}")
