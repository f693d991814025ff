"""Turns, rounds and what happens to engines that die, hang or refuse."""

from __future__ import annotations

import os
import sys
import time

import pytest

from minillm.bench.measures import MEASURES, Measure
from minillm.bench.worker import Worker, WorkerError, WorkerLost

ONE = Measure("one", "decode", "one", 1, 4, 10)
TWO = Measure("two", "prefill", "two", 1, 4, 2)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def turns(log, kinds=("decode", "prefill", "mix")):
    return [line.split()[0] for line in log if line.split()[1] in kinds and line.endswith("begin")]


def test_engines_take_turns_and_each_round_starts_with_the_next_one(fakes):
    bench = fakes.bench(*(fakes.engine(name) for name in "abc"))
    bench.start()
    bench.run([ONE], rounds=4)
    assert turns(fakes.log) == [*"abc", *"bca", *"cab", *"abc"]


def test_a_round_goes_through_all_measures_before_the_next_begins(fakes):
    bench = fakes.bench(fakes.engine("a"), fakes.engine("b"))
    bench.start()
    bench.run([ONE, TWO], rounds=2)
    kinds = [line.split()[1] for line in fakes.log if line.endswith("begin") and "start" not in line]
    assert kinds == ["decode", "decode", "prefill", "prefill"] * 2


def test_only_one_engine_is_active_at_a_time(fakes):
    bench = fakes.bench(*(fakes.engine(name) for name in "abc"))
    bench.start()
    bench.run([ONE], rounds=2)
    for begin, end in zip(fakes.log[::2], fakes.log[1::2], strict=True):
        assert (begin.split()[:2], begin.split()[2], end.split()[2]) == (end.split()[:2], "begin", "end")


def test_every_way_to_serve_a_mix_is_a_series_of_its_own(fakes):
    bench = fakes.bench(fakes.engine("a", methods=("static", "generate_batch")))
    bench.start()
    bench.run([Measure("mix", "mix", "mix", 4, 20, 20)], rounds=2)
    assert {name: len(s) for name, s in bench.results.samples["mix"].items()} == {"a static": 2, "a generate_batch": 2}


def test_a_worker_that_dies_is_reported_with_its_last_words_and_the_rest_goes_on(fakes):
    bench = fakes.bench(fakes.engine("a"), fakes.engine("b", trouble="die", from_turn=2))
    bench.start()
    bench.run([ONE], rounds=3)
    samples = bench.results.samples["one"]
    assert [s.round for s in samples["a"]] == [0, 1, 2] and [s.round for s in samples["b"]] == [0]
    assert "exit status 3" in bench.results.missing["b"] and "out of memory" in bench.results.missing["b"]
    assert turns(fakes.log).count("b") == 2


def test_a_worker_killed_by_a_signal_is_named_by_it(fakes):
    bench = fakes.bench(fakes.engine("a", trouble="kill"))
    bench.start()
    bench.run([ONE], rounds=1)
    assert "SIGKILL" in bench.results.missing["a"]


def test_a_worker_that_hangs_is_ended_after_the_timeout_and_the_rest_goes_on(fakes):
    bench = fakes.bench(fakes.engine("a", trouble="hang"), fakes.engine("b"), timeout=3.0)
    bench.start()
    pid = bench._workers["a"].pid
    started = time.monotonic()
    bench.run([ONE], rounds=2)
    assert time.monotonic() - started < 30
    assert "no answer to 'decode' within 3 s" in bench.results.missing["a"]
    assert gone(pid)
    assert len(bench.results.samples["one"]["b"]) == 2


def test_a_worker_that_babbles_is_ended(fakes):
    bench = fakes.bench(fakes.engine("a", trouble="babble"))
    bench.start()
    bench.run([ONE], rounds=1)
    assert "makes no sense: 'what?'" in bench.results.missing["a"]


def test_a_refused_task_is_not_asked_again_but_the_engine_stays(fakes):
    bench = fakes.bench(fakes.engine("a", trouble="refuse"))
    bench.start()
    bench.run([ONE], rounds=3)
    assert bench.results.refused["one"] == {"a": "ValueError: not today"}
    assert turns(fakes.log) == ["a"] and "a" not in bench.results.missing


