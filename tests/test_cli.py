"""The command line, with a tiny model that has a tokenizer and a chat template: what it prints, and how it fails."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import safetensors.torch
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minillm import LLM, ModelConfig, SamplingParams, Transformer, cli
from minillm.cli import build_parser, main
from minillm.model.weights import expected_shapes
from minillm.perf.hardware import Machine

from .strategies import one_thread  # noqa: F401

ROOT = Path(__file__).parents[1]
SPECIAL = ["<|start|>", "<|end|>"]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 257,
    "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)


def save(folder: Path, tokenizer: bool = True, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """A random model of bytes, in the files that `transformers` would write."""
    folder.mkdir()
    raw = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(raw))
    random = Transformer.random(ModelConfig.from_hf(raw), seed=3).dense_weights()
    shapes = expected_shapes(ModelConfig.from_hf(raw))
    weights = {name: random[name] for name in shapes if name in random}
    heads, kv, inner = 32, 16, 48
    for fused, parts, sizes in (("self_attn.qkv", "qkv", [heads, kv, kv]), ("mlp.gate_up", ("gate", "up"), [inner, inner])):
        room = fused.split(".")[0]
        pieces = random[f"model.layers.0.{fused}_proj.weight"].split(sizes)
        weights |= {f"model.layers.0.{room}.{part}_proj.weight": piece.clone() for part, piece in zip(parts, pieces, strict=True)}
    assert set(weights) == set(shapes)
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    if tokenizer:
        alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A command sets it for its process, which here goes on."""
    logger = logging.getLogger("minillm")
    before = logger.level
    yield
    logger.setLevel(before)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, with the tiny model where it takes one: exit code, stdout, stderr."""

    def run(*words: str, stdin: str = "", model: Path | str | None = folder) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        more = ["--model", str(model), "--dtype", "float32"] if words[0] in ("generate", "chat", "demo") and model else []
        code = main([words[0], *more, *words[1:]])
        return code, *capsys.readouterr()

    return run


def process(*words: str, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "minillm.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options,
    )  # fmt: skip


# --- help ---


def parsers(parser: argparse.ArgumentParser, name: str = "minillm") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser and those of its commands."""
    yield name, parser
    for action in parser._actions:
        for command, sub in (action.choices or {}).items() if isinstance(action, argparse._SubParsersAction) else ():
            yield from parsers(sub, f"{name} {command}")


def all_parsers() -> dict[str, argparse.ArgumentParser]:
    found = dict(parsers(build_parser()))
    for command in ("plan", "bench", "kernels", "serve"):  # these declare their arguments only when they are asked for
        found |= {n: p for n, p in parsers(build_parser(command)) if n == f"minillm {command}"}
    return found


def test_there_is_a_command_for_each_thing_promised() -> None:
    commands = {"generate", "chat", "demo", "doctor", "plan", "bench", "kernels", "serve"}
    commands |= {"course", "course status", "course reset"}
    assert set(all_parsers()) == {"minillm", *(f"minillm {c}" for c in commands)}


@pytest.mark.parametrize("name", sorted(all_parsers()))
def test_every_argument_is_explained(name: str) -> None:
    for action in all_parsers()[name]._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), f"{name}: {action.dest} has no help"


@pytest.mark.parametrize("name", sorted(all_parsers()))
def test_help_goes_to_stdout_and_fits_a_terminal(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([*name.split()[1:], "--help"])
    out, err = capsys.readouterr()
    assert end.value.code == 0 and out.startswith(f"usage: {name}") and not err
    assert max(map(len, out.splitlines())) <= 80


def test_the_first_help_says_where_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    for words in ("Start with `minillm doctor`", "continue a text", "talk to the model", "what works on this machine"):
        assert words in out


@pytest.mark.parametrize("words", [["nonsense"], ["generate"], ["generate", "x", "--max-tokens", "many"], ["plan"], ["course"]])
def test_a_command_that_cannot_be_parsed_says_how_it_is_used(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and err.startswith("usage: minillm") and not out


# --- generate ---


def test_generate_prints_the_models_text(run: Run, llm: LLM) -> None:
    text = llm.generate("Hello", SamplingParams(max_tokens=30))[0].text
    assert run("generate", "Hello", "--max-tokens", "30") == (0, text + "\n", "")


def test_each_piece_is_shown_before_the_next_is_computed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, seen = io.BytesIO(), []

    def stream(self: LLM, prompt: Any, params: SamplingParams) -> Iterator[str]:
        for piece in ("one", " two"):
            yield piece
            seen.append(shown.getvalue())

    monkeypatch.setattr(LLM, "stream", stream)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown))  # like a pipe, it keeps what nobody flushes
    assert run("generate", "Hello")[0] == 0
    assert [*seen, shown.getvalue()] == [b"one", b"one two", b"one two\n"]


