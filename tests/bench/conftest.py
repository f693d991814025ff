"""Benches of fake engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm.bench.engines import Engine
from minillm.bench.rounds import Bench
from minillm.bench.worker import Worker

FAKE = Path(__file__).parent / "fake_worker.py"
KINDS = frozenset({"decode", "prefill", "mix", "overhead"})


class Fakes:
    """Makes fake engines and benches of them; remembers what was said, and the order of all turns."""

    def __init__(self, folder: Path):
        self.folder, self.fake, self.said, self.benches = folder, FAKE, list[str](), list[Bench]()

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def engine(self, name: str, family: str | None = None, **options: Any) -> Engine:
        options = {"name": name, "log": str(self.folder / "log"), **options}
        methods = options.pop("methods", ("",))
        return Engine(name, family or name, "fake", KINDS, options=options, methods=methods, weight_bytes=4)

    def bench(self, *engines: Engine, timeout: float = 20.0, launch: Callable[[Engine], Any] | None = None) -> Bench:
        bench = Bench(engines, launch or self.launch, vocab_size=100, timeout=timeout, say=self.said.append)
        self.benches.append(bench)
        return bench

    def launch(self, engine: Engine) -> tuple[Worker, dict[str, Any]]:
        return Worker([sys.executable, str(FAKE)]), self.start_task(engine)

    def start_task(self, engine: Engine, *_: Any) -> dict[str, Any]:
        return {"task": "start", "options": dict(engine.options)}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    monkeypatch.setattr("minillm.bench.rounds.SETTLE", 0.0)
    monkeypatch.setattr("minillm.bench.rounds.psutil.cpu_percent", lambda interval: 4.0)
    made = Fakes(tmp_path)
    yield made
    for bench in made.benches:
        bench.close()