def test_a_probe_that_was_too_short_does_not_cost_an_engine_its_turns(fakes):
    bench = fakes.bench(fakes.engine("a", trouble="refuse", to_turn=1))
    bench.start()
    bench.warm_up([ONE])
    bench.run([ONE], rounds=2)
    assert bench.results.refused == {} and len(bench.results.samples["one"]["a"]) == 2


def test_an_engine_that_cannot_start_is_missing_and_the_rest_goes_on(fakes):
    def launch(engine):
        if engine.name == "a":
            raise ValueError("it needs a GGUF file")
        return fakes.launch(engine)

    bench = fakes.bench(*(fakes.engine(n) for n in "ab"), fakes.engine("c", trouble="refuse", trouble_at="start"), launch=launch)
    bench.start()
    bench.run([ONE], rounds=1)
    assert bench.results.missing == {"a": "it needs a GGUF file", "c": "ValueError: not today"}
    assert list(bench.results.samples["one"]) == ["b"]


def test_no_process_is_left_after_close(fakes):
    bench = fakes.bench(fakes.engine("a"), fakes.engine("b", trouble="hang"))
    bench.start()
    pids = [worker.pid for worker in bench._workers.values()]
    bench.close()
    bench.close()
    assert all(gone(pid) for pid in pids)


def test_what_an_engine_starts_ends_with_it(tmp_path):
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); input()"
    worker = Worker([sys.executable, "-c", code])
    child = int(worker._lines.get(timeout=20))
    worker.close()
    deadline = time.monotonic() + 10
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.05)
        try:  # an orphan may wait for somebody to reap it
            if "\nState:\tZ" in open(f"/proc/{child}/status").read():
                return
        except OSError:
            return
    assert gone(child)


def test_a_python_that_is_not_there_is_a_lost_worker():
    with pytest.raises(WorkerLost, match="cannot start /no/such/python"):
        Worker(["/no/such/python", "x.py"])


def test_a_lost_worker_stays_lost(fakes):
    worker, start = fakes.launch(fakes.engine("a", trouble="die"))
    worker.ask(start, 20)
    for _ in range(2):
        with pytest.raises(WorkerLost):
            worker.ask({"task": "decode", "new": 1}, 20)


def test_a_worker_answers_again_after_it_refused(fakes):
    worker, start = fakes.launch(fakes.engine("a", trouble="refuse"))
    worker.ask(start, 20)
    for _ in range(2):
        with pytest.raises(WorkerError, match="not today"):
            worker.ask({"task": "decode", "new": 1}, 20)
    worker.close()


def test_agreement_counts_leading_tokens_equal_to_the_reference(fakes):
    reference = fakes.engine("reference", tokens=[5, 6, 7, 8])
    bench = fakes.bench(fakes.engine("minillm", tokens=[5, 6, 7, 8]), fakes.engine("b", tokens=[5, 6, 9, 8]))
    bench.start()
    bench.check(reference, new=4)
    assert bench.results.agreement == {"minillm": [4, 4], "b": [2, 2]} and bench.results.checked_tokens == 4


def test_every_engine_gets_the_same_prompts_in_every_run():
    for measure in MEASURES.values():
        task = measure.task(1000)
        assert task == measure.task(1000)
        assert len(task["prompts"]) == (measure.new + 1 if measure.kind == "prefill" else measure.rows)
        assert all(0 <= t < 1000 for p in task["prompts"] for t in p)
        assert len({tuple(p) for p in task["prompts"]}) == len(task["prompts"])


def test_the_mix_has_the_lengths_of_the_issue():
    task = MEASURES["mix32"].task(49152)
    assert len(task["prompts"]) == len(task["new"]) == 32
    assert all(16 <= len(p) <= 256 for p in task["prompts"]) and all(16 <= n <= 128 for n in task["new"])
    assert len({len(p) for p in task["prompts"]}) > 20


def test_values_are_tokens_per_second():
    assert ONE.value(ONE.task(9), {"seconds": 2.0}) == 5.0
    assert Measure("d", "decode", "", 8, 4, 10).value({}, {"seconds": 2.0}) == 40.0
    assert Measure("p", "prefill", "", 1, 512, 3).value({}, {"seconds": 2.0}) == 256.0
    assert Measure("m", "mix", "", 2, 16, 16).value({"new": [3, 5]}, {"seconds": 2.0}) == 4.0
