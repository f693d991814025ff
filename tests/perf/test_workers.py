from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Iterator

import pytest
import torch

from minillm import SamplingParams
from minillm.perf import workers
from minillm.perf.workers import release_workers
from minillm.server.serve import serving

from ..strategies import tiny_engine, tiny_llm

TASKS = Path("/proc/self/task")
gnu = pytest.mark.skipif(not workers._pausers(), reason="torch does not use GNU's OpenMP here")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    release_workers()


def compute() -> float:
    return float(torch.ones(1 << 20).exp_().sum())


def threads() -> int:
    return len(os.listdir(TASKS))


@gnu
def test_a_parallel_operator_leaves_a_worker_behind_and_releasing_ends_it() -> None:
    release_workers()
    before = threads()
    compute()
    assert threads() == before + 1
    release_workers()
    assert threads() == before


@gnu
def test_releasing_leaves_the_workers_of_other_threads_alone() -> None:
    release_workers()
    before, ready, go = threads(), threading.Event(), threading.Event()
    found: list[float] = []

    def other() -> None:
        found.append(compute())
        ready.set()
        go.wait()
        found.append(compute())

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    release_workers()
    assert threads() == before + 2, "the thread and its worker"
    go.set()
    thread.join()
    assert found[0] == found[1] == compute()


def test_results_are_the_same_after_a_release() -> None:
    first = compute()
    release_workers()
    release_workers()
    assert compute() == first


def test_a_system_without_a_list_of_libraries_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workers, "MAPS", tmp_path / "none")
    workers._pausers.cache_clear()
    try:
        release_workers()
        assert workers._pausers() == ()
    finally:
        workers._pausers.cache_clear()


@gnu
@pytest.mark.parametrize("who", ["overlap", "server"])
def test_whoever_hands_the_model_to_another_thread_gives_up_its_own_workers(who: str) -> None:
    release_workers()
    before = set(os.listdir(TASKS))
    compute()
    mine = set(os.listdir(TASKS)) - before
    assert mine, "this thread has got a worker"
    if who == "overlap":
        engine = tiny_engine(overlap=True)
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
        while engine.has_work:
            engine.step()
    else:
        with serving(tiny_llm()):
            pass
    assert mine.isdisjoint(os.listdir(TASKS)), "the worker of this thread has ended"
