"""`minillm bench`: arguments, and the run from the first worker to the last table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from minillm.bench import study
from minillm.bench.engines import ENGINES, OWN, PEERS, REFERENCE, Engine, command, environment, parse_peers, start_task
from minillm.bench.measures import MEASURES, Measure
from minillm.bench.report import make_report
from minillm.bench.rounds import Bench
from minillm.bench.tables import show
from minillm.bench.worker import Worker
from minillm.checking import check_positive, check_whole
from minillm.model.loader import load_checkpoint

CHECKED_TOKENS = 32
DEFAULT_ROUNDS = 5
PROFILED_STEPS = 20
PIPED_WIDTH = 120


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `run_bench` reads."""
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON",
        help=f"a peer and the Python that has it, may be repeated: {', '.join(PEERS)} (transformers is here already)",
    )  # fmt: skip
    parser.add_argument("--without", action="append", default=[], metavar="ENGINE", help="leave out an engine or a variant of it")
    parser.add_argument("--only", default="", metavar="MEASURES", help=f"some of {','.join(MEASURES)} (default: all)")
    parser.add_argument(
        "--study", action="append", default=[], metavar="NAME",
        help=f"no peers: one technique on against off, may be repeated: {', '.join(study.names())}, or all",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="turns of every engine (default 5), or rounds of a study (default: its own)")
    parser.add_argument("--threads", type=int, help="threads of every engine (default: all cores)")
    parser.add_argument("--model", default="smollm2-135m", help="smollm2-135m (default), a .gguf file or a model folder")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds an engine may take for one answer (default 1200)")
    parser.add_argument("--quick", action="store_true", help="one round of a few tokens: does every engine run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write everything, raw samples included, to a file")
    parser.add_argument("--show", type=Path, metavar="PATH", help="print a report written by --json, and measure nothing")


def run_bench(args: argparse.Namespace) -> int:
    """Measure, print the tables and write the JSON. ValueError for a mistake in the arguments, before anything starts."""
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    if args.show is not None:
        show(_read(args.show), console)
        return 0
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.study:
        return 0 if study.run_studies(args.study, args.rounds, args.json) else 1
    engines, missing = choose_engines(args.peer, args.without)
    measures = choose_measures(args.only, args.quick)
    threads = _cores() if args.threads is None else args.threads
    rounds = 1 if args.quick else DEFAULT_ROUNDS if args.rounds is None else args.rounds
    check_whole("threads", threads)
    check_whole("rounds", rounds)
    check_positive("timeout", args.timeout)
    config = load_checkpoint(args.model).config

    def launch(engine: Engine) -> tuple[Worker, dict[str, Any]]:
        task = start_task(engine, args.model, threads)
        return Worker(command(engine), environment(engine, threads)), task

    settings = {"threads": threads, "rounds": rounds, "quick": args.quick, "model": args.model, "timeout": args.timeout}
    known = [*engines, *(e for e in ENGINES if e.name in missing)]

    def report() -> dict[str, Any]:
        made = make_report(bench.results, known, measures, config, settings)
        if args.json is not None:
            args.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        return made

    bench = Bench(engines, launch, config.vocab_size, args.timeout, say=lambda line: print(line, file=sys.stderr, flush=True))
    bench.results.missing.update(missing)
    try:
        bench.start()
        bench.measure_machine(refresh=not args.quick)
        bench.check(REFERENCE, 8 if args.quick else CHECKED_TOKENS)
        if not args.quick:
            bench.warm_up(measures)
        bench.run(measures, rounds, after=report)
        bench.profile([m for m in measures if m.kind in ("decode", "prefill")], 2 if args.quick else PROFILED_STEPS)
    finally:
        bench.close()
    show(report(), console)
    return 0


def choose_engines(peers: list[str], without: list[str]) -> tuple[list[Engine], dict[str, str]]:
    """The engines that take part, and the others with the reason why not."""
    pythons = parse_peers(peers)
    names = {e.name for e in ENGINES} | set(PEERS)
    for name in without:
        if name not in names:
            raise ValueError(f"--without {name!r}: there are {', '.join(sorted(names))}")
        if name == OWN:
            raise ValueError(f"--without {OWN}: the benchmark is about it")
    engines, missing = [], {}
    for engine in ENGINES:
        if engine.name in without or engine.family in without:
            missing[engine.name] = "left out by --without"
        elif engine.family == OWN:
            engines.append(engine)
        elif engine.family in pythons:
            engines.append(dataclasses.replace(engine, python=pythons[engine.family]))
        else:
            missing[engine.name] = f"no environment was named; give --peer {engine.family}=/path/to/python"
    return engines, missing


def choose_measures(only: str, quick: bool) -> list[Measure]:
    """The measures named in a comma-separated list, in the usual order; all of them for an empty one."""
    asked = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in asked if name not in MEASURES]
    if unknown:
        raise ValueError(f"--only {unknown[0]!r}: there are {', '.join(MEASURES)}")
    chosen = [m for m in MEASURES.values() if not asked or m.name in asked]
    return [m.quick() for m in chosen] if quick else chosen


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if not isinstance(report, dict) or report.get("what") != "minillm bench":
        raise ValueError(f"{path} is not a report of minillm bench")
    return report
