"""Studies: one technique on against off, in one process, round after round. Each is a module in ``minillm.bench.studies``."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import importlib
import json
import pkgutil
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping, Protocol, Sequence

import psutil
import torch

from minillm.checking import check_whole
from minillm.perf.hardware import measure_machine

FORMAT = 1


@dataclass(frozen=True)
class Bar:
    """A number made of one round's measurements, and what it is to be.

    value: {measurement: seconds or count} of a round → the number. at_least, at_most: the bar; without one it is reported only.
    """

    name: str
    value: Callable[[Mapping[str, float]], float]
    at_least: float | None = field(default=None, kw_only=True)
    at_most: float | None = field(default=None, kw_only=True)

    def judge(self, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Median over the rounds, every round's value, and whether the median meets the bar (None without one)."""
        values = [self.value(r) for r in rounds]
        median = statistics.median(values)
        limits = [median >= self.at_least] if self.at_least is not None else []
        limits += [median <= self.at_most] if self.at_most is not None else []
        return {
            "name": self.name, "median": median, "rounds": values, "at_least": self.at_least, "at_most": self.at_most,
            "met": all(limits) if limits else None,
        }  # fmt: skip


class Study(Protocol):
    """What a module in ``minillm.bench.studies`` holds; its docstring says what is compared."""

    TITLE: str
    ROUNDS: int
    BARS: Sequence[Bar]

    def prepare(self) -> Any:
        """Load and warm up; what it returns goes to every round."""
        ...

    def measure(self, state: Any, turn: int) -> dict[str, float]:
        """One round: every variant once, in an order that rotates with ``turn``. Seconds and counts by name."""
        ...


def names() -> list[str]:
    """The studies there are."""
    from minillm.bench import studies

    return sorted(module.name for module in pkgutil.iter_modules(studies.__path__))


def check_name(name: str) -> None:
    """ValueError for a study that there is not."""
    if name not in names():
        raise ValueError(f"there is no study {name!r}; there are {', '.join(names())}")


def load(name: str) -> Study:
    """A study by its name."""
    check_name(name)
    study: Any = importlib.import_module(f"minillm.bench.studies.{name}")
    return study


def run(study: Study, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All rounds of a study, and its bars. busy: the share of the processor that others used before each round."""
    say(study.TITLE)
    state = study.prepare()
    measured: list[dict[str, float]] = []
    busy: list[float] = []
    for turn in range(rounds):
        gc.collect()
        busy.append(psutil.cpu_percent(interval=0.5) / 100)
        measured.append(study.measure(state, turn))
        say(f"  round {turn + 1} of {rounds}: " + "  ".join(f"{bar.value(measured[-1]):.3g}" for bar in study.BARS))
    return {"title": study.TITLE, "bars": [bar.judge(measured) for bar in study.BARS], "rounds": measured, "busy": busy}


def table(found: Mapping[str, Any]) -> list[str]:
    """A study's bars as lines of text: the median, the rounds' range, the bar."""
    lines = []
    for bar in found["bars"]:
        limit = f"at least {bar['at_least']:g}" if bar["at_least"] is not None else ""
        limit += f"at most {bar['at_most']:g}" if bar["at_most"] is not None else ""
        verdict = {None: "", True: "met", False: "NOT MET"}[bar["met"]]
        low, high = min(bar["rounds"]), max(bar["rounds"])
        lines.append(f"  {bar['name']:<64} {bar['median']:9.3g}  ({low:.3g} to {high:.3g})  {limit:14} {verdict}".rstrip())
    return lines


def run_studies(
    chosen: Sequence[str], rounds: int | None = None, target: Path | None = None, say: Callable[[str], None] = print
) -> bool:
    """Run the studies of these names ("all": every one); True if every bar was met.

    rounds: None takes each study's own number. target: the report, written anew after each study. ValueError for a wrong name or
    number, before the first one runs."""
    for name in set(chosen) - {"all"}:
        check_name(name)
    studies = {name: load(name) for name in (names() if "all" in chosen else chosen)}
    if rounds is not None:
        check_whole("rounds", rounds)
    report: dict[str, Any] = {
        "what": "minillm bench --study", "format": FORMAT,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": dataclasses.asdict(measure_machine()),
        "studies": {},
    }  # fmt: skip
    met = True
    for name, study in studies.items():
        found = report["studies"][name] = run(study, study.ROUNDS if rounds is None else rounds, say)
        met = met and all(bar["met"] is not False for bar in found["bars"])
        say("\n".join(table(found)))
        if target is not None:
            target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return met