def test_a_dash_reads_the_prompt_from_standard_input(run: Run) -> None:
    given = run("generate", "two\nlines", "--max-tokens", "8")
    assert run("generate", "-", "--max-tokens", "8", stdin="two\nlines") == given
    assert run("generate", "-", "--max-tokens", "8", stdin="two\nlines\n") == given, "echo and editors end a text with a newline"
    assert run("generate", "-", "--max-tokens", "8", stdin="two\nlines\n\n") != given


def test_every_sampling_option_reaches_the_model(run: Run, llm: LLM) -> None:
    words = ["--max-tokens", "40", "--temperature", "0.9", "--top-k", "50", "--top-p", "0.9", "--seed", "11"]
    params = SamplingParams(max_tokens=40, temperature=0.9, top_k=50, top_p=0.9, seed=11)
    text = llm.generate("Hello", params)[0].text
    assert run("generate", "Hello", *words)[1] == text + "\n"
    for changed in ({"seed": 12}, {"temperature": 0.1}, {"top_k": 1}, {"top_p": 0.1}):
        assert llm.generate("Hello", SamplingParams(**{**vars_of(params), **changed}))[0].text != text
    a, b = text[12:14], text[9]
    stopped = run("generate", "Hello", *words, "--stop", a, "--stop", b)[1]
    assert stopped == text[: min(text.index(a), text.index(b))] + "\n"


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")}


def test_chat_template_system_prompt_and_end_of_turn(run: Run, llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=9))[0].text
    assert run("generate", "Hello", "--chat", "--max-tokens", "9") == (0, answer + "\n", "")


@pytest.mark.parametrize("option", ["--kv-cache none", "--kv-cache contiguous", "--max-model-len 99", "--prefix-cache hash"])
def test_engine_options_do_not_change_the_text(run: Run, option: str) -> None:
    assert run("generate", "Hello", "--max-tokens", "9", *option.split()) == run("generate", "Hello", "--max-tokens", "9")


