"""`minillm serve` on the command line: its options reach the engine and the server, and mistakes are one line."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from typing import Any

import pytest

from minillm.cli import build_parser, main
from minillm.config import EngineConfig
from minillm.server import serve as serve_module
from minillm.server.command import engine_options
from minillm.server.options import ServerOptions

from .conftest import tiny


def options(*words: str) -> dict[str, Any]:
    return engine_options(build_parser("serve").parse_args(["serve", *words]))


def test_every_option_of_the_engine_can_be_given() -> None:
    chosen = options("--option", "block_size=32", "--option", "kv-cache=contiguous", "--option", "num_blocks=None",
                     "--max-num-seqs", "7", "--dtype", "float32", "--prefix-cache", "radix", "--compile")  # fmt: skip
    assert chosen["block_size"] == 32 and chosen["num_blocks"] is None and chosen["kv_cache"] == "contiguous"
    assert chosen["prefix_cache"] == "radix" and chosen["compile"] is True
    assert not set(options()) - {field.name for field in dataclasses.fields(EngineConfig)}
    assert chosen["max_num_seqs"] == 7 and chosen["dtype"] == "float32" and "max_num_batched_tokens" not in chosen


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be served; the model is a tiny one, whatever is asked for."""
    calls: list[Any] = []
    monkeypatch.setattr("minillm.llm.LLM", lambda name, **given: tiny(**{"num_blocks": given.pop("num_blocks", 8)}))
    monkeypatch.setattr(serve_module, "serve", lambda llm, options: calls.append((llm, options)))
    return calls


def test_the_key_comes_from_the_environment_unless_it_is_given(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_API_KEY", "from outside")
    assert main(["serve", "--port", "0"]) == 0 and main(["serve", "--api-key", "given"]) == 0
    assert [options.api_key for _, options in served] == ["from outside", "given"]
    assert served[0][1].host == "127.0.0.1"


@pytest.mark.parametrize("words, message", [
    (["--option", "nothing"], "--option takes NAME=VALUE, got 'nothing'"), (["--port", "-1"], "port"),
    (["--max-waiting", "-3"], "max_waiting"), (["--api-key", ""], "api_key"),
])  # fmt: skip
def test_a_mistake_is_one_line_before_any_model_is_loaded(
    served: list[Any], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["serve", *words]) == 2 and served == []
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_unknown_option_of_the_engine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--option", "blok_size=3"]) == 2
    assert "did you mean 'block_size'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model", "tokenizer"])
def test_an_argument_of_llm_is_no_option_of_the_engine(served: list[Any], capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["serve", "--option", f"{name}=x"]) == 2 and served == []
    assert f"unknown option '{name}'" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["two words", "x" * 300])
def test_a_host_that_is_none_is_named(host: str) -> None:
    with pytest.raises(OSError, match=f"cannot listen on {host} port 0: "):
        serve_module.Server(tiny(), ServerOptions(host=host, port=0)).listen()


def test_a_port_is_taken_as_soon_as_one_server_has_it() -> None:
    with serve_module.Server(tiny(), ServerOptions(port=0)).listen() as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}: "):
            serve_module.Server(tiny(), ServerOptions(port=port)).listen()


def test_a_port_that_is_taken_is_one_line(served: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("minillm.llm.LLM", lambda name, **given: tiny())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_the_command_line_starts_without_the_server() -> None:
    code = "import sys; from minillm.cli import build_parser; build_parser('doctor'); print('fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("host, loopback", [
    ("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("example.org", False),
])  # fmt: skip
def test_an_address_of_this_machine_only_is_told_from_others(host: str, loopback: bool) -> None:
    assert serve_module.is_loopback(host) is loopback
