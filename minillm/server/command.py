"""`minillm serve`: its arguments, and what runs when they are read."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
from typing import Any

from minillm.server.options import ServerOptions

KEY_VARIABLE = "MINILLM_API_KEY"


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = ServerOptions()
    parser.add_argument("--host", default=defaults.host, help="address to listen on (default %(default)s: this machine only)")
    parser.add_argument("--port", type=int, default=defaults.port, help="port (default %(default)s); 0 takes a free one")
    parser.add_argument(
        "--api-key", help=f"ask clients for this key; better in the environment as {KEY_VARIABLE}, where `ps` does not show it"
    )
    parser.add_argument("--name", help="the model's name for clients (default: the model's own)")
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=defaults.max_waiting,
        help="samples that may wait; more are answered 429 (default %(default)s)",
    )
    parser.add_argument(
        "--max-body-bytes", type=int, default=defaults.max_body_bytes, help="largest body of a request (default %(default)s)"
    )
    parser.add_argument(
        "--grace-seconds", type=float, default=defaults.grace_seconds,
        help="time that running requests have to end after Ctrl-C or SIGTERM (default %(default)g)",
    )  # fmt: skip
    parser.add_argument("--max-num-seqs", type=int, help="requests that run at once (default: the engine's)")
    parser.add_argument("--max-num-batched-tokens", type=int, help="tokens of one step (default: the engine's)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other option of the engine, such as block_size=32",
    )


def run_serve(args: argparse.Namespace) -> int:
    options = ServerOptions(
        host=args.host, port=args.port, api_key=args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE),
        name=args.name, max_waiting=args.max_waiting, max_body_bytes=args.max_body_bytes, grace_seconds=args.grace_seconds,
    )  # fmt: skip
    chosen = engine_options(args)
    from minillm.llm import LLM
    from minillm.server.serve import serve

    serve(LLM(args.model, **chosen), options)
    return 0


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for LLM: every argument that is an option of the engine, where it was given, and every --option. The engine
    checks names and values."""
    from minillm.config import EngineConfig

    known = {field.name for field in dataclasses.fields(EngineConfig)}
    chosen = {name: value for name, value in vars(args).items() if name in known and value is not None}
    for text in args.option:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--option takes NAME=VALUE, got {text!r}")
        name = name.replace("-", "_")
        if name not in known:  # LLM has other arguments, which are no options of the engine
            EngineConfig.from_options(**{name: None})
        chosen[name] = _value(value)
    return chosen


def _value(text: str) -> Any:
    """A number, True, False or None as Python writes them; anything else is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
