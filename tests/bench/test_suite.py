"""Arguments of `minillm bench`, and whole runs: of fakes, and of minillm itself on a tiny model."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from minillm.bench import suite
from minillm.bench.engines import ENGINES, PEERS, command, environment, parse_peers, start_task
from minillm.bench.measures import MEASURES
from minillm.bench.worker import Worker
from minillm.model.config import ModelConfig

TINY = ModelConfig(
    vocab_size=128, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    max_position=2048, tie_embeddings=True, eos_token_ids=(2,),
)  # fmt: skip


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    suite.add_bench_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny random model as a folder of safetensors, without a tokenizer."""
    import torch

    from minillm.bench.export import write_folder
    from minillm.model.loader import Checkpoint
    from minillm.model.weights import expected_shapes

    folder = tmp_path_factory.mktemp("tiny")
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) / 4 for name, shape in expected_shapes(TINY).items()}
    write_folder(Checkpoint(TINY, weights, None, "tiny"), folder)
    return folder


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "decode1,decode9"], "'decode9'"),
        (["--peer", "ollama=/bin/sh"], "unknown peer 'ollama'"),
        (["--peer", "vllm"], "needs a Python"),
        (["--peer", "vllm=/no/such/python"], "there is no /no/such/python"),
        (["--without", "llamacpp"], "'llamacpp'"),
        (["--without", "minillm"], "is about it"),
        (["--rounds", "0"], "rounds"),
        (["--threads", "0"], "threads"),
        (["--timeout", "-1"], "timeout"),
        (["--json", "/no/such/folder/x.json"], "no folder"),
        (["--show", "/no/such/report.json"], "cannot read"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(arguments, message, monkeypatch):
    monkeypatch.setattr(suite, "Worker", None)
    with pytest.raises(ValueError, match=message):
        suite.run_bench(parse(*arguments))


def test_peers_without_an_environment_are_missing_with_what_to_do():
    engines, missing = suite.choose_engines([], [])
    assert [e.name for e in engines] == ["minillm", "minillm-compiled", "minillm-int4", "transformers-fp32", "transformers-bf16"]
    assert "--peer llama.cpp=/path/to/python" in missing["llama.cpp"]


def test_a_named_python_runs_all_variants_of_its_peer():
    engines, missing = suite.choose_engines([f"vllm={sys.executable}", f"llama.cpp={sys.executable}"], ["transformers"])
    assert {e.family for e in engines} == {"minillm", "vllm", "llama.cpp"}
    assert missing == {"transformers-fp32": "left out by --without", "transformers-bf16": "left out by --without"}
    assert parse_peers(["transformers"]) == {"transformers": sys.executable}


def test_measures_keep_their_order_and_quick_ones_are_short():
    chosen = suite.choose_measures("mix32, decode1", quick=True)
    assert [m.name for m in chosen] == ["decode1", "mix32"] and all(m.new <= 6 for m in chosen)
    assert suite.choose_measures("", quick=False) == list(MEASURES.values())


def test_every_engine_has_the_same_threads_and_a_peer_does_not_see_our_packages():
    for engine in ENGINES:
        env = environment(engine, threads=3)
        assert env["OMP_NUM_THREADS"] == "3" and bool(env["PYTHONPATH"]) == (engine.family == "minillm")
        assert engine.family in (*PEERS, "minillm") and command(engine)[1].endswith("_worker.py")


def test_a_whole_run_of_fakes_writes_a_report_that_can_be_shown_again(fakes, tiny_folder, tmp_path, monkeypatch, capsys):
    fake = [fakes.engine("minillm", seconds=1.0), fakes.engine("transformers-bf16", "transformers", seconds=2.0)]
    monkeypatch.setattr(suite, "choose_engines", lambda peers, without: (fake, {}))
    monkeypatch.setattr(suite, "start_task", fakes.start_task)
    monkeypatch.setattr(suite, "command", lambda engine: [sys.executable, str(fakes.fake)])
    monkeypatch.setattr(suite, "REFERENCE", fakes.engine("reference"))
    path = tmp_path / "report.json"
    run = parse("--model", str(tiny_folder), "--rounds", "3", "--only", "decode8,overhead", "--json", str(path))
    assert suite.run_bench(run) == 0
    report = json.loads(path.read_text())
    assert report["settings"]["rounds"] == 3 and len(report["measures"]["decode8"]["series"]["minillm"]["samples"]) == 3
    assert report["bars"][0]["ratio"] == 2.0 and report["bars"][0]["met"] is True
    first = capsys.readouterr().out
    assert suite.run_bench(parse("--show", str(path))) == 0
    assert capsys.readouterr().out == first


def test_minillm_measures_itself_on_a_tiny_model(tiny_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    worker = Worker(command(ENGINES[0]), environment(ENGINES[0], threads=1))
    try:
        facts = worker.ask(start_task(ENGINES[0], str(tiny_folder), threads=1), 120)
        assert facts["dtype"] in ("bfloat16", "float32") and "torch" in facts["versions"]
        for measure in (m.quick() for m in MEASURES.values()):
            task = measure.task(TINY.vocab_size)
            answer = worker.ask(task, 120)
            assert measure.value(task, answer) > 0
            if measure.kind == "decode":  # the work of exactly the steps that were timed
                assert answer["work"]["steps"] == measure.new and answer["work"]["weight_bytes"] > 0
        assert answer["overhead"] < answer["outside"] < 1 and sum(answer["shares"].values()) == pytest.approx(1)
        prompts = [[5] * 8] * 2
        for steps in (0, 2):
            profile = worker.ask({"task": "profile", "prompts": prompts, "new": steps}, 120)
            assert profile["shares"]["matmuls"] > 0 and sum(profile["shares"].values()) == pytest.approx(1)
        again = worker.ask({"task": "tokens", "prompts": prompts, "new": 4}, 120)["token_ids"]
        assert again[0] == again[1] and len(again[0]) == 4
    finally:
        worker.close()


@pytest.mark.slow
def test_transformers_gives_the_tokens_of_minillm_in_float32(tiny_folder):
    tokens = {}
    prompts = [[5, 9, 4], [7] * 6]
    for engine in (e for e in ENGINES if e.name in ("minillm", "transformers-fp32")):
        worker = Worker(command(engine), environment(engine, threads=1))
        try:
            worker.ask({**start_task(engine, str(tiny_folder), threads=1), "options": {"dtype": "float32"}}, 180)
            tokens[engine.name] = worker.ask({"task": "tokens", "prompts": prompts, "new": 12}, 120)["token_ids"]
            if engine.family == "transformers":
                task = {"task": "mix", "prompts": prompts, "new": [3, 5]}
                assert all(worker.ask({**task, "method": m}, 120)["seconds"] > 0 for m in engine.methods)
        finally:
            worker.close()
    assert tokens["minillm"] == tokens["transformers-fp32"]
