"""minillm on the command line. A user's mistake is one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any, Sequence

DESCRIPTION = "A small, real LLM inference engine, and the course that builds it up."
DOCTOR = "Check versions, model, GPU, compiler and speed of this machine; exit code 1 if something must be mended."
PLAN = "Derive memory, KV cache, latency floors and concurrency of a model on a card."
BENCH = "Measure the engine against transformers, vLLM and llama.cpp, interleaved in one run."
SERVE = "Serve a model on this machine: completions, chat, streaming, /metrics. Clients of OpenAI's interface work unchanged."
KERNELS = (
    "Compile every Triton kernel for sm_80, sm_90, sm_100 and gfx942, without a GPU: registers, spills, shared memory, matrix "
    "units, occupancy. Exit code 1 if one spills or does not compile."
)
EPILOG = "Start with `minillm doctor`, then `minillm generate 'The capital of France is'`. Every command has its own --help."


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser. chosen: the command that will be run, where it is known."""
    parser = argparse.ArgumentParser(prog="minillm", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("-v", "--verbose", action="store_true", help="also say what the engine chose (dtype, KV pool)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    generate = commands.add_parser(
        "generate", help="continue a text, as it is written", description="Continue a text, token by token."
    )
    generate.add_argument("prompt", help="the text to continue; - reads it from standard input")
    generate.add_argument(
        "--chat", action="store_true", help="put the prompt into the model's chat template: ask instead of continue"
    )
    _add_model_arguments(generate)
    _add_sampling_arguments(generate)
    generate.add_argument("--meter", action="store_true", help="print the six needles afterwards")
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser("chat", help="talk to the model", description="Talk to the model; an empty line or Ctrl-D ends.")
    chat.add_argument("--system", help="what the model is told to be")
    _add_model_arguments(chat)
    _add_sampling_arguments(chat, max_tokens=512)
    chat.set_defaults(run=run_chat)

    demo = commands.add_parser(
        "demo", help="one answer, its needles and its roofline", description="One answer explained by its counts."
    )
    demo.add_argument(
        "question", nargs="?", default="Why is the sky blue? Answer in two sentences.", help="what to ask (default: %(default)s)"
    )
    _add_model_arguments(demo)
    demo.set_defaults(run=run_demo)

    doctor = commands.add_parser("doctor", help="what works on this machine, and what to do about the rest", description=DOCTOR)
    doctor.set_defaults(run=run_doctor)

    # these three declare their arguments where they use them, and import torch: only when they are asked for
    plan = commands.add_parser("plan", help="memory, KV and speed limits of a model on a card", description=PLAN)
    if chosen == "plan":
        from minillm.perf.plan import add_plan_arguments, run_plan

        add_plan_arguments(plan)
        plan.set_defaults(run=run_plan)
    bench = commands.add_parser("bench", help="measure the engine against its peers, in one run", description=BENCH)
    if chosen == "bench":
        from minillm.bench.suite import add_bench_arguments, run_bench

        add_bench_arguments(bench)
        bench.set_defaults(run=run_bench)

    serve = commands.add_parser("serve", help="answer over HTTP, as OpenAI's interface does", description=SERVE)
    if chosen == "serve":
        from minillm.server.command import add_serve_arguments, run_serve

        _add_model_arguments(serve)
        add_serve_arguments(serve)
        serve.set_defaults(run=run_serve)

    kernels = commands.add_parser("kernels", help="compile every Triton kernel for GPUs that are not here", description=KERNELS)
    if chosen == "kernels":
        from minillm.kernels.aot import add_kernels_arguments, run_kernels

        add_kernels_arguments(kernels)
        kernels.set_defaults(run=run_kernels)

    from minillm.course.status import add_course_arguments

    add_course_arguments(commands)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="smollm2-135m (default), a folder, a .gguf file or a hub id")
    parser.add_argument("--dtype", default="auto", help="auto (default), bfloat16, float16, float32 or float64")
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--max-model-len", type=int, help="tokens of prompt and answer together (default: the model's limit)")
    parser.add_argument("--kv-cache", default="paged", help="paged (default), contiguous, or none: recompute everything")
    parser.add_argument("--prefix-cache", help="none, hash or radix: keep what was computed for later prompts that begin alike")
    parser.add_argument(
        "--compile", action="store_true", help="compile the decode step: a minute or two the first time, then kept"
    )


def _add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int = 128) -> None:
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help=f"new tokens at most (default {max_tokens})")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) always takes the most likely token")
    parser.add_argument("--top-k", type=int, default=0, help="choose among the k most likely tokens; 0 (default): among all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="choose among the most likely tokens that reach this probability"
    )
    parser.add_argument("--seed", type=int, help="repeat the same random choices")
    parser.add_argument("--stop", action="append", default=[], help="end in front of this text; may be given several times")


