"""Running the app: uvicorn, a socket, signals. ``serving`` does it in a thread, for tests and notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Iterator

import uvicorn

from minillm.llm import LLM
from minillm.perf.workers import release_workers
from minillm.server.api import Service, create_app
from minillm.server.options import ServerOptions

CLOSE_SECONDS = 5
"""Readers have this long to fetch what is left after the last sample has ended."""


class Server(uvicorn.Server):
    """uvicorn's server, which drains the engine before it closes connections."""

    def __init__(self, llm: LLM, options: ServerOptions):
        app = create_app(llm, options)
        self.service: Service = app.state.service
        self.options = options
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="on",
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )  # fmt: skip
        )

    def listen(self) -> socket.socket:
        """Take the address; OSError if it is taken already, is not this machine's, or is none."""
        where = f"{self.options.host} port {self.options.port}"
        try:
            (family, _, _, _, address), *_ = socket.getaddrinfo(self.options.host, self.options.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise OSError(f"cannot listen on {where}: {getattr(error, 'strerror', None) or error}") from error
        sock = socket.socket(family)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(self.config.backlog)  # a socket that is bound only may be bound a second time by another server
        except OSError as error:
            sock.close()
            raise OSError(f"cannot listen on {where}: {error.strerror}") from error
        return sock

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()  # nobody new
        drained = asyncio.ensure_future(self.service.loop.drain(self.options.grace_seconds))
        while not drained.done() and not self.force_exit:  # a second Ctrl-C is for those who cannot wait
            await asyncio.wait({drained}, timeout=0.1)
        drained.cancel()
        await super().shutdown(sockets)


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(llm: LLM, options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM; then let running requests end, and return."""
    server = Server(llm, options)
    sock = server.listen()
    print(f"minillm: {server.service.name} at {url_of(sock)}/v1", file=sys.stderr, flush=True)
    if options.api_key is None and not is_loopback(options.host):
        print(f"minillm: anybody who reaches {options.host} may use this; --api-key asks for a key", file=sys.stderr, flush=True)
    # uvicorn sends itself the signal again once it has shut down; by then there is nothing left to interrupt
    before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        release_workers()  # this thread loaded the model; from here on the engine's thread computes
        server.run([sock])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


@dataclass(frozen=True)
class Running:
    """A server in a thread. url: without /v1."""

    url: str
    server: Server


@contextlib.contextmanager
def serving(llm: LLM, options: ServerOptions | None = None) -> Iterator[Running]:
    """Serve on a thread while the block runs, on a free port unless options say otherwise; the llm belongs to the server."""
    server = Server(llm, options or ServerOptions(port=0))
    sock = server.listen()
    thread = threading.Thread(target=server.run, args=([sock],), name="minillm-server", daemon=True)
    url = url_of(sock)
    release_workers()
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.01)
        if not server.started:
            raise RuntimeError("the server did not start; the log says why")
        yield Running(url, server)
    finally:
        server.should_exit = True
        thread.join()
