"""Clients that stream completions, in a process of their own and with nothing but the standard library: the server is measured.

Reads one line of JSON, {"host", "port", "bodies"}; sends all bodies at once, each on a connection of its own; reads every stream
to its end; and writes one line, {"seconds", "first", "tokens", "texts", "cpu"}: from the first byte sent to the last one read,
seconds to each stream's first event, tokens by the server's count, the texts, and its own processor time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any


async def stream(host: str, port: int, body: bytes) -> tuple[float, bytes]:
    """When the first event came, and all bytes of the answer."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    data, first = bytearray(), 0.0
    while part := await reader.read(65_536):
        if not first and b"data: " in part:
            first = time.perf_counter()
        data += part
    writer.close()
    return first, bytes(data)


def events(answer: bytes) -> list[dict[str, Any]]:
    """The JSON events of one chunked answer. RuntimeError for one that was refused or did not end with [DONE]."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise RuntimeError(f"the server said {answer[:300]!r}")
    content = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        n = int(size, 16)
        content += body[:n]
        body = body[n + 2 :]
    found = [line.removeprefix(b"data: ") for line in bytes(content).split(b"\n\n") if line]
    if not found or found.pop() != b"[DONE]":
        raise RuntimeError(f"a stream broke off: {bytes(content[-300:])!r}")
    return [json.loads(text) for text in found]


async def run(host: str, port: int, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    before, cpu = time.perf_counter(), time.process_time()
    answers = await asyncio.gather(*(stream(host, port, json.dumps(b).encode()) for b in bodies))
    seconds, cpu = time.perf_counter() - before, time.process_time() - cpu
    told = [events(data) for _, data in answers]  # read when the clock has stopped
    return {
        "seconds": seconds, "cpu": cpu, "first": [first - before for first, _ in answers],
        "tokens": sum(e["usage"]["completion_tokens"] for one in told for e in one if e.get("usage")),
        "texts": ["".join(c["text"] for e in one for c in e["choices"]) for one in told],
    }  # fmt: skip


def main() -> None:
    """Say "ready", then serve one line after another until there is none."""
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asyncio.run(run(asked["host"], asked["port"], asked["bodies"]))), flush=True)


if __name__ == "__main__":
    main()