def _load(args: argparse.Namespace) -> Any:
    from minillm.llm import LLM

    llm = LLM(
        args.model,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
        kv_cache=args.kv_cache,
        prefix_cache=args.prefix_cache or "none",
        compile=args.compile,
    )
    if llm.tokenizer is None:
        raise ValueError(f"{args.model} comes without a tokenizer: from Python it serves token ids, here it cannot read text")
    return llm


def _load_to_chat(args: argparse.Namespace) -> Any:
    llm = _load(args)
    if llm.tokenizer.chat_template is None:
        raise ValueError(f"{args.model} has no chat template: it was not trained to chat; use minillm generate")
    return llm


def _params(args: argparse.Namespace) -> Any:
    from minillm.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
    )


def run_generate(args: argparse.Namespace) -> int:
    params = _params(args)
    # the newline that ends a file or an echo is not part of the text to continue
    prompt = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    llm = _load(args)
    _print_stream(llm, [{"role": "user", "content": prompt}] if args.chat else prompt, params)
    if args.meter:
        print(f"\n{llm.meter}")
    return 0


def run_chat(args: argparse.Namespace) -> int:
    params = _params(args)
    if args.prefix_cache is None and args.kv_cache == "paged":
        args.prefix_cache = "radix"  # every turn begins with all that was said before
    llm = _load_to_chat(args)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    print(f"{llm.model.config.name}. An empty line ends.", file=sys.stderr)
    while line := _ask():
        messages.append({"role": "user", "content": line})
        try:
            answer = _print_stream(llm, messages, params)
        except ValueError as error:  # the conversation has outgrown the model; it can go on without this turn
            print(f"minillm: {error}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _print_stream(llm: Any, prompt: Any, params: Any) -> str:
    """Print the answer as it grows, and return it."""
    pieces = []
    for piece in llm.stream(prompt, params):
        pieces.append(piece)
        print(piece, end="", flush=True)
    print()
    return "".join(pieces)


def run_demo(args: argparse.Namespace) -> int:
    from minillm.course.demo import demo

    demo(_load_to_chat(args), args.question)
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    from minillm.course.doctor import run_doctor as examine

    return examine(sys.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _run((sys.argv[1:] if argv is None else list(argv)) or ["--help"])
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    args = build_parser(next((w for w in words if not w.startswith("-")), None)).parse_args(words)
    logging.basicConfig(format="minillm: %(message)s", stream=sys.stderr)
    logging.getLogger("minillm").setLevel(logging.INFO if args.verbose else logging.WARNING)
    try:
        code: int = args.run(args)
        sys.stdout.flush()  # a reader that left is noticed here, not when Python exits
        return code
    except BrokenPipeError:
        raise
    except (ValueError, OSError, RuntimeError, ArithmeticError, ImportError) as error:
        if args.verbose:
            raise
        hint = "; `minillm doctor` says what to do" if isinstance(error, ImportError) else ""
        print(f"minillm: {error}{hint}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