@pytest.mark.parametrize("words, reused", [([], True), (["--prefix-cache", "none"], False), (["--kv-cache", "none"], False)])
def test_a_turn_of_a_chat_reuses_the_turns_before_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str], reused: bool
) -> None:
    loaded: list[Any] = []
    load = cli._load
    monkeypatch.setattr(cli, "_load", lambda args: loaded.append(load(args)) or loaded[0])
    lines = iter(["Hello there, how are you this fine day", "And you", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert run("chat", "--max-tokens", "4", *words)[0] == 0
    assert (loaded[0].meter.prefix_tokens > 0) is reused


def test_meter_prints_the_needles_after_the_text(run: Run) -> None:
    _, out, _ = run("generate", "Hello", "--max-tokens", "9", "--meter")
    plain = run("generate", "Hello", "--max-tokens", "9")[1]
    assert out.startswith(plain) and "output_tokens 9" in out
    for verb in ("skip", "compute less", "move less", "occupy less", "saturate", "break serial"):
        assert f"\n{verb} " in out


# --- a user's mistakes ---

MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown model": (["generate", "x", "--model", "./no/such/model"], "no model at './no/such/model'; give 'smollm2-135m'"),
    "bad dtype": (["generate", "x", "--dtype", "float8"], "dtype must be one of 'auto'"),
    "bad device": (["generate", "x", "--device", "abacus"], "abacus"),
    "no tokens wanted": (["generate", "x", "--max-tokens", "0"], "max_tokens must be a whole number at least 1, got 0"),
    "fewer than none wanted": (["generate", "x", "--max-tokens", "-3"], "got -3"),
    "empty prompt": (["generate", ""], "prompt is an empty string"),
    "nothing on standard input": (["generate", "-"], "prompt is an empty string"),
    "prompt too long": (["generate", "x" * 20, "--max-model-len", "20"], "prompt has 20 tokens"),
    "context too long": (["generate", "x", "--max-model-len", "5000"], "max_model_len 5000 is above the model's 4096 positions"),
    "kind of cache": (["generate", "x", "--kv-cache", "pagd"], "kv_cache must be one of 'paged', 'contiguous', 'none', got"),
    "prefix cache": (["generate", "x", "--prefix-cache", "tree"], "prefix_cache must be one of 'none', 'hash', 'radix', got"),
    "negative temperature": (["generate", "x", "--temperature", "-1"], "temperature must be at least 0"),
    "no number": (["generate", "x", "--temperature", "nan"], "temperature must be a finite number"),
    "top-p": (["generate", "x", "--top-p", "1.5"], "top_p must be above 0 and at most 1, got 1.5"),
    "empty stop string": (["generate", "x", "--stop", ""], "stop strings must be non-empty"),
    "seed": (["generate", "x", "--seed", "-1"], "seed must be a whole number"),
    "chat with a bad parameter": (["chat", "--top-k", "-1"], "top_k"),
    "demo with a bad dtype": (["demo", "--dtype", "int4"], "dtype must be one of"),
    "plan without such a model": (["plan", "nothing", "--card", "h100"], "'nothing' is no file"),
    "plan without such a card": (["plan", "qwen3-32b", "--card", "h999"], "no data sheet for 'h999'; there are h100"),
    "plan for nobody": (["plan", "qwen3-32b", "--card", "h100", "--batch", "0"], "batch must be a whole number"),
}  # fmt: skip


def is_mistake(result: tuple[int, str, str], message: str) -> None:
    code, out, err = result
    assert code == 2 and not out
    assert err.startswith("minillm: ") and message in err and err.count("\n") == 1 and err.endswith("\n"), err


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_on_stderr(name: str, run: Run) -> None:
    words, message = MISTAKES[name]
    is_mistake(run(*words), message)


@pytest.mark.parametrize("words", [["generate", "x"], ["generate", "x", "--stop", "y"], ["chat"], ["demo"]])
def test_a_model_without_a_tokenizer_cannot_read_text(words: list[str], run: Run, tmp_path: Path) -> None:
    is_mistake(run(*words, model=save(tmp_path / "mute", tokenizer=False), stdin="hello\n"), "comes without a tokenizer")


@pytest.mark.parametrize("words", [["generate", "x", "--chat"], ["chat"], ["demo"]])
def test_a_model_without_a_chat_template_cannot_chat(words: list[str], run: Run, tmp_path: Path) -> None:
    is_mistake(run(*words, model=save(tmp_path / "base", template=None), stdin="hello\n"), "has no chat template")


def test_a_damaged_model_is_named(run: Run, tmp_path: Path) -> None:
    broken = save(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    is_mistake(run("generate", "x", model=broken), "config.json")


def test_a_mistake_in_a_process_of_its_own_shows_no_traceback() -> None:
    done = process("generate", "x", "--model", "./no/such/model")
    out, err = done.communicate(timeout=300)
    is_mistake((done.returncode, out, err), "no model at './no/such/model'")


def test_verbose_shows_the_traceback_and_what_the_engine_chose(run: Run, folder: Path) -> None:
    with pytest.raises(ValueError, match="empty string"):
        main(["-v", "generate", "", "--model", str(folder)])
    done = process("-v", "generate", "x", "--model", str(folder), "--dtype", "float32", "--max-tokens", "2")
    _, err = done.communicate(timeout=300)
    assert done.returncode == 0 and err.startswith("minillm: tiny: 0.0 M parameters in float32 on cpu") and "KV pool of" in err


def test_a_broken_installation_points_to_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is not here')")
    done = process("generate", "x", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    out, err = done.communicate(timeout=300)
    is_mistake((done.returncode, out, err), "libtorch is not here; `minillm doctor` says what to do")


# --- a reader that leaves, and Ctrl-C ---


def test_a_reader_that_leaves_early_is_no_error(folder: Path) -> None:
    done = process("generate", "x", "--model", str(folder), "--dtype", "float32", "--max-tokens", "2000", "--stop", "never")
    assert done.stdout is not None and done.stderr is not None
    assert done.stdout.read(1)
    done.stdout.close()
    err = done.stderr.read()
    assert done.wait(timeout=300) == 0 and err == ""


def test_a_reader_that_leaves_before_the_plan_is_printed_is_no_error() -> None:
    done = process("plan", "qwen3-32b", "--card", "h100")
    assert done.stdout is not None and done.stderr is not None
    done.stdout.close()
    err = done.stderr.read()
    assert done.wait(timeout=300) == 0 and err == ""


def test_ctrl_c_ends_with_130_and_no_traceback(folder: Path) -> None:
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell tells what runs in its background to ignore it
    done = process("generate", "x", "--model", str(folder), "--dtype", "float32", "--max-tokens", "4000", preexec_fn=heard)
    assert done.stdout is not None
    assert done.stdout.read(1)
    done.send_signal(signal.SIGINT)
    _, err = done.communicate(timeout=300)
    assert (done.returncode, err) == (130, "\n")


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_ctrl_c_while_waiting_for_input(command: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def readline(self, *args: Any) -> str:
            raise KeyboardInterrupt

        read = readline

    monkeypatch.setattr(io, "StringIO", Interrupted)
    code, _, err = run(command, *["-"] * (command == "generate"))
    assert code == 130 and "Traceback" not in err and err.endswith("\n")


# --- chat ---


def test_two_turns_and_the_end_of_input(run: Run, llm: LLM) -> None:
    params = SamplingParams(max_tokens=7)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    first = llm.chat(messages, params)[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And you?"}]
    second = llm.chat(messages, params)[0].text
    code, out, err = run("chat", "--system", "Be kind.", "--max-tokens", "7", stdin=" Hello \nAnd you?\n")
    assert (code, out) == (0, f"> {first}\n> {second}\n> \n")
    assert "tiny. An empty line ends." in err


def test_an_empty_line_ends_the_chat(run: Run) -> None:
    assert run("chat", "--max-tokens", "3", stdin="\nHello\n")[:2] == (0, "> ")


def test_a_turn_that_does_not_fit_is_told_and_forgotten(run: Run, llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "short"}], SamplingParams(max_tokens=5))[0].text
    code, out, err = run("chat", "--max-model-len", "40", "--max-tokens", "5", stdin=f"{'long' * 20}\nshort\n")
    assert (code, out) == (0, f"> > {answer}\n> \n")
    assert "minillm: prompt has 88 tokens" in err


# --- demo, doctor, plan ---


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine that nobody has to measure."""
    from minillm.course import demo
    from minillm.perf import hardware

    known = Machine("my laptop", 1e10, {"float32": 1e11}, 8e9, "measured here: lab", "lab", 2, 10, ((10, 1e10),))
    monkeypatch.setattr(demo, "measure_machine", lambda device: known)
    monkeypatch.setattr(hardware, "measure_machine", lambda device: known)
    return known


def test_demo_answers_and_explains(run: Run, llm: LLM, machine: Machine) -> None:
    answer = llm.chat([{"role": "user", "content": "Why [bold]not[/] :smile:?"}], SamplingParams(max_tokens=128))[0]
    assert len(answer.token_ids) == 128
    asked = len(answer.prompt_token_ids)
    code, out, err = run("demo", "Why [bold]not[/] :smile:?")
    assert code == 0 and not err
    assert "\nWhy [bold]not[/] :smile:?\n" in out, "a question is text, not markup"
    assert answer.text in out
    told = " ".join(out.split())
    for words in (
        "tiny: 0.0 M parameters in float32 on cpu", "my laptop, measured: moves 10.0 GB/s, computes 100 GFLOP/s in float32",
        f"skip tokens computed {asked} 127 1", "break serial passes of the model 1 127 1", "this machine could do 10",
    ):  # fmt: skip
        assert words in told, words
    assert max(map(len, out.replace(answer.text, "").splitlines())) <= 80


def test_demo_does_without_floors_where_a_precision_is_not_measured(run: Run, machine: Machine) -> None:
    code, out, err = run("demo", "Why?", "--dtype", "float64")
    assert (code, err) == (0, "") and "arithmetic in float64 is not measured" in " ".join(out.split()) and "bound by" not in out


@pytest.mark.parametrize("code", [0, 1])
def test_the_doctors_verdict_is_the_exit_code(code: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.course import doctor

    monkeypatch.setattr(doctor, "run_doctor", lambda out: out.write("2 fine, 0 to mend\n") and code)
    assert run("doctor") == (code, "2 fine, 0 to mend\n", "")


def test_the_doctor_examines_this_machine(run: Run, machine: Machine) -> None:
    code, out, _ = run("doctor")
    assert code == (1 if "\nFAIL" in out or out.startswith("FAIL") else 0)
    for subject in ("python", "model", "triton mode", "compiler", "bandwidth"):
        assert subject in out


def test_plan_prints_what_is_known_of_qwen3_32b_on_one_h100(run: Run) -> None:
    code, out, err = run("plan", "qwen3-32b", "--card", "h100", "--batch", "1", "--context", "4096")
    assert (code, err) == (0, "")
    told = " ".join(out.split())
    for words in (
        "ridge 295 FLOP/B", "weights 65.5 GB (61.0 GiB)", "KV per token 256 KiB", "KV per request 1.07 GB (1.00 GiB)",
        "max concurrency 6 requests of 4096 tokens", "TTFT 276 ms", "TTFT at 50% MFU 552 ms", "prefill compute-bound",
        "TPOT 19.4 ms, 51.5 tok/s", "decode bandwidth-bound",
    ):  # fmt: skip
        assert words in told, words


def test_course_status_is_one_of_the_commands(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_PROGRESS_DIR", str(tmp_path))
    code, out, err = run("course", "status")
    assert (code, err) == (0, "") and out
